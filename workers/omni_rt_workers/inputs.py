"""The tensors a task was handed, and the leases on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from omni_rt.errors import ProtocolError, StaleRef
from omni_rt.wire.messages import Payload, TextPiece
from omni_rt.wire.tensors import Block, DeviceBlock, Inline, Local
from omni_rt_workers.cuda.reader import OpenBlock
from omni_rt_workers.memory import Memory, torch_side

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Reshape = Callable[["torch.Tensor"], "torch.Tensor"]
"""What an edge's `via:` names: called on each tensor, in the consumer's worker."""

Lease = tuple[int, int, int]
"""(arena or pool id, offset, generation), as `Released` gives it back."""


class TaskInputs:
    """`engine.Inputs` over the refs that main forwarded. Every ref is a lease to give back."""

    def __init__(
        self,
        memory: Memory,
        whole: dict[str, list[Payload | TextPiece]],
        streams: tuple[str, ...],
        via: dict[str, Reshape],
        released: list[Lease],
    ) -> None:
        self._memory = memory
        self._released = released  # the loop's: goes to main with the next message
        self._via = via
        self._refs: dict[str, list[Payload | TextPiece | None]] = {
            port: list(refs) for port, refs in whole.items()
        }
        self._arrived = {port: len(refs) for port, refs in whole.items()}
        self._open = set(streams)
        self._expected = dict.fromkeys(streams, 0)
        self._blocks: dict[tuple[str, int], OpenBlock] = {}  # (port, place among its refs)
        for port in streams:
            self._refs.setdefault(port, [])

    def feed(self, port: str, seq: int, data: Payload | TextPiece | None, last: bool) -> None:
        if port not in self._open or seq != self._expected[port]:
            raise ProtocolError(
                f"chunk {seq} of input '{port}' came where {self._expected.get(port)} was due"
            )
        self._expected[port] += 1
        if data is not None:
            self._refs[port].append(data)
            self._arrived[port] = self._arrived.get(port, 0) + 1
        if last:
            self._open.discard(port)

    def ports(self) -> list[str]:
        return list(self._refs)

    def count(self, port: str) -> int:
        """Chunks that have arrived so far, released ones included."""
        return self._arrived.get(port, 0)

    def ended(self, port: str) -> bool:
        return port not in self._open

    def texts(self, port: str) -> list[str]:
        return [ref.text for ref in self._refs.get(port, ()) if isinstance(ref, TextPiece)]

    def views(self, port: str) -> list[memoryview]:
        refs = enumerate(self._refs.get(port, ()))
        return [self._view(ref, port, at) for at, ref in refs if ref is not None]

    def tensors(self, port: str) -> list[torch.Tensor]:
        reshape = self._via.get(port)
        refs = enumerate(self._refs.get(port, ()))
        tensors = _together([self._tensor(ref, port, at) for at, ref in refs if ref is not None])
        return [reshape(tensor) for tensor in tensors] if reshape else tensors

    def release(self, port: str, count: int) -> None:
        """Raises `StaleRef` if a block was reused while it was lent; all are given back first."""
        refs = self._refs.get(port, [])
        given = [ref for ref in refs[:count] if ref is not None]
        refs[:count] = [None] * min(count, len(refs))
        for at in range(min(count, len(refs))):
            if (block := self._blocks.pop((port, at), None)) is not None:
                block.release()  # before main hears of it: the writer may look for the event
        self._released += [lease for ref in given if (lease := _lease(ref))]
        for ref in given:
            if isinstance(ref, Block | DeviceBlock):
                self._memory.check(ref)

    def release_all(self) -> None:
        """The task has ended, so a stale ref has no one left to fail: it is logged."""
        for port, refs in self._refs.items():
            try:
                self.release(port, len(refs))
            except StaleRef:
                log.exception("input '%s' was overwritten while it was lent", port)

    def _view(self, ref: Payload | TextPiece, port: str, at: int) -> memoryview:
        if isinstance(ref, DeviceBlock):  # to read it here it must be copied off the device
            return memoryview(torch_side().to_bytes(self._tensor(ref, port, at)))
        if isinstance(ref, Inline | Block):
            return self._memory.view(ref)
        if isinstance(ref, TextPiece):
            return memoryview(ref.text.encode())
        if isinstance(ref, Local) and isinstance(kept := self._memory.kept(ref), memoryview):
            return kept
        raise ProtocolError(f"a {type(ref).__name__} cannot be read as bytes here")

    def _tensor(self, ref: Payload | TextPiece, port: str, at: int) -> torch.Tensor:
        if isinstance(ref, Inline | Block):
            view = self._memory.view(ref)
            return torch_side().as_tensor(view, ref.dtype, ref.shape)
        if isinstance(ref, Local):
            kept: Any = self._memory.kept(ref)
            if isinstance(kept, memoryview):
                return torch_side().as_tensor(kept, ref.dtype, ref.shape)
            tensor: torch.Tensor = kept
            return tensor
        if isinstance(ref, DeviceBlock):
            if (port, at) not in self._blocks:
                self._blocks[port, at] = self._memory.open(ref)
            return self._memory.tensor(self._blocks[port, at])
        raise ProtocolError(f"a {type(ref).__name__} cannot be made a tensor here")


def _together(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """All on the device if one is: small chunks come in messages, and what found no room in the
    producer's pool through its arena."""
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    return tensors if device is None else [tensor.to(device) for tensor in tensors]


def _lease(ref: Payload | TextPiece) -> Lease | None:
    if isinstance(ref, Block | Local):
        return ref.arena, ref.offset, ref.generation
    if isinstance(ref, DeviceBlock):
        return ref.pool, ref.offset, ref.generation
    return None
