"""`python -m tests.tiny_models NAME FOLDER`: makes a tiny checkpoint or pipeline there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from tests.engines_ar.tiny import save_model
from tests.tiny_models import qwen2_5_omni
from tests.tiny_models.diffusion.families import FAMILIES

MAKERS: dict[str, Callable[[Path], object]] = {
    "qwen2_5_omni": qwen2_5_omni.save,
    "qwen3": save_model,
    **{name: family.save for name, family in FAMILIES.items()},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tiny_models", description=__doc__)
    parser.add_argument("name", choices=MAKERS)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    MAKERS[given.name](given.folder)
    size_bytes = sum(file.stat().st_size for file in given.folder.rglob("*"))
    sys.stdout.write(f"{given.folder}: {given.name}, {size_bytes / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
