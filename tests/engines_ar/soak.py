"""Many requests, some of them aborted and some held, at moments that a seed decides."""

from __future__ import annotations

import gc
import hashlib
import os
import random
from dataclasses import dataclass

from omni_rt_workers.engine import Task

from .fakes import Loaded, Said, task

LIVE = 24  # at once; more than the engine's slots, so that some wait


@dataclass
class Plan:
    """What is asked in one request and what becomes of it."""

    ids: list[int]
    max_tokens: int
    stream: bool
    hidden: bool
    temperature: float
    seed: int
    abort_after: int | None  # steps since it was added
    hold_after: int | None
    hold_for: int

    def task(self) -> Task:
        return task(
            self.ids,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            stream=self.stream,
            want=("text", "tokens", "hidden") if self.hidden else ("text", "tokens"),
            temperature=self.temperature,
            seed=self.seed,
        )


def plans(count: int, seed: int, *, aborted: float = 0.3, held: float = 0.2) -> list[Plan]:
    dice = random.Random(seed)
    made = []
    for number in range(count):
        new = dice.randint(1, 24)
        made.append(
            Plan(
                ids=[dice.randrange(250) for _ in range(dice.randint(3, 90))],
                max_tokens=new,
                stream=dice.random() < 0.5,
                hidden=dice.random() < 0.7,
                temperature=dice.choice([0, 0, 0.9]),
                seed=number,
                abort_after=dice.randint(0, 30) if dice.random() < aborted else None,
                hold_after=dice.randint(0, 12) if dice.random() < held else None,
                hold_for=dice.randint(1, 25),
            )
        )
    return made


@dataclass
class Report:
    digests: dict[int, str]  # of what each request that ended gave, by its number
    aborted: int
    held: int
    steps: int
    rss_mb: list[float]  # after each tenth of the requests


def run(one: Loaded, given: list[Plan], *, disturbed: bool) -> Report:
    """All requests through the engine; without disturbance nobody is aborted or held."""
    report = Report({}, 0, 0, 0, [])
    waiting = list(enumerate(given))[::-1]
    live: dict[int, tuple[Task, int]] = {}  # with the step it was added before
    while waiting or live:
        while waiting and len(live) < LIVE:
            number, plan = waiting.pop()
            live[number] = (plan.task(), report.steps)
            one.engine.add(live[number][0])
        if not one.engine.idle:
            one.engine.step()
        report.steps += 1
        for number, (each, since) in list(live.items()):
            age = report.steps - since
            if one.out.said[each.request].ended:
                report.digests[number] = digest(one.out.said.pop(each.request))
                del live[number]
            elif disturbed and given[number].abort_after == age:
                one.engine.abort(each)
                one.out.said.pop(each.request)
                report.aborted += 1
                del live[number]
            elif disturbed:
                _hold(each, given[number], age, report)
        done = len(given) - len(waiting) - len(live)
        if done * 10 // len(given) > len(report.rss_mb):
            report.rss_mb.append(rss_mb())
        assert report.steps < 100 * len(given)
    one.run()
    return report


def _hold(each: Task, plan: Plan, age: int, report: Report) -> None:
    if plan.hold_after is None:
        return
    held = plan.hold_after <= age < plan.hold_after + plan.hold_for
    report.held += held and not each.held
    each.held = held


def digest(said: Said) -> str:
    assert said.reason == "length", said.error
    usage = {name: count for name, count in said.usage.items() if name != "cached_tokens"}
    found = hashlib.sha256(repr((said.text, said.text_tokens, usage)).encode())
    for port in sorted(said.chunks):
        found.update(said.tensor(port).numpy().tobytes())
    return found.hexdigest()


def rss_mb() -> float:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
