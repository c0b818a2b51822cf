"""Processes of a model's ranks: where they meet, when they end, and that nothing stays of them."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm import envs

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_NAMED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """While vLLM starts its ranks: a folder for the files and sockets by which they meet.

    All of it goes when they have: whoever is connected needs no name. Only a kill in the middle
    of the start leaves the folder behind.
    """
    folder = tempfile.mkdtemp(prefix="omni-rt-ranks-")
    os.environ["VLLM_RPC_BASE_PATH"] = folder
    envs.disable_envs_cache()  # of an engine that this process had before
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def meeting_place(wanted: str, ranks: int) -> str:
    """Where this rank meets the others, instead of in a file that a killed process would leave.

    `wanted` is vLLM's own `distributed_init_method`.
    """
    if not wanted.startswith("file://"):
        return wanted
    if ranks == 1:  # vLLM meets itself
        return f"file:///proc/self/fd/{os.memfd_create('vllm_dist', os.MFD_CLOEXEC)}"
    return f"file://{envs.VLLM_RPC_BASE_PATH}/{Path(wanted).name}"


def die_with_parent() -> None:
    """A rank process ends with the worker that started it, also in the middle of a step."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it was gone before the signal was set
        os._exit(1)


def die_with_ranks(executor: Any) -> None:
    """The worker ends when one of its ranks has: nothing mends that but a new start of all."""
    executor.register_failure_callback(_end)


def _end() -> None:
    log.critical("a process of the model has died; the worker ends with it")
    os._exit(1)


def forget_names(meeting_place: str) -> None:
    """Once all ranks have met: the memory that they share on CPU stays, its name goes."""
    for path in _NAMED_MEMORY.glob(f"*{Path(meeting_place).name}*"):
        path.unlink(missing_ok=True)
