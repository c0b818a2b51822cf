"""Replay seeds: `python -m tests.simulation [SEED] [--seeds N]`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.scenario import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0)
    args = parser.parse_args()
    chosen = [args.seed] if args.seed is not None else range(args.start, args.start + args.seeds)
    outcomes: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    bad = deaths = 0
    started = time.perf_counter()
    for seed in chosen:
        report = run(seed)
        outcomes.update(report.outcomes)
        counters.update(report.counters)
        deaths += report.deaths
        if report.problems:
            bad += 1
            print(f"seed {seed}:", *report.problems[:8], sep="\n  ")
    elapsed = time.perf_counter() - started
    print(f"{len(chosen)} seeds, {bad} with a violation, {deaths} faults, {elapsed:.1f} s")
    print(dict(outcomes), dict(counters))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
