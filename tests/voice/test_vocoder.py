"""BigVGAN in windows: how far a sample sees, and that windows change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_rt_workers.models.qwen2_5_omni import vocoder
from omni_rt_workers.models.qwen2_5_omni.vocoder import Tail, Vocoder, reach
from tests.voice import tiny

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def bigvgan() -> Any:
    return tiny.model().code2wav_bigvgan_model


def _mel(frames: int) -> torch.Tensor:
    return torch.randn(frames, 80, generator=torch.Generator().manual_seed(3))


def _whole(bigvgan: Any, mel: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        wave: torch.Tensor = bigvgan(mel.T[None])
    return wave


def _heard(bigvgan: Any, at: int) -> set[int]:
    """The frames that samples of frame `at` depend on: those with a gradient, however small."""
    mel = _mel(120).double().requires_grad_()
    hop = Vocoder(bigvgan).hop
    wave = bigvgan(mel.T[None])[at * hop : (at + 1) * hop]
    frames: set[int] = set()
    for sample in (0, hop // 2, hop - 1):
        (gradient,) = torch.autograd.grad(wave[sample], mel, retain_graph=True)
        frames |= set(gradient.abs().sum(1).nonzero().view(-1).tolist())
    return frames


def test_reach_is_as_far_as_a_sample_depends_on_frames_and_no_further() -> None:
    precise = tiny.model().code2wav_bigvgan_model.double()
    left, right = reach(precise)
    assert _heard(precise, 60) == set(range(60 - left, 60 + right + 1))


@pytest.mark.parametrize("sizes", [[24] * 6, [1, 60, 3, 80], [144]])
def test_windows_join_without_a_seam(bigvgan: Any, sizes: list[int]) -> None:
    mel = _mel(144)
    joined = Vocoder(bigvgan)
    tail = Tail(mel[:0], mel[:0])
    parts = []
    with torch.inference_mode():
        for k, new in enumerate(mel.split(sizes)):
            tail.mel = torch.cat([tail.mel, new])
            (sound,) = joined.speak([tail], [k == len(sizes) - 1])
            joined.advance(tail, len(sound) // joined.hop)
            parts.append(sound)
    whole = _whole(bigvgan, mel)
    assert (torch.cat(parts) - whole).abs().max() < 1e-5
    assert whole.std() > 0.01
    assert len(tail.mel) <= joined.left


def test_long_speech_is_done_in_parts(bigvgan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mel = _mel(200)
    monkeypatch.setattr(vocoder, "_MAX_FRAMES", 50)
    with torch.inference_mode():
        (sound,) = Vocoder(bigvgan).speak([Tail(mel, mel[:0])], [True])
    assert (sound - _whole(bigvgan, mel)).abs().max() < 1e-5
