"""What comes out is what the pipeline alone gives, whatever else is in the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import ImageChops

from . import tiny
from .fakes import RecordingOutbox, difference, loaded, run, stage, task

if TYPE_CHECKING:
    from omni_rt_workers.engine import Task

SIZE = {"height": 32, "width": 32}


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + seed))


def asked(
    family: str, seed: int, steps: int, tokens: int, **more: Any
) -> tuple[Task, dict[str, Any]]:
    """A task and the keyword arguments that ask the plain pipeline for the same."""
    params = {**SIZE, "num_inference_steps": steps, **more}
    if family == "zimage":
        params.setdefault("guidance_scale", 0.0)
        inputs = {"prompt_embeds": noise(tokens, tiny.CAPTION_DIM, seed=seed)}
        given: dict[str, Any] = {"prompt_embeds": [inputs["prompt_embeds"]]}
        if params["guidance_scale"] > 0:
            inputs["negative_prompt_embeds"] = noise(5, tiny.CAPTION_DIM, seed=77)
            given["negative_prompt_embeds"] = [inputs["negative_prompt_embeds"]]
    else:
        params.setdefault("guidance_scale", 1.0)
        inputs = {
            "prompt_embeds": noise(tokens, tiny.JOINT_DIM, seed=seed),
            "pooled_prompt_embeds": noise(tiny.POOLED_DIM, seed=seed),
        }
        given = {name: value.unsqueeze(0) for name, value in inputs.items()}
    plain = {**params, **given, "generator": torch.Generator("cpu").manual_seed(seed)}
    return task(f"r{seed}", inputs, params, seed=seed), plain


@pytest.mark.parametrize("family", ["zimage", "sd3", "flux"])
def test_alone_equals_the_plain_pipeline_bit_for_bit(
    family: str, folders: dict[str, str], plain: dict[str, Any], out: RecordingOutbox
) -> None:
    engine = loaded(stage(folders[family]), out)
    one, same = asked(family, seed=3, steps=4, tokens=7)
    run(engine, one)
    picture = plain[family](**same).images[0]
    said = out.said["r3"]
    assert said.error is None
    assert ImageChops.difference(said.images[0], picture).getbbox() is None
    assert said.meta == {"media_type": "image/png", "width": 32, "height": 32, "seed": 3}
    assert said.progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    engine.close()


@pytest.mark.parametrize("family", ["zimage", "sd3", "flux"])
def test_staggered_requests_equal_each_alone(
    family: str, folders: dict[str, str], plain: dict[str, Any], out: RecordingOutbox
) -> None:
    engine = loaded(stage(folders[family]), out)
    tokens = [3, 12, 7, 33, 12, 5] if family == "zimage" else [7] * 6
    steps = [4, 7, 3, 5, 6, 4]
    pairs = [
        asked(family, seed, n, t) for seed, (n, t) in enumerate(zip(steps, tokens, strict=True))
    ]
    for one, _ in pairs:
        one.emit = {"latents": one.emit["image"]}
    before = engine.counts.joined
    run(engine, *[one for one, _ in pairs], join_at=(0, 0, 1, 2, 2, 5))
    results = [out.said[one.request].tensors["latents"] for one, _ in pairs]
    alone = [plain[family](**same, output_type="latent").images for _, same in pairs]
    assert max(map(difference, results, alone)) <= 1e-5
    assert min(difference(results[i], alone[i - 1]) for i in range(6)) > 0.1
    assert engine.counts.widest >= 4
    assert engine.counts.joined - before >= 5
    engine.close()
