"""The module stage of docs/engines.md, as it stands there, in a pipeline of real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from omni_rt.config import parse_pipeline
from omni_rt.errors import BadRequest, StageUnavailable
from omni_rt.request import Audio, Output, Request
from omni_rt.runtime.omni import AsyncOmni
from tests.runtime.real import collect, done_of, text_of

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
BLOCKS = dict(
    reversed(re.findall(r"```(python|yaml)\n(.*?)```", PAGE, re.DOTALL))
)  # the first of each


@pytest.fixture(autouse=True)
def _beeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beeps.py").write_text(BLOCKS["python"])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


async def test_it_beeps_while_the_writer_writes() -> None:
    async with AsyncOmni(parse_pipeline(BLOCKS["yaml"], "beeps.yaml")) as omni:
        one = await collect(omni, Request(prompt="x", seed=1))
        again = await collect(omni, Request(prompt="x", seed=1, params={"volume": 0.5}))
        quiet = await collect(omni, Request(prompt="x", seed=1, params={"volume": 0.1}))
        with pytest.raises(BadRequest, match="nobody would hear it"):
            await collect(omni, Request(prompt="x", params={"volume": 0.0}))
        with pytest.raises(BadRequest, match="volume must be at least 0 and at most 1"):
            omni.submit(Request(prompt="x", params={"volume": 2.0}))
    pieces = [output for output in one if isinstance(output, Audio)]
    # 40 steps of 4 bytes, of 480 samples each, of 2 bytes: pieces of 8, then 16 notes
    assert [len(piece.data) // 960 for piece in pieces] == [8, *[16] * 9, 8]
    assert [piece.last for piece in pieces] == [False] * 10 + [True]
    assert done_of(one).usage["audio_samples"] == 160 * 480
    assert text_of(one)
    assert _sound(again) == _sound(one) != _sound(quiet)
    early = one.index(pieces[0])
    assert any(text_of([output]) for output in one[early:] if output is not one[-1])


def _sound(outputs: list[Output]) -> bytes:
    return b"".join(output.data for output in outputs if isinstance(output, Audio))


async def test_a_stage_without_its_module_says_so_at_the_start() -> None:
    text = BLOCKS["yaml"].replace("beeps:Beeps", "beeps:Beep")
    with pytest.raises(StageUnavailable, match="cannot find the module 'beeps:Beep'"):
        async with AsyncOmni(parse_pipeline(text, "beeps.yaml")):
            pass
