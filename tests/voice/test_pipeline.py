"""A pipeline that speaks with Qwen2.5-Omni's voice, in processes and over HTTP."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5OmniForConditionalGeneration

from omni_rt.request import Audio, Data, Output, Request
from tests.runtime.real import collect
from tests.server.serving import site
from tests.tiny_models import qwen2_5_omni

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

PIPELINE = """
name: voice
model: MODEL
stages:
  talker: {engine: simulated, simulated: {step_s: 0.001, steps: 9, ports: {codes: {bytes: 12, every: 1}}}}
  vocoder:
    engine: torch
    module: omni_rt_workers.models.qwen2_5_omni.token2wav:Token2Wav
    options: {ahead: 5}
edges:
  - {from: talker.codes, to: vocoder.codes, stream: true}
outputs: {codes: talker.codes, audio: vocoder.audio}
"""  # noqa: E501


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen2_5_omni.save(tmp_path_factory.mktemp("omni"))


def _samples(outputs: list[Output]) -> torch.Tensor:
    data = b"".join(output.data for output in outputs if isinstance(output, Audio))
    return torch.frombuffer(bytearray(data), dtype=torch.int16).float() / 32767


def _expected(folder: Path, codes: bytes, seed: int, voice: str) -> torch.Tensor:
    model = Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    speaker = model.speaker_map[voice]
    torch.manual_seed(seed)
    with torch.inference_mode():
        wave: torch.Tensor = model.token2wav(
            torch.tensor([list(codes)]), speaker["cond"], speaker["ref_mel"]
        )
    return wave


async def test_what_is_heard_is_what_transformers_says(folder: Path) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "speak"}],
        "modalities": ["audio"],
        "audio": {"voice": "Ethan", "format": "wav"},
        "seed": 3,
    }
    async with site(text=PIPELINE.replace("MODEL", str(folder))) as where:
        request = Request(prompt="speak", seed=3, params={"voice": "Ethan"})
        streamed = await collect(where.omni, request)
        reply = await where.http.post("/v1/chat/completions", json=body)
        body["audio"]["voice"] = "Ethel"
        refused = await where.http.post("/v1/chat/completions", json=body)
    codes = b"".join(output.data for output in streamed if isinstance(output, Data))
    expected = _expected(folder, codes, 3, "Ethan")
    heard = _samples(streamed)
    assert len([output for output in streamed if isinstance(output, Audio)]) > 3
    assert heard.shape == expected.shape == (9 * 12 * 480,)
    assert expected.std() > 0.01
    assert (heard - expected).abs().max() < 1e-4  # half a step of 16 bits is 1.5e-5

    assert reply.status_code == 200
    audio = reply.json()["choices"][0]["message"]["audio"]
    with wave.open(io.BytesIO(base64.b64decode(audio["data"]))) as file:
        assert file.getframerate() == 24_000
        assert file.getnframes() == 9 * 12 * 480
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "audio.voice"
    assert "Ethan" in error["message"]
