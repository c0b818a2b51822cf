"""Requests come, go, fail and wait without touching each other."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest
import torch

from omni_rt.errors import BadRequest, ConfigError, StageFailed
from omni_rt_workers.engines.diffusers_dit.scheduler import Waiting
from tests.doubles import GivenInputs

from . import tiny
from .fakes import RecordingOutbox, difference, loaded, run, stage, task

if TYPE_CHECKING:
    from omni_rt_workers.engine import Task
    from omni_rt_workers.engines.diffusers_dit.engine import DiTEngine

PARAMS = {"height": 32, "width": 32, "num_inference_steps": 4, "guidance_scale": 0.0}


def embeddings(seed: int, tokens: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(500 + seed)
    return torch.randn(tokens, tiny.CAPTION_DIM, generator=generator)


def ask(name: str, seed: int = 0, tokens: int = 6, **more: Any) -> Task:
    params = {**PARAMS, **more.pop("params", {})}
    more.setdefault("want", ("latents",))
    return task(name, {"prompt_embeds": embeddings(seed, tokens)}, params, seed=seed, **more)


def live_tensors() -> int:
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


@pytest.fixture
def no_collector() -> Any:
    """What is freed in the test is freed by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that finds out by itself that its input is wrong."""
    from omni_rt_workers.engines.diffusers_dit import limits

    monkeypatch.setattr(limits, "check_embeddings", lambda *given: None)


def test_the_seed_alone_decides_the_noise(engine: DiTEngine, out: RecordingOutbox) -> None:
    run(engine, ask("a", seed=1), ask("b", seed=1), ask("c", seed=2))
    first, second, third = (out.said[name].tensors["latents"] for name in "abc")
    assert difference(first, second) <= 1e-5
    assert difference(third, first) > 0.1


def test_image_and_latents_together_are_those_of_separate_requests(
    engine: DiTEngine, out: RecordingOutbox
) -> None:
    for name, want in {"both": ("image", "latents"), "l": ("latents",), "i": ("image",)}.items():
        run(engine, ask(name, want=want))
    both = out.said["both"]
    assert both.order == ["latents", "image"]
    assert torch.equal(both.tensors["latents"], out.said["l"].tensors["latents"])
    assert both.images[0].tobytes() == out.said["i"].images[0].tobytes()
    assert both.usage == {"images": 1}


def test_an_image_as_tensor_has_the_pixels_of_the_png(
    engine: DiTEngine, out: RecordingOutbox
) -> None:
    run(engine, ask("png", want=("image",)))
    run(engine, ask("raw", want=("image",), encode=False))
    pixels = out.said["raw"].tensors["image"]
    assert pixels.dtype is torch.uint8
    assert pixels.shape == (32, 32, 3)
    assert bytes(pixels.flatten().tolist()) == out.said["png"].images[0].tobytes()


def test_abort_midway_leaves_the_others_as_they_were(
    engine: DiTEngine, out: RecordingOutbox
) -> None:
    run(engine, ask("alone", seed=1))
    stays, goes = ask("stays", seed=1), ask("goes", seed=2)
    engine.add(stays)
    engine.add(goes)
    engine.step()
    engine.step()
    engine.abort(goes)
    run(engine)
    alone = out.said["alone"].tensors["latents"]
    assert difference(out.said["stays"].tensors["latents"], alone) <= 1e-5
    assert not out.said["goes"].ended
    assert out.said["goes"].progress == [(1, 4), (2, 4)]


@pytest.mark.usefixtures("no_collector")
def test_memory_of_an_aborted_request_returns_without_the_collector(engine: DiTEngine) -> None:
    baseline = live_tensors()
    one = ask("goes")
    engine.add(one)
    engine.step()
    engine.step()
    assert live_tensors() > baseline + 1
    engine.abort(one)
    del one
    assert live_tensors() == baseline


@pytest.mark.usefixtures("no_collector", "unchecked")
@pytest.mark.parametrize("width", [tiny.CAPTION_DIM, tiny.CAPTION_DIM + 1])
def test_memory_of_an_ended_request_returns_without_the_collector(
    engine: DiTEngine, out: RecordingOutbox, width: int
) -> None:
    baseline = live_tensors()
    for name in ("one", "two"):  # the second: with joined structures already known
        made = task(name, {"prompt_embeds": torch.ones(6, width)}, PARAMS, want=("image",))
        run(engine, made, ask("other" + name, want=("image",)))
        del made
    assert live_tensors() == baseline
    assert (out.said["two"].error is None) == (width == tiny.CAPTION_DIM)


def test_a_failing_request_fails_alone(
    engine: DiTEngine, out: RecordingOutbox, unchecked: None
) -> None:
    run(engine, ask("alone", seed=1))
    bad = task("bad", {"prompt_embeds": torch.ones(6, tiny.CAPTION_DIM - 3)}, PARAMS)
    run(engine, ask("good", seed=1), bad, ask("late", seed=1), join_at=(0, 0, 2))
    error = out.said["bad"].error
    assert isinstance(error, StageFailed)
    assert "RuntimeError" in str(error)
    assert error.detail is not None
    assert "transformer_z_image" in error.detail
    for name in ("good", "late"):
        latents = out.said[name].tensors["latents"]
        assert difference(latents, out.said["alone"].tensors["latents"]) <= 1e-5


@pytest.mark.parametrize("port", ["prompt_embeds", "latents"])
def test_inputs_that_are_not_finite_are_refused(
    engine: DiTEngine, out: RecordingOutbox, port: str
) -> None:
    inputs = {"prompt_embeds": embeddings(0), "latents": torch.zeros(1, 4, 16, 16)}
    inputs[port].view(-1)[3] = float("nan")
    run(engine, task("one", inputs, PARAMS))
    error = out.said["one"].error
    assert isinstance(error, BadRequest)
    assert error.param == port


@pytest.mark.usefixtures("unchecked")
def test_a_request_whose_numbers_overflow_fails_alone(
    engine: DiTEngine, out: RecordingOutbox
) -> None:
    run(engine, ask("alone", seed=1, want=("image",)))
    bad = embeddings(0)
    bad[3] = float("nan")
    run(
        engine,
        task("bad", {"prompt_embeds": bad}, PARAMS),
        *(ask(name, seed=1, want=("image",)) for name in ("good", "late")),
        join_at=(0, 0, 1),
    )
    error = out.said["bad"].error
    assert isinstance(error, StageFailed)
    assert "not finite" in error.message
    assert engine.counts.joined > 4
    for name in ("good", "late"):
        assert out.said[name].images[0].tobytes() == out.said["alone"].images[0].tobytes()


def test_a_joined_call_that_fails_is_run_one_by_one(
    engine: DiTEngine, out: RecordingOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omni_rt_workers.engines.diffusers_dit import batch

    def broken(layouts: Any) -> Any:
        raise RuntimeError("no room")

    monkeypatch.setattr(batch, "join", broken)
    run(engine, ask("a", seed=1), ask("b", seed=2))
    assert out.said["a"].error is None
    assert out.said["b"].error is None
    # The structure that cannot be joined is not tried again: one run for each of 8 calls.
    runs = engine.counts.runs
    run(engine, ask("c", seed=1), ask("d", seed=2))
    assert engine.counts.runs == runs + 8


def test_a_held_request_waits_while_others_go_on(engine: DiTEngine, out: RecordingOutbox) -> None:
    out.hold_after.add("latents")
    held, other = ask("held", want=("image", "latents")), ask("other", want=("image",))
    run(engine, held, other)
    assert engine.idle
    assert held.held
    assert not out.said["held"].ended
    assert out.said["other"].ended
    held.held = False
    assert not engine.idle
    run(engine)
    assert out.said["held"].order == ["latents", "image"]


def test_a_request_starts_when_its_streamed_input_has_ended(
    engine: DiTEngine, out: RecordingOutbox
) -> None:
    whole = embeddings(0, tokens=9)
    run(engine, ask("whole", tokens=9))
    inputs = GivenInputs({"prompt_embeds": [whole[:4], whole[4:]]})
    inputs.open.add("prompt_embeds")
    streamed = ask("streamed")
    streamed.inputs = inputs
    engine.add(streamed)
    assert engine.idle
    inputs.open.clear()
    engine.feed(streamed, "prompt_embeds")
    assert not engine.idle
    run(engine)
    assert torch.equal(
        out.said["streamed"].tensors["latents"], out.said["whole"].tensors["latents"]
    )


def test_higher_priority_starts_first_and_slots_are_kept(
    folders: dict[str, str], out: RecordingOutbox
) -> None:
    engine = loaded(stage(folders["zimage"], max_batch=1), out)
    ended: list[str] = []
    tasks = [ask("low"), ask("high", priority=5), ask("low2")]
    for one in tasks:
        engine.add(one)
    while not engine.idle:
        engine.step()
        ended += [name for name, said in out.said.items() if said.ended and name not in ended]
    assert ended == ["high", "low", "low2"]
    engine.close()


def test_an_exact_request_runs_apart_and_equals_itself_alone(
    engine: DiTEngine, out: RecordingOutbox
) -> None:
    run(engine, ask("alone", seed=1))
    joined = engine.counts.joined
    run(engine, ask("exact", seed=1, params={"exact": True}), ask("other", seed=2))
    assert engine.counts.joined == joined
    alone = out.said["alone"].tensors["latents"]
    assert torch.equal(out.said["exact"].tensors["latents"], alone)
    run(engine, ask("not", seed=1, params={"exact": False}), ask("other2", seed=2))
    assert engine.counts.joined == joined + 4


def test_a_short_request_overtakes_a_long_one_of_another_size(
    folders: dict[str, str], out: RecordingOutbox
) -> None:
    """With one place in a step; by first come, first served it comes last."""
    for policy in ("fair", "first_come"):
        engine = loaded(stage(folders["zimage"], max_batch=1, policy=policy), out)
        long = ask(f"{policy} long", params={"num_inference_steps": 30, "height": 64})
        short = ask(f"{policy} short", params={"num_inference_steps": 2})
        engine.add(long)
        for _ in range(3):
            engine.step()
        engine.add(short)
        while not out.said[short.request].ended:
            engine.step()
        assert out.said[long.request].ended == (policy == "first_come")
        engine.close()


def test_with_one_place_nothing_is_ever_joined(
    folders: dict[str, str], out: RecordingOutbox
) -> None:
    engine = loaded(stage(folders["zimage"], max_batch=1), out)
    run(engine, ask("a", seed=1), ask("b", seed=2))
    assert (engine.counts.widest, engine.counts.joined) == (1, 0)
    engine.close()


def test_a_step_holds_at_most_max_batch_requests_of_all_in_work(
    folders: dict[str, str], out: RecordingOutbox
) -> None:
    engine = loaded(stage(folders["zimage"], max_batch=2, slots=5), out)
    names = [f"r{n}" for n in range(6)]
    for n, name in enumerate(names):
        engine.add(ask(name, seed=n))
    engine.step()
    assert engine.working == 5
    run(engine)
    assert engine.counts.widest == 2
    run(engine, ask("alone", seed=5))
    alone = out.said["alone"].tensors["latents"]
    assert difference(out.said["r5"].tensors["latents"], alone) <= 1e-5
    engine.close()


class Noting:
    """A policy that notes what it is told."""

    seen: ClassVar[list[Waiting]] = []

    def __init__(self, max_batch: int) -> None:
        self.max_batch = max_batch

    def schedule(self, waiting: Sequence[Waiting], now: float) -> list[list[Waiting]]:
        self.seen.extend(waiting)
        return [[waiting[0]]]

    def ran(self, group: Sequence[Waiting], seconds: float, *, usual: bool = True) -> None:
        assert seconds > 0
        assert usual


def test_a_policy_of_ones_own_is_told_what_is_to_be_known(
    folders: dict[str, str], out: RecordingOutbox
) -> None:
    Noting.seen.clear()
    engine = loaded(stage(folders["zimage"], policy=f"{__name__}:Noting"), out)
    joined = engine.counts.joined
    timed = ask("timed", priority=3)
    timed.deadline = 1e9
    run(engine, timed, ask("other", params={"num_inference_steps": 2}))
    first, second = Noting.seen[:2]
    assert (first.priority, first.deadline, first.left, first.rows) == (3, 1e9, 4, 1)
    assert (second.priority, second.deadline, second.left, second.rows) == (0, None, 2, 1)
    assert first.group == second.group
    assert first.request < second.request
    assert [one.left for one in Noting.seen if one.priority == 3] == [4, 3, 2, 1]
    assert engine.counts.joined == joined
    engine.close()


def test_an_unknown_policy_stops_the_start(folders: dict[str, str], out: RecordingOutbox) -> None:
    with pytest.raises(ConfigError, match="no policy 'fare'.*did you mean 'fair'"):
        loaded(stage(folders["zimage"], policy="fare"), out)


def test_grad_mode_stays_off_even_if_another_engine_turns_it_on(
    engine: DiTEngine, out: RecordingOutbox
) -> None:
    engine.add(ask("a", params={"num_inference_steps": 2}))
    engine.add(ask("b"))
    while not engine.idle:
        torch.set_grad_enabled(True)
        engine.step()
        assert not torch.is_grad_enabled()
    assert not out.said["b"].tensors["latents"].requires_grad


def test_close_ends_what_is_in_work(folders: dict[str, str], out: RecordingOutbox) -> None:
    engine = loaded(stage(folders["zimage"]), out)
    gc.collect()
    one = ask("one")
    engine.add(one)
    engine.step()
    engine.close()
    assert not out.said["one"].ended


def test_an_unknown_parameter_is_refused_by_name(engine: DiTEngine) -> None:
    with pytest.raises(BadRequest, match="guidance_scal.*did you mean 'guidance_scale'") as raised:
        engine.add(ask("one", params={"guidance_scal": 1.0}))
    assert raised.value.param == "guidance_scal"


def test_a_size_the_pipeline_cannot_make_is_a_bad_request(
    engine: DiTEngine, out: RecordingOutbox
) -> None:
    run(engine, ask("one", params={"height": 33}))
    assert isinstance(out.said["one"].error, BadRequest)
    assert "divisible by 4" in str(out.said["one"].error)


def test_missing_embeddings_are_a_bad_request(engine: DiTEngine, out: RecordingOutbox) -> None:
    run(engine, task("one", {}, PARAMS))
    error = out.said["one"].error
    assert isinstance(error, BadRequest)
    assert error.param == "prompt_embeds"


def test_guidance_without_negative_embeddings_is_a_bad_request(
    folders: dict[str, str], out: RecordingOutbox
) -> None:
    engine = loaded(stage(folders["sd3"]), out)
    inputs = {
        "prompt_embeds": torch.ones(7, tiny.JOINT_DIM),
        "pooled_prompt_embeds": torch.ones(tiny.POOLED_DIM),
    }
    run(engine, task("one", inputs, {**PARAMS, "guidance_scale": 5.0}))
    error = out.said["one"].error
    assert isinstance(error, BadRequest)
    assert "needs negative_prompt_embeds too" in str(error)
    engine.close()


def test_the_models_own_table_of_positions_limits_the_size(
    folders: dict[str, str], out: RecordingOutbox
) -> None:
    from omni_rt_workers.engines import diffusers_dit

    engine = diffusers_dit.make(stage(folders["zimage"], max_side=4096), out)
    params = {spec.name: spec for spec in engine.load(lambda phase, fraction: None).params}
    assert params["height"].maximum == params["width"].maximum == 256  # 64 positions of 4 pixels
    engine.close()


def test_ports_are_those_of_the_signature(folders: dict[str, str], out: RecordingOutbox) -> None:
    from omni_rt_workers.engines import diffusers_dit

    engine = diffusers_dit.make(stage(folders["zimage"], max_side=128), out)
    phases: list[str] = []
    ports = engine.load(lambda phase, fraction: phases.append(phase))
    assert phases == ["importing diffusers", "loading weights", "warming up"]
    assert [port.name for port in ports.inputs] == [
        "latents",
        "prompt_embeds",
        "negative_prompt_embeds",
    ]
    assert [(port.name, port.kind) for port in ports.outputs] == [
        ("image", "image"),
        ("latents", "tensor"),
        ("preview", "image"),
    ]
    params = {spec.name: spec for spec in ports.params}
    assert set(params) == {
        "height",
        "width",
        "num_inference_steps",
        "guidance_scale",
        "cfg_normalization",
        "cfg_truncation",
        "exact",
        "preview_every",
        "scheduler",
        "seed",
    }
    assert (params["height"].minimum, params["height"].maximum) == (4, 128)
    assert params["height"].multiple_of == 4
    assert params["guidance_scale"].kind == "float"
    assert params["cfg_normalization"].kind == "bool"
    assert engine.memory()["weights"] > 10_000
    engine.close()


def test_a_wrong_stage_is_refused_with_what_to_do(
    folders: dict[str, str], out: RecordingOutbox
) -> None:
    with pytest.raises(ConfigError, match="no option 'thread'.*did you mean 'threads'"):
        loaded(stage(folders["zimage"], thread=1), out)
    wrong = msgspec.structs.replace(stage(folders["zimage"]), sampling={"hight": 64})
    with pytest.raises(ConfigError, match="no parameter 'hight'.*did you mean 'height'"):
        loaded(wrong, out)
    with pytest.raises(ConfigError, match=r"bytes of the 1,000 it may use.*raise its memory"):
        loaded(stage(folders["zimage"], memory_bytes=1000), out)


def test_an_untested_diffusers_is_refused_with_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from omni_rt_workers.engines.diffusers_dit import guard

    monkeypatch.setattr(guard, "version", lambda package: "0.99.0")
    with pytest.raises(ConfigError, match=r"0\.99\.0 is untested.*pip install"):
        guard.check("painter")
