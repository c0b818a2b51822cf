"""Previews show where a request is going, and change nothing of where it comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from omni_rt_workers.engines.diffusers_dit.previews import fit

from . import tiny
from .fakes import RecordingOutbox, run, task

if TYPE_CHECKING:
    from omni_rt_workers.engine import Task
    from omni_rt_workers.engines.diffusers_dit.engine import DiTEngine

PARAMS = {"height": 32, "width": 48, "guidance_scale": 0.0}


def ask(name: str, *want: str, **params: Any) -> Task:
    given = torch.randn(6, tiny.CAPTION_DIM, generator=torch.Generator().manual_seed(1))
    return task(name, {"prompt_embeds": given}, {**PARAMS, **params}, want=want)


@pytest.mark.parametrize(
    ("steps", "every", "expected"), [(11, None, 2), (10, None, 1), (6, 2, 2), (4, 9, 0), (1, 1, 0)]
)
def test_a_preview_comes_every_so_many_steps_and_the_picture_stays_the_same(
    engine: DiTEngine, out: RecordingOutbox, steps: int, every: int | None, expected: int
) -> None:
    more = {"num_inference_steps": steps, **({"preview_every": every} if every else {})}
    given = ask("with", "image", **more)
    given.emit["preview"] = given.emit["image"].__class__("preview", "shm", True, False)
    run(engine, given)
    run(engine, ask("without", "image", num_inference_steps=steps))
    said = out.said["with"]
    assert said.order == ["preview"] * expected + ["image"]
    assert said.images[-1].tobytes() == out.said["without"].images[0].tobytes()
    assert out.said["without"].order == ["image"]
    for preview in said.images[:-1]:
        assert (preview.format, preview.size) == ("JPEG", (24, 16))  # a pixel for each latent


def test_a_preview_looks_like_the_decoded_picture() -> None:
    """With a decoder that is linear but for its noise, the fit must find it."""
    pipeline = tiny.stable_diffusion()
    mix = torch.tensor([[0.3, 0.0, -0.2, 0.1], [0.0, 0.4, 0.1, 0.0], [0.2, -0.1, 0.0, 0.3]])

    def decode(latents: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        colours = torch.einsum("oc,bchw->bohw", mix, latents) + 0.1
        return (functional.interpolate(colours, scale_factor=2.0),)

    pipeline.vae.decode = decode
    previews = fit(pipeline)
    assert previews is not None
    latents = torch.randn(1, 4, 5, 7, generator=torch.Generator().manual_seed(3))
    scale, shift = pipeline.vae.config.scaling_factor, pipeline.vae.config.shift_factor
    (decoded,) = decode(latents / scale + shift, return_dict=False)
    levels = ((decoded[0, :, ::2, ::2].clamp(-1, 1) + 1) * 127.5).round().movedim(0, -1)
    picture = previews.picture(latents)
    seen = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(5, 7, 3)
    assert (seen.float() - levels).abs().max() <= 1


def test_pipelines_that_pack_their_latents_offer_no_previews() -> None:
    assert fit(tiny.flux()) is None
