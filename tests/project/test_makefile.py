"""`make setup` runs when the lock or the project file has changed, and only then."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A project whose environment was set up after its files were last changed."""
    for name in ("Makefile", "pyproject.toml", "requirements/cpu.lock"):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, target)
        os.utime(target, (1000, 1000))
    stamp = tmp_path / ".venv" / ".installed"
    stamp.parent.mkdir()
    stamp.touch()
    os.utime(stamp, (2000, 2000))
    return tmp_path


def commands(clone: Path, *arguments: str) -> str:
    """What make would run, without running it."""
    env = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"} | {
        "LC_ALL": "C"
    }
    done = subprocess.run(
        ["make", "-n", *arguments],
        cwd=clone,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_second_setup_does_nothing(clone: Path) -> None:
    assert "Nothing to be done" in commands(clone, "setup")


@pytest.mark.parametrize("changed", ["pyproject.toml", "requirements/cpu.lock"])
def test_a_change_of_what_is_installed_sets_up_again(clone: Path, changed: str) -> None:
    os.utime(clone / changed, (3000, 3000))
    assert "pip" in commands(clone, "test")


def test_a_fresh_clone_makes_its_environment_first(clone: Path) -> None:
    shutil.rmtree(clone / ".venv")
    lines = commands(clone, "test").splitlines()
    made, tested = (
        next(number for number, line in enumerate(lines) if words in line)
        for words in ("-m venv .venv", "-m pytest")
    )
    assert made < tested


def test_serve_hands_its_options_on(clone: Path) -> None:
    line = commands(clone, "serve", "CONFIG=mine.yaml", "PORT=9000")
    assert "omni-rt serve --config mine.yaml --port 9000" in line


def test_the_lock_pins_every_package_to_one_version() -> None:
    lines = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    names = []
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        name, _, version = line.partition("==")
        assert version, line
        assert "+" not in version, line
        names.append(name.lower().replace("_", "-").replace(".", "-"))
    assert len(names) == len(set(names))
