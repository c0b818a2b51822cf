"""Cutting a streamed input into pieces, the same ones whenever its chunks arrive."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omni_rt_workers.module import Piece, Window


class Cutter:
    """The rows of one input of one request that are still needed."""

    def __init__(self, window: Window, device: torch.device, *, streamed: bool) -> None:
        self._window = window
        self._device = device
        self.streamed = streamed
        self._rows: torch.Tensor | None = None  # from row `_base` on
        self._base = 0
        self._at = 0  # first row that no piece has had as a new one
        self._arrived = 0
        self.ended = False

    def take(self, chunks: Sequence[torch.Tensor]) -> None:
        """Copy what has arrived, in order."""
        new = [chunk.to(self._device) for chunk in chunks]
        kept = [] if self._rows is None else [self._rows]
        if new:
            self._rows = torch.cat([*kept, *new])
            self._arrived = self._base + self._rows.shape[0]

    @property
    def ready(self) -> bool:
        """Whether there is a piece to cut. One that is not the last has at least a row after it."""
        if self.ended:
            return self._at < self._arrived
        return self.streamed and self._arrived >= self._stop + max(self._window.right, 1)

    @property
    def over(self) -> bool:
        """Whether all has been cut and no more will come."""
        return self.ended and self._at >= self._arrived

    def cut(self) -> Piece:
        assert self._rows is not None
        window, start = self._window, self._at
        stop = min(self._stop, self._arrived)
        low, high = max(0, start - window.left), min(stop + window.right, self._arrived)
        rows = self._rows[low - self._base : high - self._base]
        last = self.ended and stop == self._arrived
        self._at = stop
        self._drop(max(0, stop - window.left))
        return Piece(rows, start - low, high - stop, start, last)

    @property
    def _stop(self) -> int:
        """Row at which the next piece ends if the input is long enough."""
        window = self._window
        if not self.streamed:
            return self._arrived if window.whole is None else self._at + window.whole
        return self._at + (window.chunk if self._at else window.first)

    def _drop(self, base: int) -> None:
        assert self._rows is not None
        if base > self._base:
            self._rows = self._rows[base - self._base :].clone()
            self._base = base
