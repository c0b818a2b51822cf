"""What comes out is what the pipeline alone gives, whatever else is in the batch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import diffusers
import msgspec
import pytest
import torch
from PIL import ImageChops

from omni_rt.errors import BadRequest, ConfigError

from . import tiny
from .fakes import RecordingOutbox, difference, loaded, run, stage, task

if TYPE_CHECKING:
    from omni_rt_workers.engine import Task

Asked = tuple["Task", dict[str, Any]]
"""A task, and the keyword arguments that ask the plain pipeline for the same."""

FAMILIES = ["zimage", "sd3", "flux", "stable_diffusion"]


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + seed))


def asked(family: str, seed: int, steps: int, tokens: int, **more: Any) -> Asked:
    params = {"height": 32, "width": 32, "num_inference_steps": steps, **more}
    if family == "zimage":
        params.setdefault("guidance_scale", 0.0)
        inputs = {"prompt_embeds": noise(tokens, tiny.CAPTION_DIM, seed=seed)}
        if params["guidance_scale"] > 0:
            inputs["negative_prompt_embeds"] = noise(5, tiny.CAPTION_DIM, seed=77)
        given: dict[str, Any] = {name: [value] for name, value in inputs.items()}
    else:
        params.setdefault("guidance_scale", 1.0)
        inputs = {"prompt_embeds": noise(tokens, tiny.JOINT_DIM, seed=seed)}
        if family != "stable_diffusion":
            inputs["pooled_prompt_embeds"] = noise(tiny.POOLED_DIM, seed=seed)
        given = {name: value.unsqueeze(0) for name, value in inputs.items()}
    made = task(f"r{seed}", inputs, params, seed=seed, want=("latents",))
    return made, {**params, **given, "generator": torch.Generator("cpu").manual_seed(seed)}


def alone(pipeline: Any, arguments: dict[str, Any]) -> torch.Tensor:
    latents: torch.Tensor = pipeline(**arguments, output_type="latent").images
    return latents


def results(out: RecordingOutbox, pairs: list[Asked]) -> list[torch.Tensor]:
    return [out.said[made.request].tensors["latents"] for made, _ in pairs]


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_equals_the_plain_pipeline_bit_for_bit(
    family: str, folders: dict[str, str], plain: dict[str, Any], out: RecordingOutbox
) -> None:
    engine = loaded(stage(folders[family]), out)
    latents, same = asked(family, seed=4, steps=4, tokens=7)
    run(engine, latents)
    assert torch.equal(out.said["r4"].tensors["latents"], alone(plain[family], same))

    image, same = asked(family, seed=3, steps=4, tokens=7)
    image.emit = {"image": image.emit["latents"].__class__("image", "shm", True, False)}
    run(engine, image)
    picture = plain[family](**same).images[0]
    said = out.said["r3"]
    assert ImageChops.difference(said.images[0], picture).getbbox() is None
    assert said.meta == {"media_type": "image/png", "width": 32, "height": 32, "seed": 3}
    total = 5 if family == "stable_diffusion" else 4  # PNDM does the second of its steps twice
    assert said.progress == [(step, total) for step in range(1, total + 1)]
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_staggered_requests_equal_each_alone(
    family: str, folders: dict[str, str], plain: dict[str, Any], out: RecordingOutbox
) -> None:
    engine = loaded(stage(folders[family]), out)
    tokens = [3, 12, 7, 33, 12, 5] if family == "zimage" else [7] * 6
    steps = [4, 7, 3, 5, 6, 4]
    pairs = [asked(family, i, n, t) for i, (n, t) in enumerate(zip(steps, tokens, strict=True))]
    before = engine.counts.joined
    run(engine, *[made for made, _ in pairs], join_at=(0, 0, 1, 2, 2, 5))
    expected = [alone(plain[family], same) for _, same in pairs]
    assert max(map(difference, results(out, pairs), expected)) <= 1e-5
    others = expected[1:] + expected[:1]
    assert min(map(difference, results(out, pairs), others)) > 0.1
    assert engine.counts.widest >= 4
    assert engine.counts.joined - before >= 5
    engine.close()


def test_guided_and_unguided_requests_share_a_batch(
    folders: dict[str, str], plain: dict[str, Any], out: RecordingOutbox
) -> None:
    engine = loaded(stage(folders["zimage"]), out)
    pairs = [asked("zimage", i, 3, 6 + i, guidance_scale=2.5 * i) for i in range(3)]
    runs = engine.counts.runs
    run(engine, *[made for made, _ in pairs])
    assert engine.counts.runs == runs + 3
    expected = [alone(plain["zimage"], same) for _, same in pairs]
    assert max(map(difference, results(out, pairs), expected)) <= 1e-5
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_of_other_sizes_run_apart_and_exact(
    family: str, folders: dict[str, str], plain: dict[str, Any], out: RecordingOutbox
) -> None:
    engine = loaded(stage(folders[family]), out)
    pairs = [asked(family, 0, 3, 7, height=16), asked(family, 1, 3, 7, width=24)]
    joined = engine.counts.joined
    run(engine, *[made for made, _ in pairs])
    assert engine.counts.joined == joined
    expected = [alone(plain[family], same) for _, same in pairs]
    assert all(map(torch.equal, results(out, pairs), expected))
    engine.close()


def test_arguments_as_long_as_the_batch_by_accident_are_not_joined(
    folders: dict[str, str],
    plain: dict[str, Any],
    out: RecordingOutbox,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two rows and two text tokens: Flux's txt_ids look as if they had the batch axis."""
    engine = loaded(stage(folders["flux"]), out)
    pairs = []
    for seed in range(2):
        made, same = asked("flux", seed, 3, 2)
        rows = {
            "prompt_embeds": noise(2, 2, tiny.JOINT_DIM, seed=seed),
            "pooled_prompt_embeds": noise(2, tiny.POOLED_DIM, seed=seed),
        }
        made.inputs = task("", rows, {}).inputs
        pairs.append((made, {**same, **rows}))
    with caplog.at_level(logging.WARNING, "omni_rt_workers"):
        run(engine, *[made for made, _ in pairs])
    expected = [alone(plain["flux"], same) for _, same in pairs]
    assert max(map(difference, results(out, pairs), expected)) <= 1e-5
    assert engine.counts.joined == 3
    assert not caplog.records
    engine.close()


def test_a_model_whose_rows_depend_on_each_other_is_not_joined(
    folders: dict[str, str],
    plain: dict[str, Any],
    out: RecordingOutbox,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from omni_rt_workers.engines.diffusers_dit import batch, join

    def mixed(layouts: Any) -> dict[str, Any]:
        arguments = join.join(layouts)
        arguments["pooled_projections"] = arguments["pooled_projections"].roll(1, 0)
        return arguments

    monkeypatch.setattr(batch, "join", mixed)
    engine = loaded(stage(folders["sd3"]), out)
    pairs = [asked("sd3", seed, 3, 7) for seed in range(3)]
    with caplog.at_level(logging.WARNING, "omni_rt_workers"):
        run(engine, *[made for made, _ in pairs])
    expected = [alone(plain["sd3"], same) for _, same in pairs]
    assert all(map(torch.equal, results(out, pairs), expected))
    assert engine.counts.joined == 1  # the probe
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "transformer calls run one by one" in caplog.text
    engine.close()


def test_prompts_are_read_if_there_is_a_text_encoder(
    folders: dict[str, str], plain: dict[str, Any], out: RecordingOutbox
) -> None:
    engine = loaded(stage(folders["zimage_with_text"]), out)
    params = {"height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 32}
    tasks = []
    for seed, text in enumerate(["a red circle", "two blue squares on a green disc"]):
        made = task(f"r{seed}", {}, {**params, "guidance_scale": 2.0}, want=("latents",), seed=seed)
        made.params["negative_prompt"] = "dull"
        tasks.append(made)
        same = {**made.params, "prompt": text, "generator": torch.Generator().manual_seed(seed)}
        out.said[f"plain{seed}"].tensors["latents"] = alone(plain["zimage_with_text"], same)
    tasks[0].values["prompt"] = "a red circle"
    tasks[1].values["messages"] = [
        {"role": "user", "content": "something else"},
        {"role": "assistant", "content": "Like this?"},
        {"role": "user", "content": "two blue squares on a green disc"},
    ]
    run(engine, *tasks)
    for seed in range(2):
        expected = out.said[f"plain{seed}"].tensors["latents"]
        assert difference(out.said[f"r{seed}"].tensors["latents"], expected) <= 1e-5
    engine.close()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_each_request_may_have_a_scheduler_of_its_own(
    folders: dict[str, str], out: RecordingOutbox
) -> None:
    # With the scheduler as saved: one that never was takes fewer values over into another class.
    saved = f"{folders['stable_diffusion']}/scheduler"
    pipeline = tiny.stable_diffusion()
    pipeline.register_modules(scheduler=diffusers.PNDMScheduler.from_pretrained(saved))
    pipeline.set_progress_bar_config(disable=True)
    engine = loaded(stage(folders["stable_diffusion"]), out)
    own, expected = pipeline.scheduler, []
    names = ["EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"]
    pairs = [asked("stable_diffusion", seed, 4, 7) for seed in range(4)]
    for (made, same), name in zip(pairs, [*names, None], strict=True):
        pipeline.scheduler = own
        if name is not None:
            made.params["scheduler"] = name
            pipeline.scheduler = getattr(diffusers, name).from_config(own.config)
        expected.append(alone(pipeline, same))
    joined = engine.counts.joined
    run(engine, *[made for made, _ in pairs])
    assert max(map(difference, results(out, pairs), expected)) <= 1e-5
    assert difference(results(out, pairs)[0], alone(pipeline, pairs[0][1])) > 0.1  # its default
    assert engine.counts.joined > joined
    engine.close()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_scheduler_that_does_not_fit_is_refused(
    folders: dict[str, str], out: RecordingOutbox
) -> None:
    engine = loaded(stage(folders["zimage"]), out)
    made, _ = asked("zimage", 0, 3, 7)
    made.params["scheduler"] = "DDIMScheduler"
    with pytest.raises(BadRequest, match="no scheduler 'DDIMScheduler'.*FlowMatchEuler") as raised:
        engine.add(made)
    assert raised.value.param == "scheduler"
    engine.close()
    stray = msgspec.structs.replace(
        stage(folders["stable_diffusion"]), sampling={"scheduler": "UniPC"}
    )
    with pytest.raises(ConfigError, match="no scheduler 'UniPC'.*UniPCMultistepScheduler"):
        loaded(stray, out)
