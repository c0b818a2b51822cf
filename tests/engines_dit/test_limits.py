"""What cannot be made is refused with the parameter and the limit, before anything is computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_rt.errors import BadRequest
from omni_rt.runtime.admission import check_product, check_value
from omni_rt_workers.engines import diffusers_dit
from omni_rt_workers.engines.diffusers_dit.limits import Limits, bytes_per_pixel, most_pixels

from . import tiny
from .fakes import RecordingOutbox, loaded, run, stage, task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_rt.wire.messages import Ports
    from omni_rt_workers.engines.diffusers_dit.engine import DiTEngine

PARAMS = {"height": 32, "width": 32, "num_inference_steps": 2}


def ports_of(folder: str, out: RecordingOutbox, **options: Any) -> Ports:
    engine = diffusers_dit.make(stage(folder, **options), out)
    ports = engine.load(lambda phase, fraction: None)
    engine.close()
    return ports


def admit(ports: Ports, **params: Any) -> None:
    """As main does before it queues a request."""
    specs = {spec.name: spec for spec in ports.params}
    for name, value in params.items():
        check_value(specs[name], value, name)
    for limit in ports.products:
        check_product(limit, params)


@pytest.fixture(scope="module")
def ports(folders: dict[str, str]) -> Ports:
    return ports_of(folders["stable_diffusion"], RecordingOutbox(), max_pixels=64 * 64)


@pytest.fixture
def sd3(folders: dict[str, str], out: RecordingOutbox) -> Iterator[DiTEngine]:
    engine = loaded(stage(folders["sd3"]), out)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("param", "value", "told"),
    [
        ("width", 100_000, "at least 2 and at most 2048, got 100000"),
        ("height", 0, "at least 2"),
        ("width", 33, "multiple of 2"),
        ("num_inference_steps", 0, "at least 1 and at most 1000, got 0"),
        ("num_inference_steps", 10**9, "at most 1000"),
        ("guidance_scale", -1.0, "at least 0, got -1"),
        ("guidance_scale", float("nan"), "finite"),
        ("num_inference_steps", "many", "of type int"),
    ],
)
def test_a_value_out_of_bounds_is_refused(ports: Ports, param: str, value: Any, told: str) -> None:
    with pytest.raises(BadRequest, match=told) as raised:
        admit(ports, **{param: value})
    assert raised.value.param == param


def test_pixels_are_limited_together(ports: Ports) -> None:
    admit(ports, height=32, width=128)
    with pytest.raises(BadRequest, match=r"at most 4,096 pixels, got 66 x 64") as raised:
        admit(ports, height=66, width=64)
    assert raised.value.param == "height"
    with pytest.raises(BadRequest, match=r"got 32 x 256") as raised:
        admit(ports, width=256)  # its height is the pipeline's own
    assert raised.value.param == "width"


def test_the_stages_memory_limits_the_pixels(folders: dict[str, str], out: RecordingOutbox) -> None:
    """Four float32 tensors of 16 channels for each pixel at the decoder's end."""
    folder = folders["stable_diffusion"]
    engine = loaded(stage(folder), out)
    weights = engine.memory()["weights"]
    engine.close()
    assert ports_of(folder, out).products[0].maximum > 10**6  # what this machine has
    tight = ports_of(folder, out, memory_bytes=weights + 256 * 100)
    assert tight.products[0].maximum == 100
    with pytest.raises(BadRequest, match="at most 100 pixels"):
        admit(tight, height=16, width=16)


def test_films_are_not_counted_as_if_decoded_at_once() -> None:
    vae = SimpleNamespace(config=SimpleNamespace(block_out_channels=[96, 192]), dtype=torch.float32)
    film = SimpleNamespace(vae=vae, video_processor=object())
    assert bytes_per_pixel(film) == 24
    assert bytes_per_pixel(SimpleNamespace(vae=None)) == 0
    assert most_pixels(SimpleNamespace(vae=None), Limits(), room=10) is None
    assert most_pixels(film, Limits(max_pixels=7), room=24_000) == 7
    assert most_pixels(film, Limits(), room=-5) == 0


@pytest.mark.parametrize("port", ["prompt_embeds", "pooled_prompt_embeds"])
def test_embeddings_of_the_wrong_width_never_reach_the_model(
    sd3: DiTEngine, out: RecordingOutbox, port: str
) -> None:
    widths = {"prompt_embeds": tiny.JOINT_DIM, "pooled_prompt_embeds": tiny.POOLED_DIM}
    right = widths[port]
    widths[port] += 1
    inputs = {
        "prompt_embeds": torch.ones(7, widths["prompt_embeds"]),
        "pooled_prompt_embeds": torch.ones(widths["pooled_prompt_embeds"]),
    }
    calls = sd3.counts.calls
    run(sd3, task("one", inputs, {**PARAMS, "guidance_scale": 1.0}))
    error = out.said["one"].error
    assert isinstance(error, BadRequest)
    assert error.param == port
    assert f"must have {right} channels" in error.message
    assert sd3.counts.calls == calls


def test_a_text_longer_than_the_models_positions_is_refused(
    engine: DiTEngine, out: RecordingOutbox
) -> None:
    """Of 256 positions the text, padded to a multiple of 32, leaves the picture one: 224 tokens."""
    params = {**PARAMS, "guidance_scale": 0.0}
    most, more = (torch.ones(tokens, tiny.CAPTION_DIM) for tokens in (224, 225))
    run(engine, task("most", {"prompt_embeds": most}, params))
    assert out.said["most"].error is None
    run(engine, task("more", {"prompt_embeds": more}, params))
    error = out.said["more"].error
    assert isinstance(error, BadRequest)
    assert error.param == "prompt_embeds"
    assert "at most 224 tokens, got 225" in error.message


def test_a_size_beyond_the_models_positions_is_refused(
    folders: dict[str, str], out: RecordingOutbox
) -> None:
    ports = ports_of(folders["sd3"], out)
    with pytest.raises(BadRequest, match="at most 64, got 68") as raised:  # 16 patches of 4 pixels
        admit(ports, height=68)
    assert raised.value.param == "height"
