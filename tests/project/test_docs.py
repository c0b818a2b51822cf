"""What the documents name exists, and what exists is named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from omni_rt.config import parse_pipeline
from omni_rt.graph import Graph

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for folder in (".", "docs", "demo", "bench", "examples")
    for page in ROOT.glob(f"{folder}/*.md")
)

MODULE = re.compile(r"`((?:omni_rt|workers/omni_rt_workers)/[\w/]+\.py)`")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def shell_lines(page: Path) -> list[str]:
    blocks = [body for language, body in BLOCK.findall(page.read_text()) if language == "sh"]
    return [line.strip() for body in blocks for line in body.splitlines()]


def existing_modules() -> set[str]:
    """Every module; a package's `__init__` only if there is code in it."""
    found = set()
    for package in ("omni_rt", "workers/omni_rt_workers"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            if path.name != "__init__.py" or "import " in text or "def " in text:
                found.add(str(path.relative_to(ROOT)))
    return found


def test_structure_has_a_line_for_every_module_and_for_no_other() -> None:
    named = set(MODULE.findall((ROOT / "docs" / "structure.md").read_text()))
    existing = existing_modules()
    assert sorted(existing - named) == [], "give each a line in docs/structure.md"
    assert sorted(named - existing) == [], "gone: take them out of docs/structure.md"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_modules_named_in_a_page_exist(page: Path) -> None:
    for module in MODULE.findall(page.read_text()):
        assert (ROOT / module).is_file(), module


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_in_a_page_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_named_in_a_page_exist(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = "\n".join(shell_lines(page)) + "\n".join(re.findall(r"`(make [^`]*)`", page.read_text()))
    for target in re.findall(r"\bmake ([a-z][\w-]*)", text):
        assert target in targets, target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_named_in_a_page_exist(page: Path) -> None:
    text = "\n".join([*shell_lines(page), *re.findall(r"`(omni-rt [^`]*)`", page.read_text())])
    for command in sorted(set(re.findall(r"\bomni-rt ([a-z][\w-]*)", text))):
        program = "import sys; from omni_rt.cli import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", program, command, "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_in_a_page_compiles(page: Path) -> None:
    for language, body in BLOCK.findall(page.read_text()):
        if language == "python":
            compile(body, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_pipelines_in_a_page_are_right(page: Path) -> None:
    for language, body in BLOCK.findall(page.read_text()):
        if language == "yaml" and body.startswith("stages:"):
            Graph.from_config(parse_pipeline(body, str(page), page.parent))
