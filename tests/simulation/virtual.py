"""An asyncio loop on virtual time: nothing is waited for, time jumps to the next timer."""

from __future__ import annotations

import asyncio
from typing import Any


class NothingScheduled(AssertionError):
    """Raised when the program waits for something that can never come: a deadlock."""


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector: Any = self
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """What BaseEventLoop calls as its selector: no I/O, so the timeout passes at once."""
        if timeout is None:
            raise NothingScheduled("nothing is scheduled and the scenario has not ended")
        self._now += max(0.0, timeout)
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        return None

    def _write_to_self(self) -> None:
        return None
