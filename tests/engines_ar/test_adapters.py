"""LoRA per request, and calls of tools found in what the model says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from omni_rt.errors import BadRequest, ConfigError
from omni_rt_workers.engines import vllm_ar
from omni_rt_workers.engines.vllm_ar import prompt

from .conftest import greedy_reply
from .fakes import Loaded, load, loaded, prompts, stage, task

if TYPE_CHECKING:
    from pathlib import Path

    from .fakes import Said

pytestmark = [
    pytest.mark.model,
    pytest.mark.usefixtures("nothing_stays"),
    pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning"),
]

RANK, ALPHA = 4, 8
PROMPT = prompts(1, 20, 20, seed=5)[0]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'


def adapter(seed: int) -> dict[str, torch.Tensor]:
    """On q_proj of layer 0."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "lora_A": torch.randn(RANK, 64, generator=generator),
        "lora_B": torch.randn(128, RANK, generator=generator),
    }


def save_adapter(folder: Path, seed: int) -> Path:
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.{which}.weight": tensor for which, tensor in adapter(seed).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def one(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    base = tmp_path_factory.mktemp("adapters")
    adapters = {name: str(save_adapter(base / name, at)) for at, name in enumerate(("one", "two"))}
    with loaded(folder, lora=adapters, tool_parser="hermes") as made:
        yield made


def merged(folder: Path, seed: int) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parts = adapter(seed)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight += (
            ALPHA / RANK * parts["lora_B"] @ parts["lora_A"]
        )
    return model


def test_each_request_has_its_own_adapter(one: Loaded, folder: Path, reference: Any) -> None:
    more: Any = {"max_tokens": 8, "ignore_eos": True}
    replies = one.run(
        task(PROMPT, **more), task(PROMPT, lora="one", **more), task(PROMPT, lora="two", **more)
    )
    models = [reference, merged(folder, 0), merged(folder, 1)]
    expected = [greedy_reply(model, PROMPT, 8) for model in models]
    assert [reply.tokens for reply in replies] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3


def test_an_unknown_adapter_is_refused_with_the_nearest(one: Loaded) -> None:
    with pytest.raises(BadRequest, match="no adapter 'on'") as caught:
        one.engine.add(task(PROMPT, lora="on"))
    assert "'one'" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lora": {"x": "/nowhere"}}, "lora.x: /nowhere has no adapter"),
        ({"tool_parser": "hermit"}, "no tool parser 'hermit'"),
    ],
)
def test_what_is_not_there_stops_the_start(
    one: Loaded, folder: Path, monkeypatch: pytest.MonkeyPatch, options: Any, says: str
) -> None:
    engine = vllm_ar.make(stage(folder, **options), one.out)
    monkeypatch.setattr("omni_rt_workers.engines.vllm_ar.guard.check_alone", lambda stage: None)
    with pytest.raises(ConfigError, match=says):
        load(engine, [])


def called(one: Loaded, text: str, *, stream: bool, tools: Any = (TOOL,), **more: Any) -> Said:
    """What comes of a model that says `text`, whatever it is asked."""
    (said,) = one.run(
        task(
            "hello",
            stream=stream,
            tools=list(tools),
            max_tokens=200,
            structured_outputs={"choice": [text]},
            **more,
        )
    )
    return said


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_found(one: Loaded, stream: bool) -> None:
    said = called(one, f"Let me see. {CALL}", stream=stream)
    calls = [call for piece in said.pieces for call in piece.calls]
    assert [call.name for call in calls if call.name] == ["weather"]
    assert len([call.id for call in calls if call.id]) == 1
    assert {call.call for call in calls} == {0}
    assert json.loads("".join(call.arguments for call in calls)) == {"place": "Oslo"}
    assert said.text.strip() == "Let me see."
    assert said.pieces[-1].finish_reason == "tool_calls"
    assert len(calls) > 2 or not stream


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_without_a_call_is_text(one: Loaded, stream: bool) -> None:
    said = called(one, "It is cold < 0.", stream=stream)
    assert said.text == "It is cold < 0."
    assert said.pieces[-1].finish_reason == "stop"
    assert not any(piece.calls for piece in said.pieces)


def test_with_tool_choice_none_the_text_is_left_alone(one: Loaded) -> None:
    assert called(one, CALL, stream=False, tool_choice="none").text == CALL


def test_tools_and_calls_are_told_to_the_chat_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for t in tools %}{{ t.function.name }} {% endfor %}"
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.place }}"
        "{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "name": "weather", "arguments": '{"place": "Oslo"}'}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    values = {"messages": messages}
    told = prompt.prompt_of(values, tokenizer, prompt.from_template, {"tools": [TOOL]})
    assert tokenizer.decode(told.ids) == "weather Oslo"
