"""docs/config.md names every key of every part of a file, with its default."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from omni_rt.config import (
    CacheConfig,
    EdgeConfig,
    HiddenConfig,
    LimitsConfig,
    PipelineConfig,
    PlaybackConfig,
    RestartConfig,
    StageConfig,
    StreamConfig,
    presets,
)
from omni_rt.config.model import ENGINES
from tests.config.files import ROOT

PAGE = (ROOT / "docs" / "config.md").read_text()
PARTS: dict[str, type[msgspec.Struct]] = {
    "The pipeline": PipelineConfig,
    "Playback": PlaybackConfig,
    "Stages": StageConfig,
    "Limits": LimitsConfig,
    "Cache": CacheConfig,
    "Hidden states": HiddenConfig,
    "Restart": RestartConfig,
    "Edges": EdgeConfig,
    "Streaming": StreamConfig,
}
# Defaults that are said in words, because the value alone does not say what happens.
IN_WORDS = {
    ("Stages", "model"): "the pipeline's",
    ("Stages", "worker"): "the stage's own",
    ("Stages", "memory"): "the engine's",
    ("Stages", "threads"): "1 on a CPU",
    ("Stages", "restart"): "its defaults",
    ("The pipeline", "playback"): "its defaults",
    ("The pipeline", "name"): "the file's name without its suffix",
    ("Edges", "stream"): "`false`",
    ("Cache", "cache_tensors"): "`[prompt_embeds]`",
    ("Cache", "enable_optimization"): "`true`",
}


def rows(title: str) -> dict[str, str]:
    """The first table under a title: key -> default, as written."""
    _, _, rest = PAGE.partition(f" {title}\n")
    table = re.search(r"^\| key \|.*\n\|[-|]+\n((?:\|.*\n)+)", rest, re.MULTILINE)
    assert table is not None, title
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table[1].splitlines()]
    assert all(len(row) == 4 and row[3] for row in cells), title
    return {row[0].strip("`"): row[2] for row in cells}


def default(field: Any) -> str:
    if field.required:
        return "required"
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return {None: "none", (): "`[]`"}.get(value, f"`{value}`") if value != {} else "`{}`"


@pytest.mark.parametrize("title", PARTS)
def test_table_has_every_key_in_order_with_its_default(title: str) -> None:
    fields = msgspec.structs.fields(PARTS[title])
    written = rows(title)
    assert list(written) == [field.encode_name for field in fields]
    expected = {f.encode_name: IN_WORDS.get((title, f.encode_name), default(f)) for f in fields}
    assert written == expected


@pytest.mark.parametrize("name", sorted({*ENGINES, *presets()}))
def test_engines_and_presets_are_named(name: str) -> None:
    assert f"`{name}`" in PAGE
