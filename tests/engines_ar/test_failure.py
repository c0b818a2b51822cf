"""A step that raises: who fails, and how the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_rt.errors import StageFailed
from omni_rt_workers.engine import Task

from .fakes import Loaded, Said, loaded, prompts, task

if TYPE_CHECKING:
    from pathlib import Path

    from .fakes import Greedy

pytestmark = pytest.mark.model

POISON = 251
PLACES = (
    "before the forward",
    "in the forward",
    "after the forward",
    "before sampling",
    "after sampling",
)
OPTIONS: dict[str, Any] = {
    "worker_cls": "tests.engines_ar.workers.FailingWorker",
    "scheduler_cls": "tests.engines_ar.workers.FailingScheduler",
    "max_num_batched_tokens": 32,  # prompts take several steps
}


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[Loaded]:
    with loaded(folder, hidden={"layer": -1, "rows": "all"}, vllm=OPTIONS) as made:
        yield made


@pytest.fixture(autouse=True)
def _healthy(one: Loaded) -> Iterator[None]:
    yield
    one.engine.core.call_worker("fail_on", "", -1)
    scheduler(one).where = ""


def scheduler(one: Loaded) -> Any:
    return one.engine.core._scheduler


@dataclass
class Run:
    """Eight requests, the fourth poisonous: some greedy, some sampled; some streamed, some not."""

    tasks: list[Task]
    one: Loaded

    @classmethod
    def make(cls, one: Loaded) -> Run:
        given = prompts(8, 20, 70)
        given[3] = prompts(1, 60, 60, seed=2)[0]
        given[3][45] = POISON
        tasks = [
            task(
                ids,
                max_tokens=12,
                ignore_eos=True,
                want=("tokens", "hidden"),
                stream=number % 2 == 0,
                temperature=0.8 if number % 3 == 1 else 0,
                seed=number,
            )
            for number, ids in enumerate(given)
        ]
        for each in tasks:
            one.engine.add(each)
        return cls(tasks, one)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.one.engine.step()

    def said(self) -> list[Said]:
        self.one.run()
        assert self.one.leftovers == {}
        return [self.one.out.said[each.request] for each in self.tasks]


@pytest.fixture(scope="module")
def undisturbed(one: Loaded) -> list[Said]:
    return Run.make(one).said()


def equal(said: Said, wanted: Said) -> bool:
    close = torch.allclose(said.tensor("hidden"), wanted.tensor("hidden"), rtol=0, atol=2e-5)
    return close and (said.tokens, said.usage) == (wanted.tokens, wanted.usage)


def blame(replies: list[Said], wanted: list[Said], why: str) -> None:
    """The fourth has failed, and only that one."""
    error = replies[3].error
    assert isinstance(error, StageFailed)
    assert why in str(error)
    for number in (0, 1, 2, 4, 5, 6, 7):
        assert equal(replies[number], wanted[number])


@pytest.mark.parametrize("steps", [0, 5, 16])
@pytest.mark.parametrize("where", PLACES)
def test_only_the_request_that_makes_steps_fail_fails(
    one: Loaded, undisturbed: list[Said], where: str, steps: int
) -> None:
    run = Run.make(one)
    run.step(steps)
    one.engine.core.call_worker("fail_on", where, POISON)
    if where == "in the forward" and steps == 16:  # its prompt is through: it never fails there
        assert all(map(equal, run.said(), undisturbed))
        return
    blame(run.said(), undisturbed, f"poisoned {where}")


@pytest.mark.parametrize("steps", [0, 5, 16])
@pytest.mark.parametrize("where", [place for place in PLACES if place != "in the forward"])
def test_a_step_that_fails_once_costs_nobody(
    one: Loaded, undisturbed: list[Said], where: str, steps: int
) -> None:
    run = Run.make(one)
    run.step(steps)
    one.engine.core.call_worker("fail_once", where)
    assert all(map(equal, run.said(), undisturbed))


@pytest.mark.parametrize("steps", [0, 5, 16])
@pytest.mark.parametrize("where", ["in schedule", "in update_from_output", "at the end of booking"])
def test_a_request_that_the_scheduler_fails_on_fails_alone(
    one: Loaded, undisturbed: list[Said], where: str, steps: int
) -> None:
    run = Run.make(one)
    run.step(steps)
    scheduler(one).poison, scheduler(one).where = POISON, where
    blame(run.said(), undisturbed, f"poisoned {where}")


def test_a_request_whose_end_was_booked_in_the_failed_step_ends_all_the_same(
    one: Loaded, greedy: Greedy
) -> None:
    given = prompts(2, 10, 10, seed=4)
    given[0][5] = POISON
    bad, good = task(given[0], max_tokens=9), task(given[1], max_tokens=4, ignore_eos=True)
    one.engine.add(bad)
    one.engine.add(good)
    for _ in range(3):
        one.engine.step()
    scheduler(one).poison, scheduler(one).where = POISON, "at the end of booking"
    one.engine.step()
    assert not one.out.said[good.request].ended
    one.run()
    assert isinstance(one.out.said[bad.request].error, StageFailed)
    assert one.out.said[good.request].tokens == greedy(given[1], 4)
    assert one.leftovers == {}


def test_a_seed_gives_the_same_whatever_the_steps_of_its_prompt(one: Loaded) -> None:
    ids, other = prompts(2, 60, 60)
    sampled = [task(ids, max_tokens=6, ignore_eos=True, temperature=1.0, seed=5) for _ in range(2)]
    (alone,) = one.run(sampled[0])
    beside, _ = one.run(sampled[1], task(other), join_at=(1, 0))  # other bounds of steps
    assert beside.tokens == alone.tokens


def test_an_end_that_the_failed_step_should_have_told_is_told_again(one: Loaded) -> None:
    ended, other = [task(ids, max_tokens=8, ignore_eos=True) for ids in prompts(2, 20, 40)]
    one.engine.add(ended)
    one.engine.add(other)
    one.engine.step()
    one.engine.step()
    one.engine.abort(ended)
    one.engine.core.call_worker("fail_once", "before the forward")
    one.run()
    assert one.out.said[other.request].reason == "length"
    assert one.leftovers == {}


def test_a_held_request_is_not_stepped_while_the_culprit_is_searched(
    one: Loaded, undisturbed: list[Said]
) -> None:
    run = Run.make(one)
    run.step(14)
    run.tasks[0].held = True
    before = len(one.out.said[run.tasks[0].request].chunks["tokens"])
    one.engine.core.call_worker("fail_on", "after the forward", POISON)
    one.run()
    assert len(one.out.said[run.tasks[0].request].chunks["tokens"]) == before
    run.tasks[0].held = False
    blame(run.said(), undisturbed, "poisoned")


def test_requests_come_and_go_while_the_culprit_is_searched(
    one: Loaded, undisturbed: list[Said]
) -> None:
    run = Run.make(one)
    run.step(14)
    one.engine.core.call_worker("fail_on", "after the forward", POISON)
    run.step(2)  # the search has begun
    for gone in (run.tasks[2], run.tasks[5]):
        one.engine.abort(gone)
    late = task(prompts(1, 30, 30, seed=8)[0], max_tokens=5, ignore_eos=True)
    one.engine.add(late)
    replies = run.said()
    assert one.out.said[late.request].reason == "length"
    assert isinstance(replies[3].error, StageFailed)
    assert [replies[number].ended for number in (2, 5)] == [False, False]
    assert all(equal(replies[number], undisturbed[number]) for number in (0, 1, 4, 6, 7))


def test_an_abort_of_the_culprit_ends_the_search(one: Loaded, undisturbed: list[Said]) -> None:
    run = Run.make(one)
    run.step(14)
    one.engine.core.call_worker("fail_on", "after the forward", POISON)
    run.step(1)
    one.engine.abort(run.tasks[3])
    replies = run.said()
    assert not replies[3].ended
    assert all(equal(replies[number], undisturbed[number]) for number in (0, 1, 2, 4, 5, 6, 7))


@pytest.mark.parametrize(
    ("error", "sticky"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("device-side assert triggered"), True),
        (TimeoutError("RPC call to execute_model timed out."), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), False),
        (ValueError("token 7 is not one"), False),
    ],
)
def test_what_only_a_new_process_mends_is_told_apart(error: Exception, sticky: bool) -> None:
    from omni_rt_workers.engines.vllm_ar import failure

    assert failure.is_sticky(error) == sticky
