"""`python -m bench [NAME ...] [OPTION ...]`: all benches, or those named, one after the other.

Options (`--rounds 3`) go to each of them.
"""

from __future__ import annotations

import subprocess
import sys

from bench.common import ROOT

NAMES = ("handoff", "pipelining", "overhead", "ttfa", "dit_fairness", "idle")


def main() -> int:
    given = sys.argv[1:]
    first = next((n for n, word in enumerate(given) if word.startswith("-")), len(given))
    names, options = given[:first] or NAMES, given[first:]
    for name in names:
        if name not in NAMES:
            print(f"there is no bench '{name}'; there are: {', '.join(NAMES)}", file=sys.stderr)
            return 2
    failed = False
    for name in names:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"bench.{name}", *options]
        failed |= subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
