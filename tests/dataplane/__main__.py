"""Replay schedules of device pools: `python -m tests.dataplane [SEED] [--seeds N]`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.dataplane.device_world import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--start", type=int, default=0)
    args = parser.parse_args()
    chosen = [args.seed] if args.seed is not None else range(args.start, args.start + args.seeds)
    counts: Counter[str] = Counter()
    bad: list[int] = []
    started = time.perf_counter()
    for seed in chosen:
        try:
            counts += run(seed)
        except Exception:
            bad.append(seed)
            if len(bad) <= 3:
                sys.stdout.write(f"seed {seed}:\n{traceback.format_exc()}")
    elapsed = time.perf_counter() - started
    sys.stdout.write(f"{len(chosen)} seeds, wrong: {bad[:20]} ({len(bad)}), {elapsed:.1f} s\n")
    sys.stdout.write(f"{dict(counts)}\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
