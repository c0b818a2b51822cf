"""Every row of docs/names.md: the name is where the page says, and works."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import omni_rt
from omni_rt.config import bundled
from tests.compat.stages import painter, writer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "names.md").read_text()
ROWS = dict(re.findall(r"^\| `?([\w ]+?)`? \| `([\w.]+:\w+)` \|", PAGE, re.MULTILINE))
MODEL = {
    "OmniARModelRunner",
    "OmniDiffusionModelRunner",
    "diffusers executor",
    "omni worker",
    "vae utils",
    "multimodal utils",
}


def found(name: str) -> Any:
    module, _, attribute = ROWS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def fields(cls: type) -> dict[str, object]:
    """Names with defaults, `...` where there is none."""
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: ... if p.default is p.empty else p.default for p in parameters}


def stage_config() -> None:
    required = ["stage_id", "engine_type", "model_path", "input_modalities", "output_modalities"]
    optional = ["vllm_config", "executor_class", "dit_config", "cache_config", "stage_output"]
    expected = {**dict.fromkeys(required, ...), **dict.fromkeys(optional)}
    assert fields(omni_rt.OmniStageConfig) == expected


def dit_config() -> None:
    required = ["model_type", "scheduler_type", "num_inference_steps", "guidance_scale"]
    expected = {**dict.fromkeys(required, ...), "use_diffusers": False, "diffusers_pipeline": None}
    assert fields(omni_rt.DiTConfig) == expected


def cache_config() -> None:
    assert fields(omni_rt.DiTCacheConfig) == {
        "cache_tensors": ...,
        "max_cache_size": ...,
        "cache_strategy": "fifo",
        "enable_optimization": True,
    }


def cache_manager() -> None:
    tensor = omni_rt.DiTCacheTensor("prompt_embeds")
    cache = found("DiTCacheManager")(omni_rt.DiTCacheConfig([tensor], 10))
    for key in "abc":
        assert cache.put(key, key.upper(), 4)
    assert [cache.get(key) for key in "abc"] == [None, "B", "C"]
    assert (cache.counts.hits, cache.counts.misses, cache.counts.evictions) == (2, 1, 1)


def llm() -> None:
    with found("OmniLLM")([writer(), painter()]) as made:
        (result,) = made.generate([{"prompt": "x"}, {}])
    assert result.images


def async_llm() -> None:
    import asyncio

    async def ask() -> Any:
        async with found("AsyncOmniLLM")([writer()]) as made:
            return await made.generate_async([{"prompt": "x"}])

    assert asyncio.run(ask())[0].outputs[0].text


def processor() -> None:
    made = found("MultimodalOutputProcessor")()
    assert {"image", "text+image", "latents", "text"} <= made.output_handlers.keys()
    core = SimpleNamespace(request_id="1", new_token_ids=[], pooling_output=3)
    assert made.process_outputs([core])[0].pooled == [3]


def scheduler() -> None:
    waiting = importlib.import_module(found("OmniDiffusionScheduler").__module__).Waiting
    calls = [waiting(k, "g", "s", 1, 0, left=5 - k) for k in range(3)]
    (group,) = found("OmniDiffusionScheduler")(2).schedule(calls, 0.0)
    assert len(group) == 2


def engine() -> None:
    methods = {"load", "add", "feed", "abort", "step", "close"}
    assert methods <= set(dir(found("base executor")))


def core() -> None:
    from omni_rt.config import parse_pipeline
    from omni_rt.graph import Graph

    text = "stages: {a: {engine: echo}}\noutputs: {text: a.text}\n"
    config = parse_pipeline(text, "x")
    made = found("stage manager")(config, Graph.from_config(config))
    assert list(made.stages) == ["a"]
    assert made.start(0.0).spawn


def request() -> None:
    assert found("request")(prompt="x").outputs == ()


def ar_runner() -> None:
    signature = inspect.signature(found("OmniARModelRunner").execute_model)
    assert list(signature.parameters) == ["self", "scheduler_output", "intermediate_tensors"]
    assert signature.parameters["intermediate_tensors"].default is None


def worker() -> None:
    assert issubclass(found("omni worker"), found("OmniARModelRunner"))


def png() -> None:
    from PIL import Image

    assert found("multimodal utils")(Image.new("RGB", (2, 2))).startswith(b"\x89PNG")


def callable_here() -> None:
    """Used by tests of its own in this folder."""


CHECKS: dict[str, Callable[[], None]] = {
    "OmniStageConfig": stage_config,
    "DiTConfig": dit_config,
    "DiTCacheConfig": cache_config,
    "DiTCacheTensor": cache_manager,
    "DiTCacheManager": cache_manager,
    "OmniLLM": llm,
    "AsyncOmniLLM": async_llm,
    "MultimodalOutputProcessor": processor,
    "RequestOutput": processor,
    "OmniServeCommand": callable_here,
    "main": callable_here,
    "plugin entry point": callable_here,
    "stage manager": core,
    "OmniDiffusionScheduler": scheduler,
    "base executor": engine,
    "request": request,
    "OmniARModelRunner": ar_runner,
    "omni worker": worker,
    "multimodal utils": png,
}
BY_CHAIN = {"OmniDiffusionModelRunner", "diffusers executor", "vae utils"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.model] if n in MODEL else []) for n in ROWS]
)
def test_the_name_is_where_the_page_says_and_works(name: str) -> None:
    assert callable(found(name))
    if name not in BY_CHAIN:
        CHECKS[name]()


@pytest.mark.parametrize("name", re.findall(r"`omni_rt\.compat\.[\w.]+:([A-Z]\w+)`", PAGE))
def test_names_of_the_first_table_are_exported(name: str) -> None:
    assert getattr(omni_rt, name) is found(name)
    assert name in omni_rt.__all__


def test_no_row_of_the_architecture_is_missing() -> None:
    assert ROWS.keys() == CHECKS.keys() | BY_CHAIN


@pytest.fixture(scope="module")
def bundled_stages() -> Iterator[tuple[Any, Any, Any]]:
    folder = bundled().parent / "shapes"
    one = omni_rt.OmniStageConfig(
        0,
        "AR",
        str(folder / "writer"),
        ["text"],
        ["text", "hidden"],
        vllm_config={"additional_config": {"hidden_layer": -2}},
    )
    two = omni_rt.OmniStageConfig(
        1,
        "DiT",
        str(folder / "painter"),
        ["hidden"],
        ["text", "image", "latents"],
        dit_config=omni_rt.DiTConfig(
            "z-image", "flow_match_euler", 10, 0.0, True, "ZImagePipeline"
        ),
        cache_config=omni_rt.DiTCacheConfig([omni_rt.DiTCacheTensor("prompt_embeds")], 1 << 20),
    )
    with omni_rt.OmniLLM([one, two]) as made:
        yield made, one, two


@pytest.mark.model
def test_the_bundled_model_runs_as_a_chain(bundled_stages: tuple[Any, Any, Any]) -> None:
    """The rows of DiT engines: a picture by the pipeline's own VAE, its tensors as latents."""
    made, one, two = bundled_stages
    args = {"prompt": "draw a red circle above a blue square"}
    sampling = {"temperature": 0.0, "max_tokens": 120}
    size = {"height": 128, "width": 128}
    (result,) = made.generate([{**args, "sampling_params": sampling}, size], seed=3)
    assert result.output_type == "text+image"
    assert "red circle" in result.outputs[0].text
    assert (result.images[0].width, result.images[0].height) == (128, 128)
    assert result.latents is not None
    assert result.latents.shape == (1, 8, 16, 16)
    rows, width = one.stage_output[0].pooled[0].shape
    assert rows >= len(result.outputs[0].token_ids)
    assert width == 128
    assert two.stage_output[0].images == result.images
