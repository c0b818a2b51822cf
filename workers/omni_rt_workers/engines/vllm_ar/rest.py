"""Rest for an idle process: threads that look for work every few milliseconds are woken together.

vLLM makes a dozen process groups, and each has a thread of gloo's that wakes 100 times a second,
work or not. A thread inherits the timer slack of the one that starts it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 100_000_000


@contextlib.contextmanager
def drowsy_threads() -> Iterator[None]:
    """Timers of threads started meanwhile may be up to 0.1 s late; what they wait for is not.

    Not for processes started meanwhile: all their threads would inherit it.
    """
    _set_slack(_SLACK_NS)
    try:
        yield
    finally:
        _set_slack(0)  # the default again


def _set_slack(nanoseconds: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(nanoseconds), 0, 0, 0)
