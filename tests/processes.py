"""`omni-rt serve` as a process, for tests of what only whole processes show."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(config: Path | None, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a free port, once it is ready: the process and its URL.

    Without a config it serves the bundled model. `folder` is its folder for temporary files.
    """
    which = [] if config is None else ["--config", str(config)]
    process = subprocess.Popen(
        [sys.executable, "-m", "omni_rt", "serve", *which, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"serves \S+ on (http://\S+);", line):
                yield process, found[1]
                break
        else:
            raise AssertionError(f"it never became ready: {''.join(said)}")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def workers_of(pid: int) -> list[int]:
    """The processes that `pid` has started."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def all_end(pids: list[int], seconds: float) -> bool:
    """Whether all of them are gone within that time."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        ended = bool(poll.poll(seconds * 1000))
        os.close(fd)
        if not ended:
            return False
    return True


def short_folder() -> Path:
    """A temporary folder whose path leaves room for a socket's name; pytest's own do not."""
    return Path(tempfile.mkdtemp())


# Semaphores and tensors of other programs' multiprocessing, a bench's for one.
_OTHERS = ("sem.mp-", "torch_")


def shared_memory() -> set[str]:
    """What lies in /dev/shm, but for other programs' things."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(_OTHERS)}
