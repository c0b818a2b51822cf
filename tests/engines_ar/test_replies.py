"""Text, tokens, facts and ends of replies, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoTokenizer

from omni_rt.errors import BadRequest, ConfigError
from omni_rt_workers.engines import vllm_ar

from . import tiny
from .fakes import Loaded, load, loaded, prompts, stage, task

if TYPE_CHECKING:
    from pathlib import Path

    from omni_rt_workers.engine import Task

    from .fakes import Greedy

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("nothing_stays")]


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[Loaded]:
    with loaded(folder, facts={"image": tiny.IMAGE}) as made:
        yield made


@pytest.fixture(scope="module")
def with_image(reference: Any) -> tuple[list[int], list[int]]:
    """A prompt whose greedy reply names the image token in its middle, and that reply."""
    image = 256
    many = torch.randint(0, 250, (160, 8), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        out = reference.generate(many, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    for ids in out.tolist():
        if image in ids[10:18]:
            return ids[:8], ids[8:]
    raise AssertionError("no prompt makes the model say the image token")


def test_says_what_it_does_while_it_loads(one: Loaded) -> None:
    assert one.phases == ["importing vllm", "loading weights", "warming up"]
    assert [(port.name, port.kind) for port in one.ports.outputs] == [
        ("text", "text"),
        ("tokens", "tokens"),
        ("logprobs", "tensor"),
        ("hidden", "tensor"),
        ("embeds", "tensor"),
    ]
    assert one.ports.inputs == ()
    assert one.ports.slots == 16


def test_a_second_engine_in_the_process_is_refused(one: Loaded, folder: Path) -> None:
    second = vllm_ar.make(stage(folder), one.out)
    with pytest.raises(ConfigError, match="a vLLM engine already.*stages.writer.worker"):
        load(second, [])
    second.close()


def test_memory_is_that_of_the_weights_and_of_the_cache(one: Loaded, reference: Any) -> None:
    weights = sum(parameter.nbytes for parameter in reference.parameters())
    memory = one.engine.memory()
    assert weights <= memory["weights"] < 1.1 * weights  # vLLM pads the vocabulary
    assert 60 << 20 < memory["kv_cache"] <= 64 << 20


def test_greedy_tokens_equal_transformers_for_staggered_requests(
    one: Loaded, greedy: Greedy
) -> None:
    given = prompts(8, 5, 90)
    tasks = [task(ids, max_tokens=16, ignore_eos=True) for ids in given]
    replies = one.run(*tasks, join_at=tuple(range(0, 16, 2)))
    assert [reply.tokens for reply in replies] == [greedy(ids, 16) for ids in given]
    assert {reply.reason for reply in replies} == {"length"}
    assert replies[3].usage == {"prompt_tokens": len(given[3]), "completion_tokens": 16}


def test_messages_and_prompt_go_through_the_chat_template(
    one: Loaded, folder: Path, greedy: Greedy
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    message = {"role": "user", "content": "draw a red circle"}
    ids = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
    replies = one.run(
        task("draw a red circle", max_tokens=6, ignore_eos=True),
        task({"messages": [message]}, max_tokens=6, ignore_eos=True),
    )
    assert [reply.tokens for reply in replies] == [greedy(ids, 6)] * 2


def test_text_streams_in_pieces_and_comes_whole_if_not_streamed(one: Loaded) -> None:
    ids = prompts(1, 20, 20)[0]
    streamed, whole = one.run(
        task(ids, max_tokens=20, ignore_eos=True, stream=True),
        task(ids, max_tokens=20, ignore_eos=True),
    )
    assert len(whole.texts) == 1
    assert len(streamed.texts) > 5
    assert streamed.text == whole.text
    assert whole.text_tokens == whole.tokens == streamed.tokens
    assert streamed.text_tokens == whole.tokens[: len(streamed.text_tokens)]
    assert len(streamed.chunks["tokens"]) == 20
    assert streamed.chunks["tokens"][0].dtype == torch.int64


def test_only_wanted_ports_are_given(one: Loaded) -> None:
    ids = prompts(1, 20, 20)[0]
    (reply,) = one.run(task(ids, max_tokens=3, ignore_eos=True, want=("text",)))
    assert set(reply.chunks) == set()
    (reply,) = one.run(task(ids, max_tokens=3, ignore_eos=True, want=()))
    assert (reply.texts, reply.reason) == ([], "length")


def test_an_end_token_stops_the_reply_and_is_not_text(one: Loaded, reference: Any) -> None:
    end = reference.config.eos_token_id
    for ids in prompts(400, 4, 4, seed=5):
        with torch.no_grad():
            if reference(torch.tensor([ids])).logits[0, -1].argmax() == end:
                break
    (reply,) = one.run(task(ids))
    assert (reply.tokens, reply.text, reply.reason) == ([end], "", "stop")
    assert reply.usage["completion_tokens"] == 1


def test_a_stop_string_ends_the_reply_before_it(one: Loaded) -> None:
    ids = prompts(1, 20, 20)[0]
    (whole,) = one.run(task(ids, max_tokens=20, ignore_eos=True))
    stop = whole.text[6:8]
    at = whole.text.index(stop)
    for stream in (False, True):
        (cut,) = one.run(
            task(ids, max_tokens=20, ignore_eos=True, stop=[stop, "never"], stream=stream)
        )
        assert (cut.text, cut.reason) == (whole.text[:at], "stop")
        assert cut.tokens == whole.tokens[: len(cut.tokens)]
        assert len(cut.tokens) < 20


def test_a_stop_string_is_seen_when_no_text_is_wanted(one: Loaded) -> None:
    ids = prompts(1, 20, 20)[0]
    (whole,) = one.run(task(ids, max_tokens=20, ignore_eos=True))
    (cut,) = one.run(
        task(ids, max_tokens=20, ignore_eos=True, stop=whole.text[6:8], want=("tokens",))
    )
    assert cut.reason == "stop"
    assert len(cut.tokens) < 20


def test_a_fact_is_reported_and_never_appears_as_text(
    one: Loaded, with_image: tuple[list[int], list[int]]
) -> None:
    ids, expected = with_image
    for stream in (False, True):
        (reply,) = one.run(task(ids, max_tokens=12, ignore_eos=True, stream=stream))
        assert reply.tokens == expected
        assert reply.facts == ("image",)
        assert "image" not in reply.text
        assert reply.text
    (other,) = one.run(task(prompts(1, 5, 5)[0], max_tokens=2, ignore_eos=True))
    assert other.facts == ()


def test_a_seed_repeats_a_sampled_reply(one: Loaded) -> None:
    ids = prompts(1, 20, 20)[0]

    def sampled(value: int, **params: Any) -> Task:
        values = {"prompt_token_ids": ids, "seed": value}
        return task(values, temperature=1.0, max_tokens=12, ignore_eos=True, **params)

    first, again, by_param, other = one.run(sampled(7), sampled(7), sampled(1, seed=7), sampled(8))
    assert first.tokens == again.tokens == by_param.tokens
    assert first.tokens != other.tokens


def test_a_reply_fills_the_context_if_nothing_says_less(one: Loaded) -> None:
    (reply,) = one.run(task(prompts(1, 480, 480)[0], ignore_eos=True))
    assert (len(reply.tokens), reply.reason) == (32, "length")
    (reply,) = one.run(task(prompts(1, 500, 500)[0], ignore_eos=True, max_tokens=5000))
    assert len(reply.tokens) == 12


def test_a_task_that_is_held_waits_while_others_go_on(one: Loaded, greedy: Greedy) -> None:
    first, second = prompts(2, 20, 40, seed=3)
    held = task(first, max_tokens=12, ignore_eos=True, stream=True)
    other = task(second, max_tokens=12, ignore_eos=True)
    one.engine.add(held)
    one.engine.add(other)
    for _ in range(4):
        one.engine.step()
    said = one.out.said[held.request]
    held.held = True
    assert len(said.chunks["tokens"]) == 4
    assert one.run() == []
    assert one.engine.idle
    assert len(said.chunks["tokens"]) == 4
    assert one.out.said[other.request].tokens == greedy(second, 12)
    held.held = False
    assert not one.engine.idle
    one.run()
    assert said.tokens == greedy(first, 12)


def test_a_task_that_is_held_before_its_first_step_is_not_let_in(
    one: Loaded, greedy: Greedy
) -> None:
    first, second = prompts(2, 20, 40, seed=4)
    held = task(first, max_tokens=3, ignore_eos=True, stream=True)
    held.held = True
    one.engine.add(held)
    assert one.engine.idle
    one.run(task(second, max_tokens=3, ignore_eos=True))
    assert held.request not in one.out.said
    held.held = False
    one.run()
    assert one.out.said[held.request].tokens == greedy(first, 3)


def test_an_abort_gives_everything_back_and_leaves_neighbours_alone(
    one: Loaded, greedy: Greedy
) -> None:
    given = prompts(3, 20, 40, seed=6)
    tasks = [task(ids, max_tokens=20, ignore_eos=True, want=("tokens", "hidden")) for ids in given]
    for each in tasks:
        one.engine.add(each)
    for _ in range(5):
        one.engine.step()
    assert one.leftovers["requests with rows"] == 3
    tasks[2].held = True
    one.engine.abort(tasks[0])
    one.engine.abort(tasks[2])
    one.run()
    assert one.leftovers == {}
    assert not one.out.said[tasks[0].request].ended
    assert one.out.said[tasks[1].request].tokens == greedy(given[1], 20)
    one.engine.abort(tasks[1])  # one that has ended


def test_after_the_last_abort_vllm_hears_of_it(one: Loaded) -> None:
    aborted = task(prompts(1, 30, 30)[0], max_tokens=20, ignore_eos=True)
    one.engine.add(aborted)
    one.engine.step()
    one.engine.abort(aborted)
    assert not one.engine.idle
    one.engine.step()
    assert one.engine.idle


def test_higher_priority_goes_first(one: Loaded) -> None:
    given = prompts(12, 10, 10)
    tasks = [task(ids, max_tokens=4, ignore_eos=True) for ids in given[:11]]
    urgent = task(given[11], max_tokens=4, ignore_eos=True, priority=5)
    for each in [*tasks, urgent]:
        one.engine.add(each)
    for _ in range(4):
        one.engine.step()
    assert one.out.said[urgent.request].reason == "length"
    assert not one.out.said[tasks[-1].request].ended
    one.run()


@pytest.mark.parametrize(
    ("values", "params", "param", "says"),
    [
        ({"prompt": ""}, {}, "prompt", "empty"),
        ({}, {}, "prompt", "empty"),
        ({"prompt_token_ids": []}, {}, "prompt_token_ids", "empty"),
        ({"prompt_token_ids": [1, 10**6]}, {}, None, "1000000"),
        ({"prompt_token_ids": ["a"]}, {}, "prompt_token_ids", "integers"),
        ({"prompt_token_ids": [1] * 600}, {}, "prompt_token_ids", "600 tokens.*holds 512"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, {}, "messages", "holds 512"),
        ({"messages": [{"nothing": 1}]}, {"temprature": 1}, "temprature", "temprature"),
        ({"prompt": "a"}, {"temperature": -1}, "temperature", "between 0 and 2"),
        ({"prompt": "a"}, {"temperature": "hot"}, "temperature", "type float"),
        ({"prompt": "a"}, {"temperature": float("nan")}, "temperature", "between"),
        ({"prompt": "a"}, {"top_p": 0}, "top_p", "above 0"),
        ({"prompt": "a"}, {"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": "a"}, {"max_tokens": True}, "max_tokens", "type int"),
        ({"prompt": "a"}, {"stop": [""]}, "stop", "not empty"),
        ({"prompt": "a"}, {"stop": 3}, "stop", "type list"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    one: Loaded, values: dict[str, Any], params: dict[str, Any], param: str | None, says: str
) -> None:
    refused = task(values, **params)
    with pytest.raises(BadRequest, match=says) as caught:
        one.engine.add(refused)
    assert caught.value.param == param
    one.engine.abort(refused)
