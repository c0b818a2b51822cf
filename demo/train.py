"""Make the bundled model from nothing: writer, autoencoder, painter, in this order.

Every phase is seeded and has a fixed number of steps. A run that was interrupted goes on where it
stopped; a finished run leaves its checkpoints, and `--fresh` throws them away.
"""

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

import plain
import train_dit
import train_lm
import train_vae
from training import THREADS

WORK = Path(__file__).resolve().parent / ".train"


def main() -> None:
    options = _options()
    torch.set_num_threads(THREADS)
    work: Path = options.work / ("quick" if options.quick else "full")
    if options.fresh:
        shutil.rmtree(work, ignore_errors=True)
    train(options.out, work, options.quick, options.seed)


def train(out: Path, work: Path, quick: bool, seed: int = 0) -> None:
    """Run the phases that have not been finished; weights go to `out`, checkpoints to `work`."""
    writer, painter = out / "writer", out / "painter"
    _phase(
        "writer",
        lambda: train_lm.train_writer(
            writer, work, train_lm.QUICK if quick else train_lm.FULL, seed
        ),
    )
    _phase(
        "autoencoder",
        lambda: train_vae.train_autoencoder(
            painter / "vae",
            work,
            train_vae.QUICK if quick else train_vae.FULL,
            seed,
        ),
    )
    _phase(
        "painter",
        lambda: train_dit.train_painter(
            writer, painter, work, train_dit.QUICK if quick else train_dit.FULL, seed
        ),
    )


def _phase(name: str, run: Callable[[], None]) -> None:
    start = time.monotonic()
    print(f"== {name}", flush=True)
    run()
    print(f"== {name} done in {(time.monotonic() - start) / 60:.1f} min", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the bundled demo model from nothing.")
    parser.add_argument("--out", type=Path, default=plain.SHAPES, help="default: %(default)s")
    parser.add_argument("--work", type=Path, default=WORK, help="checkpoints; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a run of a minute, to try the code")
    parser.add_argument("--fresh", action="store_true", help="start anew, not where a run stopped")
    return parser.parse_args()


if __name__ == "__main__":
    main()
