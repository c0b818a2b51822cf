"""Hidden states on their way from the rank that has them to the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from omni_rt.errors import StaleRef
from omni_rt_workers.engines.vllm_ar.rows import Keeper, Ref, SharedRows, Watched

pytestmark = pytest.mark.model

ROWS = torch.arange(4096.0).view(8, 512)  # 16 KB


@pytest.fixture
def shared() -> Iterator[SharedRows]:
    made = SharedRows(40_000)  # room for two blocks of 16 KB
    yield made
    made.close()


@pytest.fixture
def keeper(shared: SharedRows) -> Keeper:
    made = Keeper()
    made.share(os.getpid(), shared.arena.fd, shared.arena.size_bytes)
    return made


def test_rows_are_handed_over_by_reference(shared: SharedRows, keeper: Keeper) -> None:
    part = keeper.copy(ROWS)
    given = keeper.give(part)
    assert isinstance(given, Ref)
    got = shared.open(given)
    assert torch.equal(got, ROWS)
    part.rows[3, 7] = -1
    assert got[3, 7] == -1


def test_a_block_is_through_when_the_last_tensor_over_it_is_gone(
    shared: SharedRows, keeper: Keeper
) -> None:
    got = shared.open(keeper.give(keeper.copy(ROWS)))
    rest = got[4:]
    del got
    assert shared.through() == []
    del rest
    through = shared.through()
    assert shared.through() == []
    assert keeper.blocks == 1
    keeper.free(through)
    assert keeper.blocks == 0
    with pytest.raises(StaleRef):
        keeper.free(through)


def test_rows_that_find_no_room_are_given_as_they_are(shared: SharedRows, keeper: Keeper) -> None:
    parts = [keeper.copy(ROWS + number) for number in range(3)]
    given = [keeper.give(part) for part in parts]
    assert [isinstance(one, Ref) for one in given] == [True, True, False]
    assert all(torch.equal(shared.open(one), ROWS + number) for number, one in enumerate(given))


def test_kept_rows_outlive_the_buffer_they_came_in() -> None:
    buffer = torch.arange(12.0).view(6, 2)
    watched = Watched(next=3, end=7)
    watched.keep(0, buffer, Keeper())  # positions 0 to 5
    watched.keep(5, buffer, Keeper())  # 5 again, after a preemption, and on to 10
    buffer.zero_()
    rows = torch.cat([part.rows for part in watched.parts])
    assert rows[:, 0].tolist() == [6, 8, 10, 2]
    with pytest.raises(RuntimeError, match="positions 3 to 4 are missing"):
        Watched(next=3, end=7).keep(5, buffer, Keeper())


@pytest.mark.parametrize(
    ("end", "left", "blocks"), [(12, 12, 2), (9, 9, 2), (8, 8, 1), (3, 3, 1), (0, 0, 0)]
)
def test_rows_of_tokens_that_were_taken_back_are_dropped(
    keeper: Keeper, end: int, left: int, blocks: int
) -> None:
    watched = Watched(next=0, end=100)
    watched.keep(0, ROWS, keeper)
    watched.keep(8, ROWS[:4], keeper)
    watched.cut(end, keeper)
    assert sum(len(part.rows) for part in watched.parts) == watched.next == left
    assert keeper.blocks == blocks
