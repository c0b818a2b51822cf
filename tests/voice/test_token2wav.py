"""Qwen2.5-Omni's token2wav: what transformers gives, whole, streamed, alone and beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from omni_rt.errors import BadRequest, ConfigError, StageFailed
from omni_rt_workers.engine import Task
from tests.engines_torch.fakes import Desk
from tests.voice import tiny

pytestmark = pytest.mark.model

MODULE = "omni_rt_workers.models.qwen2_5_omni.token2wav:Token2Wav"
CLOSE = 1e-4  # of samples whose standard deviation is above 0.01, mostly 0.1
ENOUGH = 4  # blocks ahead after which these weights make no difference in float32


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("omni"), model)


@pytest.fixture(scope="module")
def desk(folder: Path) -> Desk:
    return Desk(MODULE, model=str(folder), ahead=ENOUGH)


def transformers(model: Any, codes: torch.Tensor, seed: int, voice: str) -> torch.Tensor:
    speaker = tiny.voices()[voice]
    torch.manual_seed(seed)
    with torch.inference_mode():
        wave: torch.Tensor = model(codes[None], speaker["cond"], speaker["ref_mel"])
    assert wave.std() > 0.01
    return wave


def speak(
    desk: Desk, codes: torch.Tensor, sizes: int | list[int] | None, seed: int, voice: str
) -> Task:
    """A request, whole or in chunks of these sizes, not yet run."""
    if sizes is None:
        return desk.add({"codes": codes}, want=("audio",), seed=seed, voice=voice)
    task = desk.add(streams=("codes",), want=("audio",), seed=seed, voice=voice)
    desk.feed(task, *codes.split(sizes), end=True, port="codes")
    return task


def heard(desk: Desk, task: Task) -> torch.Tensor:
    assert desk.out.ends[task] == "stop", desk.out.ends[task]
    return desk.got(task, "audio")


@pytest.mark.parametrize("voice", ["Chelsie", "Long"])
@pytest.mark.parametrize("count", [1, 12, 61])
def test_whole_is_what_transformers_gives(desk: Desk, model: Any, count: int, voice: str) -> None:
    codes = tiny.codes(count)
    task = speak(desk, codes, None, 5, voice)
    desk.run()
    got, expected = heard(desk, task), transformers(model, codes, 5, voice)
    assert got.shape == (count * tiny.HOP,)
    assert (got - expected).abs().max() < CLOSE


@pytest.mark.parametrize(
    "sizes", [1, 7, [150], [1, 100, 49]], ids=["one by one", "sevens", "at once", "uneven"]
)
def test_streamed_is_what_whole_is(desk: Desk, model: Any, sizes: int | list[int]) -> None:
    codes = tiny.codes(150)
    task = speak(desk, codes, sizes, 5, "Chelsie")
    desk.run()
    got, expected = heard(desk, task), transformers(model, codes, 5, "Chelsie")
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < CLOSE
    pieces = [len(tensor) // tiny.HOP for _, tensor, _ in desk.out.given[task]]
    assert pieces == [24] * 5 + [19, 11]  # the last but one waits for frames after it


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("chunk", [1, 5])
def test_the_cutting_does_not_matter(folder: Path, model: Any, first: int, chunk: int) -> None:
    desk = Desk(MODULE, model=str(folder), first=first, chunk=chunk, ahead=ENOUGH)
    codes = tiny.codes(150)
    task = speak(desk, codes, 10, 5, "Chelsie")
    desk.run()
    assert (heard(desk, task) - transformers(model, codes, 5, "Chelsie")).abs().max() < CLOSE


@pytest.mark.parametrize(("ahead", "off"), [(0, 0.05), (1, 5e-3), (2, 1e-3)])
def test_a_shorter_look_ahead_is_less_exact_by_so_much(
    folder: Path, model: Any, ahead: int, off: float
) -> None:
    desk = Desk(MODULE, model=str(folder), ahead=ahead)
    codes = tiny.codes(150)
    task = speak(desk, codes, 10, 5, "Chelsie")
    desk.run()
    got, expected = heard(desk, task), transformers(model, codes, 5, "Chelsie")
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < off


def test_the_first_sound_comes_before_the_rest_is_known(folder: Path) -> None:
    desk = Desk(MODULE, model=str(folder))
    task = desk.add(streams=("codes",), want=("audio",), voice="Chelsie")
    desk.feed(task, tiny.codes(47), port="codes")
    assert desk.engine.idle
    desk.feed(task, tiny.codes(1), port="codes")
    desk.run()
    assert len(desk.got(task, "audio")) == 24 * tiny.HOP


def test_four_requests_at_once_sound_as_each_alone(desk: Desk, model: Any) -> None:
    voices = ["Chelsie", "Ethan", "Chelsie", "Long"]
    codes = [tiny.codes(count, seed) for seed, count in enumerate([80, 80, 65, 80])]
    tasks = [
        speak(desk, its, sizes, seed, voice)
        for seed, (its, voice, sizes) in enumerate(
            zip(codes, voices, [3, 3, None, 80], strict=True)
        )
    ]
    desk.run()
    for seed, (task, its, voice) in enumerate(zip(tasks, codes, voices, strict=True)):
        expected = transformers(model, its, seed, voice)
        assert (heard(desk, task) - expected).abs().max() < CLOSE


def test_requests_at_different_steps_share_a_batch(desk: Desk, model: Any) -> None:
    early = speak(desk, tiny.codes(40), None, 1, "Chelsie")
    for _ in range(4):
        desk.engine.step()
    late = speak(desk, tiny.codes(40, 1), None, 2, "Ethan")
    assert desk.run() == 9  # 5 together, 4 of the late one alone
    for task, seed, voice in ((early, 1, "Chelsie"), (late, 2, "Ethan")):
        expected = transformers(model, tiny.codes(40, seed - 1), seed, voice)
        assert (heard(desk, task) - expected).abs().max() < CLOSE


def test_voice_and_seed_are_heard(desk: Desk) -> None:
    codes = tiny.codes(12)
    tasks = [
        speak(desk, codes, None, seed, voice)
        for seed, voice in ((1, "Chelsie"), (1, "Ethan"), (2, "Chelsie"))
    ]
    desk.run()
    one, other_voice, other_seed = (heard(desk, task) for task in tasks)
    assert (one - other_voice).abs().max() > 1e-3
    assert (one - other_seed).abs().max() > 1e-2


def test_more_than_the_model_has_positions_for(folder: Path, model: Any) -> None:
    """transformers refuses it; here it is cut, into windows that are shorter."""
    codes = tiny.codes(220)  # 440 frames: the model has 400 positions
    with pytest.raises(ValueError, match="max_position_embeddings"):
        transformers(model, codes, 5, "Chelsie")
    desk = Desk(MODULE, model=str(folder), whole=6)
    task = speak(desk, codes, None, 5, "Chelsie")
    desk.run()
    got = heard(desk, task)
    assert got.shape == (220 * tiny.HOP,)
    start = transformers(model, codes[:195], 5, "Chelsie")[: 140 * tiny.HOP]  # two windows' worth
    assert (got[: 140 * tiny.HOP] - start).abs().max() < 1e-3


def test_codes_outside_the_codec_fail_alone(desk: Desk, model: Any) -> None:
    good = speak(desk, tiny.codes(30), None, 5, "Chelsie")
    bad = speak(desk, torch.full((30,), 9999), None, 5, "Chelsie")
    desk.run()
    assert isinstance(desk.error(bad), StageFailed)
    expected = transformers(model, tiny.codes(30), 5, "Chelsie")
    assert (heard(desk, good) - expected).abs().max() < CLOSE


def test_a_cancelled_voice_leaves_the_others_as_they_are(desk: Desk, model: Any) -> None:
    stays = speak(desk, tiny.codes(60), 60, 5, "Chelsie")
    gone = speak(desk, tiny.codes(60, 1), 60, 6, "Chelsie")
    for _ in range(12):
        desk.engine.step()
    desk.engine.abort(gone)
    desk.run()
    assert gone not in desk.out.ends
    expected = transformers(model, tiny.codes(60), 5, "Chelsie")
    assert (heard(desk, stays) - expected).abs().max() < CLOSE


def test_an_unknown_voice_is_refused(desk: Desk) -> None:
    with pytest.raises(BadRequest, match="no voice 'Chelsea'. did you mean 'Chelsie'"):
        speak(desk, tiny.codes(3), None, 0, "Chelsea")
    assert desk.ports.params[0].choices == ("Chelsie", "Ethan", "Long")


def test_wrong_options_and_missing_weights_are_said_at_the_start(
    folder: Path, model: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="chunks"):
        Desk(MODULE, model=str(folder), chunks=3)
    with pytest.raises(ConfigError, match="at least 1"):
        Desk(MODULE, model=str(folder), first=0)
    other = tiny.save(tmp_path, model)
    (other / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        Desk(MODULE, model=str(other))
