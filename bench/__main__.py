"""`python -m bench [NAME ...]`: all benches, or those named, one after the other."""

from __future__ import annotations

import subprocess
import sys

from bench.common import ROOT

NAMES = ("handoff", "pipelining", "overhead", "idle")


def main() -> int:
    names = sys.argv[1:] or NAMES
    for name in names:
        if name not in NAMES:
            print(f"there is no bench '{name}'; there are: {', '.join(NAMES)}", file=sys.stderr)
            return 2
    failed = False
    for name in names:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"bench.{name}"]
        failed |= subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
