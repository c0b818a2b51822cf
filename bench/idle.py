"""What a loaded server costs while nobody asks anything.

`python -m bench.idle [--seconds 60] [--config pipeline.yaml]`. Keys: docs/bench.md.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.common import MODEL, ROOT, finish

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LOAD_S, _SETTLE_S = 300.0, 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--config", default=str(MODEL.with_suffix(".yaml")))
    args = parser.parse_args()
    with server(args.config) as pid:
        time.sleep(_SETTLE_S)
        before, started = cpu_ticks(pid), time.monotonic()
        time.sleep(args.seconds)
        after, seconds = cpu_ticks(pid), time.monotonic() - started
    used = {
        process: (ticks - before.get(process, 0)) / _TICKS_PER_S for process, ticks in after.items()
    }
    percent = sum(used.values()) / seconds * 100
    print(f"{len(used)} processes used {sum(used.values()):.2f} s of CPU in {seconds:.0f} s")
    finish(
        {
            "bench": "idle",
            "idle_percent_of_core": round(percent, 3),
            "main_percent_of_core": round(used[pid] / seconds * 100, 3),
            "processes": len(used),
            "seconds": round(seconds, 1),
        }
    )


@contextmanager
def server(config: str) -> Iterator[int]:
    """`omni-rt serve`, loaded; its process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "omni_rt", "serve", "--config", config, "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/ready", process)
        yield process.pid
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _LOAD_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise SystemExit(f"the server was not ready within {_LOAD_S:.0f} s")


def cpu_ticks(root: int) -> dict[int, int]:
    """User and system time of a process and all below it, by process id."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        ticks[pid] = int(fields[11]) + int(fields[12])
    return {pid: ticks[pid] for pid in ticks if _is_below(pid, root, parents)}


def _is_below(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != root:
        pid = parents[pid]
    return pid == root


if __name__ == "__main__":
    main()
