"""Who is cancelled or fails leaves at once, and the neighbours do not notice."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_rt.errors import StageFailed

from . import tiny
from .fakes import RecordingOutbox, difference, loaded, run, stage, task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_rt_workers.engine import Task
    from omni_rt_workers.engines.diffusers_dit.engine import DiTEngine

PARAMS = {"height": 32, "width": 32, "num_inference_steps": 6, "guidance_scale": 0.0}


def ask(name: str, seed: int, value: float = 0.0, **more: Any) -> Task:
    generator = torch.Generator().manual_seed(500 + seed)
    text = torch.randn(6, tiny.CAPTION_DIM, generator=generator) + value
    return task(name, {"prompt_embeds": text}, {**PARAMS, **more}, seed=seed, want=("latents",))


@pytest.fixture
def crowd(folders: dict[str, str], out: RecordingOutbox) -> Iterator[DiTEngine]:
    engine = loaded(stage(folders["zimage"], policy="together"), out)
    yield engine
    engine.close()


def steps_until_cancel(engine: DiTEngine, count: int, *tasks: Task) -> None:
    for one in tasks:
        engine.add(one)
    for _ in range(count):
        engine.step()


def test_a_cancelled_request_never_calls_the_denoiser_again(
    crowd: DiTEngine, out: RecordingOutbox
) -> None:
    goes = ask("goes", 2)
    steps_until_cancel(crowd, 3, goes)
    calls = crowd.counts.calls
    crowd.abort(goes)
    run(crowd)
    assert crowd.counts.calls == calls
    assert not out.said["goes"].ended


def test_its_memory_is_back_without_the_collector(crowd: DiTEngine) -> None:
    goes, stays = ask("goes", 2), ask("stays", 1)
    steps_until_cancel(crowd, 3, goes, stays)
    painting = next(one for one in crowd._paintings if one.task is goes)
    call = painting.fibre.parked
    assert call is not None
    held = [weakref.ref(one) for one in tensors((call.args, call.kwargs))]
    assert held
    del call, painting
    gc.collect()
    gc.disable()
    try:
        crowd.abort(goes)
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()
    run(crowd)


def test_neighbours_of_one_that_fails_or_goes_get_what_they_get_without(
    crowd: DiTEngine, out: RecordingOutbox
) -> None:
    run(crowd, ask("before", 1))
    goes, broken = ask("goes", 2), ask("broken", 3, num_inference_steps=5)
    broken.inputs = task("", {"prompt_embeds": torch.ones(2, 2, 2, tiny.CAPTION_DIM)}, {}).inputs
    steps_until_cancel(crowd, 2, ask("stays", 1), goes, broken)
    crowd.abort(goes)
    run(crowd)
    assert isinstance(out.said["broken"].error, StageFailed)
    reference = out.said["before"].tensors["latents"]
    assert difference(out.said["stays"].tensors["latents"], reference) <= 1e-5


def test_a_request_of_nans_spoils_only_itself(crowd: DiTEngine, out: RecordingOutbox) -> None:
    run(crowd, ask("before", 1))
    run(crowd, ask("stays", 1), ask("nan", 2, value=float("nan")))
    assert crowd.counts.widest >= 2
    reference = out.said["before"].tensors["latents"]
    assert difference(out.said["stays"].tensors["latents"], reference) <= 1e-5


def tensors(value: Any) -> list[torch.Tensor]:
    """The request's own: not those that come with the pipeline."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [one for part in value.values() for one in tensors(part)]
    if isinstance(value, list | tuple):
        return [one for part in value for one in tensors(part)]
    return []
