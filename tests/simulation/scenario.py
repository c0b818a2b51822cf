"""One seeded run of the whole runtime: clients, faults, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from omni_rt.config import PipelineConfig
from omni_rt.errors import (
    Cancelled,
    DeadlineExceeded,
    OmniError,
    Overloaded,
    StageFailed,
    StageUnavailable,
)
from omni_rt.request import Data, Done, Request, Text
from omni_rt.runtime.core import Core
from omni_rt.runtime.omni import AsyncOmni
from omni_rt.runtime.supervisor import WorkerState
from tests.simulation.devices import Devices
from tests.simulation.pipelines import Expected, draw, graph_of
from tests.simulation.virtual import VirtualLoop
from tests.simulation.workers import Fate, World

_LIMIT_S = 600.0  # virtual; a request that is still there then hangs


@dataclass
class Report:
    seed: int
    outcomes: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    deaths: int = 0
    counters: dict[str, int] = field(default_factory=dict)

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


def run(seed: int) -> Report:
    """Run the scenario of a seed to its end. The report's `problems` must be empty."""
    loop = VirtualLoop()
    report = Report(seed)
    loop.set_exception_handler(
        lambda _, context: report.problems.append(
            f"unhandled: {context.get('exception')!r} {context['message']}"
        )
    )
    try:
        loop.run_until_complete(asyncio.wait_for(_scenario(loop, report), 100 * _LIMIT_S))
        left = asyncio.all_tasks(loop)
        if left:
            report.problems.append(f"tasks left: {left}")
    except AssertionError as error:
        report.problems.append(f"{type(error).__name__}: {error}")
    finally:
        loop.close()
    return report


def has_devices(seed: int) -> bool:
    """Whether the stages of this run are on devices."""
    return seed % 10 in (3, 6, 9)


async def _scenario(loop: VirtualLoop, report: Report) -> None:
    rng = random.Random(report.seed)
    chance = random.Random(f"devices {report.seed}") if has_devices(report.seed) else None
    config = draw(rng, chance)
    fate = Fate(rng)
    if rng.random() < 0.7:
        fate.die = rng.choice([0.0, 0.002, 0.01, 0.05])
        fate.stall = rng.choice([0.0, 0.0, 0.01])
        fate.slow = rng.choice([0.0, 0.05])
        fate.latency_s = rng.choice([0.0001, 0.001, 0.02])
    world = World(loop, fate)
    if chance is not None:
        world.devices = Devices(loop, chance)
    omni = AsyncOmni(config, channel=world, launcher=world)
    await omni.start()
    try:
        await omni.ready()
    except StageUnavailable as error:
        if not fate.deaths:
            report.problems.append(f"did not load without a fault: {error}")
    else:
        async with asyncio.TaskGroup() as group:
            for number in range(rng.choice([rng.randint(1, 12), 30])):
                client = Client(omni, config, fate, report, number, random.Random(rng.random()))
                group.create_task(client.run())
        fate.die = fate.stall = 0.0
        await asyncio.sleep(60)  # restarts end, late frames arrive, aborts are acted upon
        _check_settled(omni, world, report)
    await omni.close(0)
    _check_closed(omni, world, report)
    report.deaths = fate.deaths + fate.stalls
    report.counters = dict(omni.status().counters)
    if world.devices is not None:
        report.counters["device_blocks"] = world.devices.blocks
    report.problems += world.problems


class Client:
    """One caller: submits, reads at its own speed, perhaps gives up."""

    def __init__(
        self,
        omni: AsyncOmni,
        config: PipelineConfig,
        fate: Fate,
        report: Report,
        number: int,
        rng: random.Random,
    ) -> None:
        self.omni = omni
        self.config = config
        self.fate = fate
        self.report = report
        self.number = number
        self.rng = rng
        self.quits = rng.random() < 0.25
        self.slow = rng.random() < 0.2
        self.deadline_s = rng.uniform(0.05, 1.5) if rng.random() < 0.2 else None
        self.got: dict[str, list[bytes]] = {}
        self.ends = 0

    async def run(self) -> None:
        rng = self.rng
        await asyncio.sleep(rng.uniform(0, 1.0))
        steps = rng.choice([None, None, 1, 2, 7])
        names = sorted(self.config.outputs)
        wanted = tuple(rng.sample(names, rng.randint(1, len(names))))
        request = Request(
            prompt=f"prompt {self.number}",
            outputs=wanted,
            params={} if steps is None else {"steps": steps},
            priority=rng.choice([0, 0, 1]),
            deadline_s=self.deadline_s,
        )
        started = asyncio.get_running_loop().time()
        try:
            stream = self.omni.submit(request)
        except (Overloaded, StageUnavailable) as error:
            self._refused(error)
            return
        quitting = None
        if self.quits:
            quitting = asyncio.get_running_loop().call_later(
                rng.uniform(0, 0.8), self.omni.cancel, stream.id
            )
        outcome: object
        try:
            async with asyncio.timeout(_LIMIT_S):
                outcome = await self._read(stream)
        except TimeoutError:
            self._problem("it was neither answered nor ended")
            return
        except OmniError as error:
            outcome = error
        finally:
            if quitting is not None:
                quitting.cancel()
        elapsed = asyncio.get_running_loop().time() - started
        self._judge(
            outcome,
            Expected(self.config, graph_of(self.config).plan(wanted), request.prompt or "", steps),
            elapsed,
        )

    async def _read(self, stream: object) -> object:
        done: Done | None = None
        async with stream as outputs:  # type: ignore[attr-defined]
            async for output in outputs:
                if isinstance(output, Text):
                    self.got.setdefault(output.output, []).append(output.text.encode())
                elif isinstance(output, Data):
                    self.got.setdefault(output.output, []).append(output.data)
                elif isinstance(output, Done):
                    done = output
                    self.ends += 1
                if self.quits and self.rng.random() < 0.05:
                    return "left early"
                if self.slow:
                    await asyncio.sleep(self.rng.uniform(0, 0.3))
            if outputs._mailbox.items:
                self._problem(f"it got something after its end: {outputs._mailbox.items}")
        return done

    def _refused(self, error: OmniError) -> None:
        self.report.count(error.kind)
        if isinstance(error, Overloaded) and self.omni.status().live < 3:
            self._problem(f"refused although there was room: {error}")
        if isinstance(error, StageUnavailable) and not self.fate.deaths + self.fate.stalls:
            self._problem(f"refused without a fault: {error}")

    def _judge(self, outcome: object, expected: Expected, elapsed: float) -> None:
        faults = self.fate.deaths + self.fate.stalls
        wanted = {name: pieces for name, pieces in expected.outputs().items() if pieces}
        for name, pieces in self.got.items():
            if pieces != wanted.get(name, [])[: len(pieces)]:
                right = [piece[:6] for piece in wanted.get(name, [])]
                self._problem(f"{name} is wrong: {[p[:6] for p in pieces]} instead of {right}")
        match outcome:
            case Done():
                self.report.count("done")
                if self.got != wanted:
                    self._problem(f"it is incomplete: {sorted(self.got)} of {sorted(wanted)}")
                if self.ends != 1:
                    self._problem(f"it ended {self.ends} times")
            case Cancelled() | "left early":
                self.report.count("cancelled")
                if not self.quits:
                    self._problem("it was cancelled by nobody")
            case DeadlineExceeded():
                self.report.count("deadline")
                if self.deadline_s is None or elapsed < self.deadline_s - 1e-6:
                    self._problem(f"its deadline passed early: {elapsed} of {self.deadline_s}")
            case StageFailed() | StageUnavailable():
                self.report.count("failed")
                if not faults:
                    self._problem(f"it failed without a fault: {outcome} {outcome.detail}")
            case _:
                self._problem(f"it ended with {outcome!r}")

    def _problem(self, what: str) -> None:
        self.report.problems.append(f"client {self.number}: {what}")


def _check_settled(omni: AsyncOmni, world: World, report: Report) -> None:
    core: Core = omni._core
    problems = report.problems
    if core.flows:
        problems.append(f"requests left: {core.flows}")
    if len(core.ledger):
        problems.append(f"leases left: {core.ledger._holders}")
    if core.pressure:
        problems.append(f"stalls left: {core.pressure}")
    if core.ledger._held or core.ledger._blocks_of:
        problems.append("the ledger's indices are not empty")
    if omni._mailboxes:
        problems.append(f"mailboxes left: {omni._mailboxes}")
    for stage in core.stages.values():
        if stage.waiting or stage.running or stage.members:
            problems.append(f"stage not empty: {stage} {stage.members}")
    for worker in core.supervisor.workers:
        if worker.state not in (WorkerState.READY, WorkerState.FAILED) and not worker.down:
            problems.append(f"{worker} did not come back")
    for sim in world.workers.values():
        if not sim._stuck:
            problems += sim.leftovers()
    counts = core.counters
    ended = (
        counts["finished"] + counts["failed"] + counts["cancelled"] + counts["deadline_exceeded"]
    )
    if counts["accepted"] != ended:
        problems.append(f"accepted {counts['accepted']}, ended {ended}: {counts}")


def _check_closed(omni: AsyncOmni, world: World, report: Report) -> None:
    if world.workers:
        report.problems.append(f"workers left: {sorted(world.workers)}")
    if world.devices is not None:
        machine = world.devices.machine
        if machine.allocations or machine.mappings or machine.streams:
            report.problems.append(f"device memory left: {machine.mappings}")
    if omni._handles or omni._arenas:
        report.problems.append(f"handles or arenas left: {omni._handles} {omni._arenas}")
