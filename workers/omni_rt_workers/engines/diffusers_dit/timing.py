"""How long the device worked on something: known at once on a CPU, when it is done on CUDA."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class DeviceTimer:
    """Times stretches of work by events on the device, without ever waiting for it."""

    def __init__(self, device: str) -> None:
        self._on_cuda = device.startswith("cuda")
        self._open: deque[tuple[Any, Any, Callable[[float], None]]] = deque()

    @contextmanager
    def timed(self, tell: Callable[[float], None]) -> Iterator[None]:
        """Time the body; `tell` is called with seconds, on CUDA in a later `tell_finished`."""
        if not self._on_cuda:
            began = time.monotonic()
            yield
            tell(time.monotonic() - began)
            return
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._open.append((start, end, tell))

    def tell_finished(self) -> None:
        while self._open and self._open[0][1].query():
            start, end, tell = self._open.popleft()
            tell(start.elapsed_time(end) / 1000)
