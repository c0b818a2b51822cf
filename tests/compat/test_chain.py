"""A chain of stages, run by vLLM-omni's names; what does not go together is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_rt import (
    AsyncOmniLLM,
    BadRequest,
    ConfigError,
    DiTCacheConfig,
    DiTCacheTensor,
    DiTConfig,
    OmniLLM,
    OmniStageConfig,
)
from omni_rt.compat.chain import chain
from omni_rt.compat.vllm_config import engine_arguments
from omni_rt.config import parse_bytes
from tests.compat.stages import painter, writer

DIT = DiTConfig("z-image", "default", 10, 0.0)


def test_a_chain_gives_each_prompt_its_result_and_each_stage_its_output() -> None:
    stages = [writer(), painter()]
    with OmniLLM(stages) as llm:
        first = llm.generate([{"prompt": ["one", "two"]}, {}], seed=5)
        assert [result.prompt for result in first] == ["one", "two"]
        assert [result.output_type for result in first] == ["text+image"] * 2
        assert first[0].outputs[0].text != first[1].outputs[0].text
        assert first[0].images[0].data != first[1].images[0].data
        assert {result.seed for result in first} == {5}
        written, painted = stages[0].stage_output, stages[1].stage_output
        assert written is not None
        assert painted is not None
        assert written[0].outputs[0].text == first[0].outputs[0].text
        assert written[0].pooled[0].shape == (64,)
        assert written[0].images == []
        assert painted[1].images == first[1].images
        assert painted[1].outputs == []
        llm.generate([{"prompt": "two"}, {}], seed=5)
        again = stages[0].stage_output
        assert again is not None
        assert [one.outputs[0].text for one in again] == [first[1].outputs[0].text]


@pytest.fixture
def async_llm() -> AsyncOmniLLM:
    """Made outside of the loop, as it looks at files."""
    return AsyncOmniLLM([writer(), painter()])


async def test_calls_of_the_async_form_overlap_and_give_the_same(async_llm: AsyncOmniLLM) -> None:
    async with async_llm as llm:
        one, two, both = await asyncio.gather(
            llm.generate_async([{"prompt": "one"}, {}], seed=5),
            llm.generate_async([{"prompt": "two"}, {}], seed=5),
            llm.generate_async([{"prompt": ["one", "two"]}, {}], seed=5),
        )
    assert [r.images[0].data for r in both] == [one[0].images[0].data, two[0].images[0].data]


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ([{"prompt": "x"}], {}, "2 stages"),
        ([{}, {}], {}, "prompt or messages"),
        ([{"prompt": "x"}, {"prompt": "y"}], {}, "stage_1 gets the output"),
        ([{"prompt": "x", "sampling_params": object()}, {}], {}, "give a mapping"),
        ([{"prompt": "x"}, {"stepz": 3}], {}, "no parameter 'stepz'"),
        ([{"prompt": "x"}, {}], {"temperatur": 3}, "'temperatur'"),
    ],
)
async def test_wrong_arguments_are_refused(
    async_llm: AsyncOmniLLM, args: list[dict[str, Any]], kwargs: dict[str, Any], says: str
) -> None:
    async with async_llm as llm:
        with pytest.raises(BadRequest, match=says):
            await llm.generate_async(args, **kwargs)


class Executor:
    """An engine of one's own."""


class VllmsExecutor:
    __module__ = "vllm.v1.executor.multiproc_executor"


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([], "no stage"),
        ([writer(), painter(stage_id=0)], "stage_id must differ"),
        ([writer(engine_type="dit")], "no engine_type 'dit'"),
        ([writer(), painter(input_modalities=["image"])], "a modality in common"),
        ([painter(stage_id=0), writer(stage_id=1)], "must come first"),
        ([writer(executor_class=VllmsExecutor)], "distributed_executor_backend"),
        ([writer(executor_class="vllm", output_modalities=["image"])], "no stage gives 'image'"),
        ([writer(model_path="./not there")], "there is no folder"),
        ([writer(), painter(executor_class=None, vllm_config=None)], "needs its dit_config"),
        ([writer(), painter(executor_class=None, dit_config=DIT)], "has no vllm_config"),
        ([writer(cache_config=DiTCacheConfig([], 1))], "cache_config is for DiT"),
        ([writer(vllm_config=3)], "vllm_config is int"),
        ([writer(vllm_config={"steps": object()})], "only plain values"),
    ],
)
def test_stages_that_do_not_go_together_are_refused(
    stages: list[OmniStageConfig], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        chain(stages)


def diffusion(tmp_path: Path, dit: DiTConfig, cache: DiTCacheConfig | None = None) -> Any:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    one = OmniStageConfig(
        0, "DiT", str(tmp_path), ["text"], ["image"], dit_config=dit, cache_config=cache
    )
    return chain([one]).config.stages["stage_0"]


def test_the_dit_and_cache_configurations_become_those_of_the_stage(tmp_path: Path) -> None:
    cache = DiTCacheConfig([DiTCacheTensor("prompt_embeds")], 3001, "lru")
    stage = diffusion(tmp_path, DiTConfig("flux", "euler", 7, 3.5, True, "FluxPipeline"), cache)
    assert stage.engine == "diffusers"
    assert stage.steps == 7
    assert stage.sampling == {"guidance_scale": 3.5, "scheduler": "EulerDiscreteScheduler"}
    assert parse_bytes(stage.cache.max_cache_size) == 3001
    assert stage.cache.cache_strategy == "lru"
    assert stage.cache.cache_tensors == ("prompt_embeds",)
    off = diffusion(tmp_path, DIT, DiTCacheConfig([], 0))
    assert not off.cache.enable_optimization
    assert "scheduler" not in off.sampling


@pytest.mark.parametrize(
    ("dit", "says"),
    [
        (DiTConfig("flux", "eular", 7, 3.5), "no scheduler_type 'eular'.*euler"),
        (DiTConfig("sd", "default", 7, 3.5, True, "StableDiffusionPipeline"), "a FluxPipeline"),
        (DiTConfig("sd", "default", 0, 3.5), "at least 1"),
    ],
)
def test_a_dit_configuration_that_the_model_contradicts_is_refused(
    tmp_path: Path, dit: DiTConfig, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        diffusion(tmp_path, dit)


def test_engine_arguments_go_to_vllm_and_the_hidden_layer_to_the_port(tmp_path: Path) -> None:
    options = {"max_model_len": 64, "additional_config": {"hidden_layer": -2}}
    one = writer(model_path=str(tmp_path), vllm_config=options, executor_class=None)
    stage = chain([one]).config.stages["stage_0"]
    assert stage.vllm == {"max_model_len": 64}
    assert stage.hidden is not None
    assert stage.hidden.layer == -2


def test_of_a_vllm_config_the_plain_values_are_taken_over() -> None:
    class Dtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    given = SimpleNamespace(
        model_config=SimpleNamespace(dtype=Dtype(), max_model_len=128, quantization=None),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=32),
        additional_config={"hidden_layer": 3},
    )
    assert engine_arguments(given) == {
        "dtype": "bfloat16",
        "max_model_len": 128,
        "kv_cache_dtype": "auto",
        "block_size": 32,
        "additional_config": {"hidden_layer": 3},
    }


def test_a_class_as_executor_is_an_engine_of_ones_own() -> None:
    stage = chain([writer(executor_class=Executor)]).config.stages["stage_0"]
    assert stage.engine == f"{__name__}:Executor"
    assert stage.options["steps"] == 3
