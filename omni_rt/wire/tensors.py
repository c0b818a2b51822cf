"""References to tensors, as they travel in messages. The bytes stay where they were written.

A ref names the memory (`arena` or `pool`), the place in it and the generation of that place, so
that a reader can tell a block that has been reused since (`StaleRef`) from the one meant.
dtype names are torch's without the prefix ("float32", "bfloat16", "uint8"). All is C-contiguous.
"""

from __future__ import annotations

import math

import msgspec

# Bytes of a tensor up to which it travels inside the message. Measured by bench/handoff.py: the
# crossover between inline and arena lies between 4 and 16 KB; inline needs no lease.
INLINE_LIMIT_BYTES = 4096

ITEMSIZE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class Inline(msgspec.Struct, frozen=True, tag="i", array_like=True):
    """A small tensor, its bytes in the message."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


class Block(msgspec.Struct, frozen=True, tag="b", array_like=True):
    """A tensor in a shared-memory arena (transport `shm`)."""

    arena: int  # arena id, unique in one run of main
    offset: int  # bytes from the arena's start to the tensor's first byte
    generation: int  # of the block; differs after every reuse
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


class DeviceBlock(msgspec.Struct, frozen=True, tag="d", array_like=True):
    """A tensor in a device pool shared by IPC (transport `cuda`)."""

    pool: int  # pool id, from the same number range as arena ids
    offset: int  # bytes from the pool's start
    generation: int
    slot: int  # index of the slot's events (written, read)
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


class Local(msgspec.Struct, frozen=True, tag="l", array_like=True):
    """A tensor object kept by the worker that hosts both ends of the edge (transport `local`)."""

    arena: int  # id of the worker's arena: says whose table holds the object
    offset: int  # key in that table; never reused
    generation: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


TensorRef = Inline | Block | DeviceBlock | Local


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    return ITEMSIZE_BYTES[dtype] * math.prod(shape)
