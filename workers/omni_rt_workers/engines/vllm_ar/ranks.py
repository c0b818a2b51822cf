"""Processes of a model's ranks: where they meet, when they end, and that nothing stays of them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm import envs

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PREFIX = "omni-rt-ranks-"
_NEW_S = 60
_NAMED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """While vLLM starts its ranks: a folder for the files and sockets by which they meet.

    All of it goes when they have: whoever is connected needs no name. A kill in the middle of the
    start leaves the folder behind, for the next start to sweep up.
    """
    _sweep_up()
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    os.environ["VLLM_RPC_BASE_PATH"] = folder
    envs.disable_envs_cache()  # of an engine that this process had before
    with _locked(folder):
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: str | Path) -> Iterator[None]:
    """While this process lives, nobody else can lock the folder. Raises `OSError` if one has."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _sweep_up() -> None:
    """Remove folders of dead processes: theirs are not locked, and not so new that they will be."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(folder):
            if time.time() - folder.stat().st_mtime < _NEW_S:
                continue
            for place in folder.glob("vllm_dist_*"):
                forget_names(place.name)
            shutil.rmtree(folder)


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
