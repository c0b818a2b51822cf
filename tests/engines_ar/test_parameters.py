"""What a request can ask of sampling: several replies, log-probabilities, grammars, biases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import torch

from omni_rt.errors import BadRequest

from .fakes import Loaded, loaded, prompts, task

if TYPE_CHECKING:
    from pathlib import Path

    from .fakes import Greedy

pytestmark = [
    pytest.mark.model,
    pytest.mark.usefixtures("nothing_stays"),
    # vLLM hands xgrammar an argument that it does not need any more.
    pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning"),
]

PROMPT = prompts(1, 20, 20, seed=5)[0]


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[Loaded]:
    with loaded(
        folder,
        ports=("embeds",),
        hidden={"rows": "all"},
        vllm={"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}},
    ) as made:
        yield made


def log_probabilities(reference: Any, ids: list[int], reply: list[int]) -> torch.Tensor:
    """transformers' [len(reply), vocabulary] at the places of the reply."""
    with torch.no_grad():
        logits = reference(torch.tensor([ids + reply])).logits[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits.float(), -1)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_transformers(
    one: Loaded, reference: Any, stream: bool
) -> None:
    want = ("text", "tokens", "logprobs")
    asked = task(PROMPT, want=want, stream=stream, max_tokens=8, ignore_eos=True, logprobs=3)
    (reply,) = one.run(asked)
    expected = log_probabilities(reference, PROMPT, reply.tokens)
    rows = reply.tensor("logprobs")
    assert rows.shape == (8, 4, 2)
    assert rows.dtype == torch.float32
    assert rows[:, 0, 0].long().tolist() == reply.tokens
    top = expected.topk(3)
    assert rows[:, 1:, 0].long().tolist() == top.indices.tolist()
    torch.testing.assert_close(rows[:, 1:, 1], top.values, atol=1e-4, rtol=0)
    told = [each for piece in reply.pieces for each in piece.logprobs]
    assert [each.id for each in told] == reply.tokens
    assert [each.logprob for each in told] == rows[:, 0, 1].tolist()
    assert [[top.id for top in each.top] for each in told] == top.indices.tolist()


def test_a_sampled_token_has_its_own_log_probability(one: Loaded, reference: Any) -> None:
    asked = task(
        PROMPT, want=("tokens", "logprobs"), temperature=1.5, seed=1, max_tokens=12, ignore_eos=True
    )
    (reply,) = one.run(asked)
    rows = reply.tensor("logprobs")
    assert rows.shape == (12, 1, 2)
    expected = log_probabilities(reference, PROMPT, reply.tokens)
    chosen = expected[torch.arange(12), torch.tensor(reply.tokens)]
    torch.testing.assert_close(rows[:, 0, 1], chosen, atol=1e-4, rtol=0)


def by_index(reply: Any) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for chunk, meta in zip(reply.chunks["tokens"], reply.metas["tokens"], strict=True):
        found.setdefault(meta["index"], []).extend(chunk.tolist())
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("stream", [False, True])
def test_n_replies_come_under_their_index_and_repeat_with_their_seed(
    one: Loaded, stream: bool
) -> None:
    more: Any = {"temperature": 1.0, "seed": 7, "max_tokens": 6, "ignore_eos": True}
    several, again, second = one.run(
        task(PROMPT, n=3, stream=stream, **more),
        task(PROMPT, n=3, stream=stream, **more),
        task(PROMPT, **{**more, "seed": 8}),
    )
    replies = by_index(several)
    assert len(replies) == 3
    assert len({tuple(reply) for reply in replies}) == 3
    assert by_index(again) == replies
    assert replies[1] == second.tokens
    assert several.usage == {"prompt_tokens": 20, "completion_tokens": 18}
    assert several.ended_ports == {"tokens"}
    ends = {piece.index: piece.finish_reason for piece in several.pieces if piece.finish_reason}
    assert ends == {0: "length", 1: "length", 2: "length"}
    texts = ["".join(p.text for p in several.pieces if p.index == at) for at in range(3)]
    assert texts[1] == second.text


def test_n_replies_are_dropped_together(one: Loaded) -> None:
    asked = task(PROMPT, n=4, max_tokens=50, ignore_eos=True)
    one.engine.add(asked)
    for _ in range(3):
        one.engine.step()
    one.engine.abort(asked)
    one.run()
    assert not one.out.said[asked.request].ended


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_structured_output_is_valid(one: Loaded) -> None:
    asked = [
        task("say it", max_tokens=100, structured_outputs=structure)
        for structure in (
            {"json": SCHEMA},
            {"choice": ["yes", "no"]},
            {"regex": "[a-c]{3}-[0-9]{2}"},
            {"grammar": 'root ::= "left" | "right"'},
        )
    ]
    schema, choice, regex, grammar = replies = one.run(*asked)
    assert [reply.error for reply in replies] == [None] * 4
    jsonschema.validate(json.loads(schema.text), SCHEMA)
    assert choice.text in ("yes", "no")
    assert regex.text[3] == "-"
    assert len(regex.text) == 6
    assert grammar.text in ("left", "right")


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"structured_outputs": {"regex": "(("}}, "regex|grammar|parse"),
        ({"structured_outputs": {"jsn": {}}}, "has no 'jsn'"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "one kind"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"10": 101}}, "between -100 and 100"),
        ({"logit_bias": {"100000": 1}}, "100000|vocab"),
        ({"allowed_token_ids": []}, "allowed_token_ids|empty"),
        ({"allowed_token_ids": ["a"]}, "token ids"),
        ({"stop_token_ids": [-1]}, "token ids"),
        ({"bad_words": [""]}, "not empty"),
        ({"logprobs": 21}, "between 0 and 20"),
        ({"n": 17}, "between 1 and 16"),
        ({"lora": "nobody"}, "no adapter 'nobody'"),
        ({"tools": [{}]}, "functions like"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_parser"),
        ({"tool_choice": "always"}, "cannot be 'always'"),
    ],
)
def test_what_cannot_be_is_refused(one: Loaded, params: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        one.engine.add(task(PROMPT, **params))
    one.run()


def test_n_with_hidden_states_is_refused(one: Loaded) -> None:
    with pytest.raises(BadRequest, match="n above 1"):
        one.engine.add(task(PROMPT, n=2, want=("text", "hidden")))


def test_biases_and_lists_change_what_is_sampled(one: Loaded, greedy: Greedy) -> None:
    plain = greedy(PROMPT, 6)
    biased, allowed, stopped, kept = one.run(
        task(PROMPT, max_tokens=3, ignore_eos=True, logit_bias={"65": 100}),
        task(PROMPT, max_tokens=6, ignore_eos=True, allowed_token_ids=[70, 71]),
        task(PROMPT, max_tokens=6, ignore_eos=True, stop_token_ids=[plain[3]]),
        task(PROMPT, max_tokens=6, ignore_eos=True, truncate_prompt_tokens=8),
    )
    assert biased.tokens == [65] * 3
    assert set(allowed.tokens) <= {70, 71}
    assert stopped.tokens == plain[: plain.index(plain[3]) + 1]
    assert stopped.reason == "stop"
    assert kept.tokens == greedy(PROMPT[-8:], 6)
    assert kept.usage["prompt_tokens"] == 8


def test_a_stop_string_can_be_part_of_the_reply(one: Loaded) -> None:
    (plain,) = one.run(task(PROMPT, max_tokens=12, ignore_eos=True))
    stop = next(one for one in plain.text if one.isalnum())
    more: Any = {"max_tokens": 12, "ignore_eos": True, "stop": [stop]}
    without, with_it = one.run(
        task(PROMPT, **more), task(PROMPT, include_stop_str_in_output=True, **more)
    )
    assert with_it.text == without.text + stop


def test_embeddings_and_hidden_states_come_at_once(one: Loaded, reference: Any) -> None:
    want = ("tokens", "hidden", "embeds")
    (reply,) = one.run(task(PROMPT, want=want, max_tokens=7, ignore_eos=True))
    ids = torch.tensor([PROMPT + reply.tokens[:-1]])
    with torch.no_grad():
        states = reference(ids, output_hidden_states=True).hidden_states
    embeds = reply.tensor("embeds")
    assert embeds.shape == (26, 64)
    torch.testing.assert_close(embeds, states[0][0], atol=0, rtol=0)
    torch.testing.assert_close(reply.tensor("hidden"), states[-1][0], atol=1e-4, rtol=1e-4)


def test_a_prompt_said_again_is_answered_from_the_cache_unless_rows_are_wanted(
    one: Loaded,
) -> None:
    ids = prompts(1, 100, 100, seed=9)[0]
    more: Any = {"max_tokens": 4, "ignore_eos": True}
    (first,) = one.run(task(ids, **more))
    (again,) = one.run(task(ids, **more))
    (rows,) = one.run(task(ids, want=("tokens", "hidden"), **more))
    assert [said.usage.get("cached_tokens", 0) for said in (first, again, rows)] == [0, 96, 0]
    assert rows.tensor("hidden").shape == (103, 64)
    assert first.tokens == again.tokens == rows.tokens
