"""A step that raises: what the engine is afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from omni_rt.errors import StageFailed

from .fakes import Loaded, loaded, prompts, task

if TYPE_CHECKING:
    from pathlib import Path

    from .fakes import Greedy

pytestmark = pytest.mark.model

PLACES = ("before the forward", "after the forward", "before sampling", "after sampling")


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[Loaded]:
    with loaded(folder, vllm={"worker_cls": "tests.engines_ar.workers.FailingWorker"}) as made:
        yield made


def fail(one: Loaded, where: str) -> None:
    one.engine.core.call_worker("fail_once", where)


@pytest.mark.parametrize("steps", [0, 3], ids=["in the first step", "in a later step"])
@pytest.mark.parametrize("where", PLACES)
def test_new_requests_work_after_a_failed_step(
    one: Loaded, greedy: Greedy, where: str, steps: int
) -> None:
    given = prompts(3, 20, 40)
    tasks = [task(ids, max_tokens=12, ignore_eos=True, want=("tokens", "hidden")) for ids in given]
    for each in tasks:
        one.engine.add(each)
    for _ in range(steps):
        one.engine.step()
    fail(one, where)
    with pytest.raises(RuntimeError, match=f"made to fail {where}"):
        one.engine.step()
    for each in tasks:
        one.engine.abort(each)
    assert one.engine.idle
    assert one.leftovers == {}
    replies = one.run(*[task(ids, max_tokens=12, ignore_eos=True) for ids in given])
    assert [reply.tokens for reply in replies] == [greedy(ids, 12) for ids in given]


def test_a_request_that_ended_before_the_failed_step_is_forgotten_too(one: Loaded) -> None:
    ended, other = [task(ids, max_tokens=8, ignore_eos=True) for ids in prompts(2, 20, 40)]
    one.engine.add(ended)
    one.engine.add(other)
    one.engine.step()
    one.engine.abort(ended)
    fail(one, "before the forward")
    with pytest.raises(RuntimeError):
        one.engine.step()
    one.engine.abort(other)
    assert one.leftovers == {}


def test_an_engine_that_cannot_be_emptied_says_so_to_the_loop(
    one: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omni_rt_workers.engines.vllm_ar import core

    only = task(prompts(1, 20, 20)[0], max_tokens=8)
    one.engine.add(only)
    fail(one, "before the forward")
    monkeypatch.setattr(core.Core, "leftovers", {"blocks in use": 1})
    with pytest.raises(RuntimeError):
        one.engine.step()
    with pytest.raises(StageFailed, match="usable again"):
        one.engine.abort(only)
