"""Shared by the benches: statistics, the machine, the last line."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "omni_rt" / "demo" / "shapes"
# Between two tensors of which one at a time is under way, for all ways alike.
PAUSE_S = 0.0003


def p50(values: Sequence[float]) -> float:
    return statistics.median(values)


def p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def machine() -> dict[str, object]:
    """What a reader must know to compare: processor, cores, load while it ran."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "loadavg": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def finish(result: dict[str, object]) -> None:
    """Print the result as the last line."""
    print(json.dumps({**result, "machine": machine()}))


def child_path() -> None:
    """Let worker processes find the benches' own engines."""
    paths = [str(ROOT), str(ROOT / "workers"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
