"""Between raw memory and torch, without a copy where none is needed."""

from __future__ import annotations

import torch

from omni_rt.wire.tensors import ITEMSIZE_BYTES

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def as_tensor(view: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over the view's memory, which it keeps mapped for as long as it lives.

    `torch.frombuffer` keeps the object it is given, but not the buffer that the object exports. So
    it is given the memoryview and never the mmap: the view holds the export, and `Arena.close()`
    leaves the memory where it is until the last tensor over it has gone. Nobody else may hold and
    `release()` that view.

    A read-only view (an inline payload) is copied: torch knows no read-only tensors, and warns of
    a buffer that it could write through. Views of arenas are writable for the same reason; a
    reader's tensor is read-only by contract.
    """
    if not len(view):
        return torch.empty(shape, dtype=_DTYPES[dtype])
    buffer = bytearray(view) if view.readonly else view
    return torch.frombuffer(buffer, dtype=_DTYPES[dtype]).view(shape)


def typed(memory: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A uint8 tensor, of any device, seen as what is in it."""
    return memory.view(_DTYPES[dtype]).view(shape)


def empty(dtype: str, shape: tuple[int, ...], device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.empty(shape, dtype=_DTYPES[dtype], device=device)


def dtype_name(dtype: torch.dtype) -> str:
    """Raises `KeyError` for dtypes that do not travel (complex, quantized, ...)."""
    return _NAMES[dtype]


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes in C order; for small or waiting ones, since it copies."""
    if not tensor.numel():
        return b""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy().data)
