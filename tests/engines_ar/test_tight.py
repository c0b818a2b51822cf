"""A key-value cache that does not hold all requests at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from .fakes import Loaded, loaded, prompts, task

if TYPE_CHECKING:
    from pathlib import Path

    from .fakes import Greedy

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[Loaded]:
    """Five blocks of 32 tokens; vLLM keeps one of them to itself."""
    with loaded(folder, vllm={"num_gpu_blocks_override": 5, "max_model_len": 128}) as made:
        yield made


def test_the_engine_sleeps_while_a_held_task_keeps_the_room_that_others_need(
    one: Loaded, greedy: Greedy
) -> None:
    large, other = prompts(1, 80, 80)[0], prompts(1, 40, 40, seed=2)[0]
    holder = task(large, max_tokens=20, ignore_eos=True)
    waiter = task(other, max_tokens=20, ignore_eos=True)
    one.engine.add(holder)
    one.engine.step()
    holder.held = True
    one.engine.add(waiter)
    assert not one.engine.idle
    one.engine.step()
    assert one.engine.idle
    assert waiter.request not in one.out.said
    holder.held = False
    assert not one.engine.idle
    one.run()
    assert one.out.said[holder.request].tokens == greedy(large, 20)
    assert one.out.said[waiter.request].tokens == greedy(other, 20)


def test_a_running_task_takes_the_room_of_a_held_one_with_less_priority(
    one: Loaded, greedy: Greedy
) -> None:
    given = prompts(2, 60, 60, seed=3)
    holder = task(given[0], max_tokens=20, ignore_eos=True)
    runner = task(given[1], max_tokens=60, ignore_eos=True, priority=1)
    one.engine.add(holder)
    one.engine.add(runner)
    one.engine.step()
    holder.held = True
    one.run()
    assert one.out.said[runner.request].tokens == greedy(given[1], 60)
    assert not one.out.said[holder.request].ended
    holder.held = False
    one.run()
    assert one.out.said[holder.request].tokens == greedy(given[0], 20)
    assert one.leftovers == {}


def test_an_abort_of_a_held_task_makes_room(one: Loaded, greedy: Greedy) -> None:
    large, other = prompts(1, 80, 80)[0], prompts(1, 40, 40, seed=2)[0]
    holder = task(large, max_tokens=20, ignore_eos=True)
    waiter = task(other, max_tokens=5, ignore_eos=True)
    one.engine.add(holder)
    one.engine.step()
    holder.held = True
    one.engine.add(waiter)
    one.engine.step()
    one.engine.abort(holder)
    one.run()
    assert one.out.said[waiter.request].tokens == greedy(other, 5)
    assert one.leftovers == {}
