"""Any sequence of reserve and free: no overlap, no hole that stays, nothing lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_rt.wire.arena import HEADER_BYTES, Arena, BlockReader, BlockWriter, Reservation

SIZE = 1 << 16

# A size to reserve, or which of the blocks that are out to free.
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, SIZE // 4)),
        st.tuples(st.just("reserve"), st.sampled_from([0, 1, 63, 64, 65, 4096])),
        st.tuples(st.just("free"), st.integers(0, 1000)),
    ),
    max_size=80,
)


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena.create(1, SIZE)
    yield arena
    arena.close()


@settings(max_examples=300, deadline=None, database=None)
@given(steps=_STEPS)
def test_blocks_never_overlap_and_all_of_the_arena_comes_back(
    arena: Arena, steps: list[tuple[str, int]]
) -> None:
    writer, reader = BlockWriter(arena, epoch=1), BlockReader(arena)
    out: list[tuple[Reservation, bytes]] = []
    for number, (what, value) in enumerate(steps):
        if what == "reserve" and (place := writer.reserve(value)):
            place.view[:] = bytes([number]) * value
            out.append((place, bytes([number]) * value))
        elif what == "free" and out:
            place, _ = out.pop(value % len(out))
            writer.free(place.offset, place.generation)
        _check(writer, reader, out)
    for place, _ in out:
        writer.free(place.offset, place.generation)
    assert (writer.in_use_bytes, len(writer)) == (0, 0)
    whole = writer.reserve(SIZE - HEADER_BYTES)
    assert whole is not None


def _check(writer: BlockWriter, reader: BlockReader, out: list[tuple[Reservation, bytes]]) -> None:
    """Every block out holds exactly what was written into it, on a boundary of 64 bytes."""
    end = 0
    for place, data in sorted(out, key=lambda each: each[0].offset):
        assert place.offset % 64 == 0
        assert place.offset - HEADER_BYTES >= end
        end = place.offset + place.nbytes
        assert reader.open(place.offset, place.generation, place.nbytes) == data
    assert end <= SIZE
    assert len({place.generation for place, _ in out}) == len(out) == len(writer)
    spans = [HEADER_BYTES + -(-place.nbytes // 64) * 64 for place, _ in out]
    assert writer.in_use_bytes == sum(spans)
