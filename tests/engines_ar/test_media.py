"""Sound in a prompt, on a tiny Qwen2-Audio: the same reply as in transformers."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from omni_rt.errors import BadRequest

from . import tiny
from .fakes import Loaded, loaded, task

pytestmark = pytest.mark.model

RATE = 16000
AUDIO = "<|AUDIO|>"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'audio' %}<|audio_bos|><|AUDIO|>"
    "<|audio_eos|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers', with its folder as `name_or_path`."""
    folder = tmp_path_factory.mktemp("audio")
    tokenizer: Any = tiny._tokenizer(chat=True)
    tokenizer.add_tokens([AUDIO, "<|audio_bos|>", "<|audio_eos|>"], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 96,
            "d_model": 64,
            "max_source_positions": 1500,
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids(AUDIO),
    )
    model = Qwen2AudioForConditionalGeneration(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
    model.save_pretrained(folder)
    # Under the names of the published checkpoints, which vLLM reads; transformers writes others.
    file = folder / "model.safetensors"
    named = {
        name.replace("language_model.model.model.", "language_model.model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(named, file, {"format": "pt"})
    Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=128),
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    model.name_or_path = str(folder)
    return model.eval()


@pytest.fixture(scope="module")
def one(model: Any) -> Iterator[Loaded]:
    vllm = {"skip_mm_profiling": True, "mm_processor_cache_gb": 0}
    with loaded(Path(model.name_or_path), vllm=vllm) as made:
        yield made


def sound(seed: int, seconds: float = 0.5) -> np.ndarray[Any, Any]:
    noise = np.random.default_rng(seed).normal(0, 6000, int(RATE * seconds))
    return noise.clip(-32768, 32767).astype(np.int16)


def wav(samples: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(samples.tobytes())
    return file.getvalue()


def asked(*sounds: bytes) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "what is "}]
    parts += [{"type": "audio", "data": data, "media_type": "audio/wav"} for data in sounds]
    return {"messages": [{"role": "user", "content": parts}]}


def test_replies_to_sound_equal_transformers(one: Loaded, model: Any) -> None:
    processor = Qwen2AudioProcessor.from_pretrained(model.name_or_path)
    heard = [[sound(1)], [sound(2)], [sound(1), sound(2, 0.8)]]
    replies = one.run(
        *[
            task(asked(*[wav(each) for each in sounds]), max_tokens=6, ignore_eos=True)
            for sounds in heard
        ]
    )
    for sounds, reply in zip(heard, replies, strict=True):
        places = f"<|audio_bos|>{AUDIO}<|audio_eos|>" * len(sounds)
        inputs = processor(
            text=f"<|start|>user\nwhat is {places}<|end|><|start|>assistant\n",
            audio=[each.astype(np.float32) / 32768 for each in sounds],
            sampling_rate=RATE,
            return_tensors="pt",
        )
        out = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        length = inputs["input_ids"].shape[1]
        assert reply.tokens == out[0, length:].tolist()
        assert reply.usage["prompt_tokens"] == length
    assert one.ports.takes == ("audio",)
    assert one.leftovers == {}


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "audio", "data": b"nothing", "media_type": "audio/wav"}, "cannot be read"),
        ({"type": "image", "data": b"x", "media_type": "image/png"}, "takes no images"),
    ],
)
def test_what_cannot_be_heard_is_refused(one: Loaded, part: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        one.engine.add(task({"messages": [{"role": "user", "content": [part]}]}))
    assert one.engine.idle
