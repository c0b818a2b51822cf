"""vLLM scheduling one step ahead of the results, as it does on CUDA: failed steps, held requests.

On CPU vLLM does not run ahead by itself. Here its core is given the queue that it would have, so
each result is booked one step late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from omni_rt.errors import StageFailed

from . import soak
from .fakes import Loaded, Said, loaded, prompts, task
from .test_failure import OPTIONS, PLACES, POISON, Run, blame, equal

if TYPE_CHECKING:
    from pathlib import Path

    from .fakes import Greedy

pytestmark = pytest.mark.model

SCHEDULER = "omni_rt_workers.engines.vllm_ar.scheduler"


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[Loaded]:
    vllm = {**OPTIONS, "scheduler_cls": f"{SCHEDULER}.OmniARAsyncScheduler"}
    with loaded(folder, max_batch=16, hidden={"layer": -1, "rows": "all"}, vllm=vllm) as made:
        core = made.engine.core._llm.engine_core.engine_core
        core.batch_queue_size, core.batch_queue = 2, deque(maxlen=2)
        core.step_fn = core.step_with_batch_queue
        yield made


@pytest.fixture(autouse=True)
def _healthy(one: Loaded) -> Iterator[None]:
    yield
    one.engine.core.call_worker("fail_on", "", -1)


@pytest.fixture(scope="module")
def undisturbed(one: Loaded) -> list[Said]:
    return Run.make(one).said()


def test_results_come_a_step_late_and_are_right(one: Loaded, greedy: Greedy) -> None:
    ids = prompts(1, 20, 20)[0]
    each = task(ids, max_tokens=3, ignore_eos=True, stream=True)
    one.engine.add(each)
    one.engine.step()
    assert not one.out.said[each.request].chunks
    one.run()
    assert one.out.said[each.request].tokens == greedy(ids, 3)


@pytest.mark.parametrize("steps", [0, 5, 16])
@pytest.mark.parametrize("where", PLACES)
def test_only_the_request_that_makes_steps_fail_fails(
    one: Loaded, undisturbed: list[Said], where: str, steps: int
) -> None:
    run = Run.make(one)
    run.step(steps)
    one.engine.core.call_worker("fail_on", where, POISON)
    replies = run.said()
    if where == "in the forward" and not isinstance(replies[3].error, StageFailed):
        assert steps == 16
        assert all(map(equal, replies, undisturbed))
        return
    blame(replies, undisturbed, f"poisoned {where}")


@pytest.mark.parametrize("steps", [0, 5, 16])
@pytest.mark.parametrize("where", [place for place in PLACES if place != "in the forward"])
def test_a_step_that_fails_once_costs_nobody(
    one: Loaded, undisturbed: list[Said], where: str, steps: int
) -> None:
    run = Run.make(one)
    run.step(steps)
    one.engine.core.call_worker("fail_once", where)
    assert all(map(equal, run.said(), undisturbed))


def test_survivors_are_what_they_are_without_aborts(one: Loaded) -> None:
    given = soak.plans(60, seed=3)
    wanted = soak.run(one, given, disturbed=False)
    report = soak.run(one, given, disturbed=True)
    assert report.aborted > 10
    assert [n for n, found in report.digests.items() if found != wanted.digests[n]] == []
    assert one.leftovers == {}
