"""Memory as tensors: every dtype and shape, and memory that stays while a tensor is over it."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from omni_rt.wire.arena import Arena, BlockReader, BlockWriter
from omni_rt.wire.tensors import ITEMSIZE_BYTES, nbytes_of
from omni_rt_workers.tensors import as_tensor, dtype_name, empty, to_bytes

SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5)]


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(1, 1 << 20)
    yield arena
    arena.close()


def _sample(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    values = torch.arange(math.prod(shape)).reshape(shape) % 2
    return values.to(empty(dtype, ()).dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ITEMSIZE_BYTES)
def test_a_tensor_crosses_an_arena_bit_by_bit(
    arena: Arena, dtype: str, shape: tuple[int, ...]
) -> None:
    sent = _sample(dtype, shape)
    place = BlockWriter(arena, epoch=1).reserve(nbytes_of(dtype, shape))
    assert place
    as_tensor(place.view, dtype, shape).copy_(sent)
    view = BlockReader(arena).open(place.offset, place.generation, place.nbytes)
    got = as_tensor(view, dtype, shape)
    assert (got.shape, dtype_name(got.dtype)) == (sent.shape, dtype)
    assert to_bytes(got) == to_bytes(sent)
    assert len(to_bytes(got)) == nbytes_of(dtype, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ITEMSIZE_BYTES)
def test_bytes_of_a_message_become_a_tensor_without_a_warning(
    dtype: str, shape: tuple[int, ...]
) -> None:
    sent = _sample(dtype, shape)
    got = as_tensor(memoryview(to_bytes(sent)), dtype, shape)
    assert (got.shape, dtype_name(got.dtype)) == (sent.shape, dtype)
    assert to_bytes(got) == to_bytes(sent)


def test_a_tensor_over_an_arena_is_the_arenas_memory(arena: Arena) -> None:
    place = BlockWriter(arena, epoch=1).reserve(16)
    assert place
    tensor = as_tensor(place.view, "float32", (4,))
    tensor.fill_(1.5)
    assert torch.frombuffer(bytearray(place.view), dtype=torch.float32).tolist() == [1.5] * 4
    first = as_tensor(arena.view(0, 64), "uint8", (64,))
    assert tensor.data_ptr() == first.data_ptr() + place.offset


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).T,
        torch.arange(12, dtype=torch.bfloat16)[::3],
        torch.arange(4.0).expand(2, 4),
        torch.ones(3, requires_grad=True),
    ],
    ids=["transposed", "strided", "expanded", "with grad"],
)
def test_bytes_are_in_c_order_whatever_the_strides(tensor: torch.Tensor) -> None:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format)
    again = as_tensor(memoryview(to_bytes(tensor)), dtype_name(tensor.dtype), tuple(tensor.shape))
    assert torch.equal(again, flat)


def test_a_dtype_that_does_not_travel_is_refused() -> None:
    with pytest.raises(KeyError):
        dtype_name(torch.complex64)


def test_memory_stays_under_a_live_tensor_and_goes_with_the_last_one() -> None:
    arena = Arena.create(7, 1 << 20)
    place = BlockWriter(arena, epoch=1).reserve(4096)
    assert place
    tensor = as_tensor(place.view, "uint8", (4096,))
    part = tensor.fill_(9)[100:200]
    del place, tensor
    arena.close()
    del arena
    gc.collect()
    assert part.tolist() == [9] * 100
    assert "omni-rt-7" in Path("/proc/self/maps").read_text()
    del part
    gc.collect()
    assert "omni-rt-7" not in Path("/proc/self/maps").read_text()
