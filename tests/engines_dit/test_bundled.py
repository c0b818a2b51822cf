"""The bundled painter, as a stage loads it: a part of the demo's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import ImageChops

import omni_rt

from .fakes import RecordingOutbox, difference, loaded, run, stage, task

SHAPES = Path(omni_rt.__path__[0], "demo", "shapes")
pytestmark = pytest.mark.skipif(
    not (SHAPES / "painter" / "model_index.json").is_file(),
    reason="the bundled painter has not been trained",
)
PARAMS = {"height": 64, "width": 64, "num_inference_steps": 6, "guidance_scale": 0.0}


def test_the_bundled_painter_paints_a_batch_as_it_paints_alone(out: RecordingOutbox) -> None:
    from diffusers import ZImagePipeline

    plain = ZImagePipeline.from_pretrained(
        SHAPES / "painter",
        text_encoder=None,
        tokenizer=None,
        dtype=torch.float32,
        low_cpu_mem_usage=False,
    )
    plain.set_progress_bar_config(disable=True)
    engine = loaded(msgspec.structs.replace(stage(str(SHAPES)), part="painter"), out)
    width = plain.transformer.config.cap_feat_dim
    texts = [torch.randn(9 + i, width, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]

    def alone(seed: int, **more: Any) -> Any:
        generator = torch.Generator().manual_seed(seed)
        given = {"prompt_embeds": [texts[seed]], "negative_prompt_embeds": []}
        return plain(**PARAMS, **given, generator=generator, **more).images

    run(engine, task("image", {"prompt_embeds": texts[0]}, PARAMS, seed=0))
    assert ImageChops.difference(out.said["image"].images[0], alone(0)[0]).getbbox() is None

    names = ["first", "second"]
    inputs = [{"prompt_embeds": text} for text in texts]
    tasks = [
        task(name, given, PARAMS, seed=seed, want=("latents",))
        for seed, (name, given) in enumerate(zip(names, inputs, strict=True))
    ]
    run(engine, *tasks)
    assert engine.counts.widest == 2
    for seed, name in enumerate(names):
        expected = alone(seed, output_type="latent")
        assert difference(out.said[name].tensors["latents"], expected) <= 1e-5
    engine.close()
