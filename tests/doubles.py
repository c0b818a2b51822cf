"""What stands for the worker's loop around an engine: inputs that a test hands in, and an outbox.

A folder's own outbox says which calls its engine may make and what is kept of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from omni_rt_workers.engine import Outbox

if TYPE_CHECKING:
    import torch

    from omni_rt.wire.messages import TextPiece
    from omni_rt_workers.engine import Task

Given = Mapping[str, "torch.Tensor | list[torch.Tensor]"]


class GivenInputs:
    """Inputs of one task. Ports in `open` have not ended yet; those in `streams` begin so."""

    def __init__(self, whole: Given, streams: tuple[str, ...] = ()) -> None:
        self.chunks: dict[str, list[torch.Tensor | None]] = {
            name: [*given] if isinstance(given, list) else [given] for name, given in whole.items()
        }
        self.chunks |= {name: [] for name in streams}
        self.open = set(streams)

    def tensors(self, port: str) -> list[torch.Tensor]:
        return [chunk for chunk in self.chunks.get(port, ()) if chunk is not None]

    def views(self, port: str) -> list[memoryview]:
        raise AssertionError("an engine that has torch takes tensors")

    def texts(self, port: str) -> list[str]:
        return []

    def ports(self) -> list[str]:
        return list(self.chunks)

    def count(self, port: str) -> int:
        return len(self.chunks.get(port, ()))

    def ended(self, port: str) -> bool:
        return port not in self.open

    def release(self, port: str, count: int) -> None:
        self.chunks[port][:count] = [None] * count


class NoOutbox(Outbox):
    """Every call is a fault; a test's own outbox takes those that its engine makes."""

    def text(self, task: Task, text: str, tokens: tuple[int, ...] = ()) -> None:
        _refuse("text")

    def piece(self, task: Task, piece: TextPiece) -> None:
        _refuse("piece")

    def put(self, task: Task, port: str, tensor: torch.Tensor, *, last: bool = False) -> None:
        _refuse("put")

    def reserve(self, task: Task, port: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        _refuse("reserve")

    def publish(
        self, task: Task, port: str, *, last: bool = False, meta: dict[str, Any] | None = None
    ) -> None:
        _refuse("publish")

    def put_bytes(
        self,
        task: Task,
        port: str,
        data: bytes | bytearray | memoryview,
        *,
        last: bool = False,
        meta: dict[str, Any] | None = None,
    ) -> None:
        _refuse("put_bytes")

    def progress(self, task: Task, step: int, total: int) -> None:
        _refuse("progress")


def _refuse(call: str) -> NoReturn:
    raise AssertionError(f"this engine is not to call {call}")
