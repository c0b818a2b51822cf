"""What is kept between requests: within its limit, and without a change of what comes out."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_rt.errors import ConfigError
from omni_rt_workers.engines.diffusers_dit.cache import DiTCacheConfig, DiTCacheManager, Strategy

from .fakes import RecordingOutbox, difference, loaded, run, stage, task

if TYPE_CHECKING:
    from omni_rt_workers.engine import Task
    from omni_rt_workers.engines.diffusers_dit.engine import DiTEngine


@pytest.mark.parametrize("strategy", ["fifo", "lru"])
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_thousand_random_requests_stay_within_the_limit(strategy: Strategy, seed: int) -> None:
    """Beside a list that is kept by the rule's own words."""
    draw = random.Random(seed)
    limit = 1000
    cache = DiTCacheManager(DiTCacheConfig(max_cache_size=limit, cache_strategy=strategy))
    order: list[tuple[int, int]] = []  # (key, bytes), next to go first
    hits = 0
    for _ in range(10_000):
        key = int(draw.expovariate(0.05))
        at = next((n for n, (known, _) in enumerate(order) if known == key), None)
        found = cache.get(key)
        assert (found is None) == (at is None)
        if at is not None:
            hits += 1
            assert found == f"value {key}"
            if strategy == "lru":
                order.append(order.pop(at))
            continue
        size = draw.choice([0, 1, 90, 300, 1000, 1001])
        assert cache.put(key, f"value {key}", size) == (size <= limit)
        if size <= limit:
            while sum(known for _, known in order) + size > limit:
                order.pop(0)
            order.append((key, size))
        assert cache.used_bytes == sum(known for _, known in order) <= limit
        assert len(cache) == len(order)
    assert (cache.counts.hits, cache.counts.misses) == (hits, 10_000 - hits)
    assert hits > 500
    assert cache.counts.evictions > 1000


def test_a_value_takes_the_place_of_the_one_before() -> None:
    cache = DiTCacheManager(DiTCacheConfig(max_cache_size=10))
    cache.put("a", 1, 6)
    cache.put("a", 2, 8)
    assert (cache.get("a"), cache.used_bytes, cache.counts.evictions) == (2, 8, 0)
    assert not cache.put("a", 3, 11)
    assert cache.get("a") is None  # nothing stale is left
    cache.put("b", 1, 5)
    cache.clear()
    assert (len(cache), cache.used_bytes) == (0, 0)


PARAMS = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 32}


def ask(name: str, prompt: str, seed: int = 0, **params: Any) -> Task:
    given = {**PARAMS, "guidance_scale": 0.0, **params}
    made = task(name, {}, given, seed=seed, want=("latents",))
    made.values["prompt"] = prompt
    return made


def encoder_runs(engine: DiTEngine) -> list[int]:
    """Counts, from now on, how often the text encoder runs."""
    runs: list[int] = []
    encoder = engine.pipeline.text_encoder
    encoder.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


@pytest.fixture
def reading(folders: dict[str, str], out: RecordingOutbox) -> Any:
    made = loaded(stage(folders["zimage_with_text"], cache={}), out)
    yield made
    made.close()


def test_a_prompt_that_comes_again_needs_no_text_encoder(
    reading: DiTEngine, folders: dict[str, str], out: RecordingOutbox
) -> None:
    plain = loaded(stage(folders["zimage_with_text"]), out)
    runs, plain_runs = encoder_runs(reading), encoder_runs(plain)
    for n in range(3):
        run(reading, ask(f"kept {n}", "a circle", seed=n))
        run(plain, ask(f"plain {n}", "a circle", seed=n))
        kept, without = (out.said[f"{name} {n}"].tensors["latents"] for name in ("kept", "plain"))
        assert torch.equal(kept, without)
    assert (len(runs), len(plain_runs)) == (1, 3)
    assert (reading.cache.counts.hits, reading.cache.counts.misses) == (2, 1)
    assert 0 < reading.memory()["cache"] == reading.cache.used_bytes
    assert "cache" not in plain.memory()
    plain.close()


def test_another_prompt_is_another_picture(reading: DiTEngine, out: RecordingOutbox) -> None:
    runs = encoder_runs(reading)
    asked = {
        "one": ask("one", "a circle"),
        "other": ask("other", "a square"),
        "guided": ask("guided", "a circle", guidance_scale=3.0),
        "against": ask("against", "a circle", guidance_scale=3.0, negative_prompt="dull"),
        "again": ask("again", "a circle"),
    }
    for made in asked.values():
        run(reading, made)
    latents = {name: out.said[name].tensors["latents"] for name in asked}
    assert torch.equal(latents["one"], latents["again"])
    for name in ("other", "guided"):
        assert difference(latents["one"], latents[name]) > 0.01
    assert difference(latents["guided"], latents["against"]) > 0.01
    assert len(runs) == 1 + 1 + 2 + 2


def test_an_exact_request_takes_nothing_that_was_made_in_a_batch(
    reading: DiTEngine, out: RecordingOutbox
) -> None:
    run(reading, ask("a", "a circle"), ask("b", "a square"))
    runs = encoder_runs(reading)
    run(reading, ask("exact", "a circle", exact=True))
    assert len(runs) == 1
    run(reading, ask("exact again", "a circle", exact=True))
    assert len(runs) == 1


def test_embeddings_that_somebody_wrote_into_are_not_handed_out_again(
    reading: DiTEngine, out: RecordingOutbox
) -> None:
    run(reading, ask("one", "a circle"))
    for kept, _ in reading.cache._entries.values():
        kept.value[0][0].zero_()
    run(reading, ask("two", "a circle"))
    assert torch.equal(out.said["one"].tensors["latents"], out.said["two"].tensors["latents"])


def test_a_cache_can_be_switched_off(folders: dict[str, str], out: RecordingOutbox) -> None:
    off = {"enable_optimization": False}
    engine = loaded(stage(folders["zimage_with_text"], cache=off), out)
    runs = encoder_runs(engine)
    run(engine, ask("one", "a circle"))
    run(engine, ask("two", "a circle"))
    assert len(runs) == 2
    engine.close()


@pytest.mark.parametrize(
    ("cache", "told"),
    [
        ({"cache_tensors": ["prompt_embed"]}, "'prompt_embed'.*cache_tensors"),
        ({"cache_strategy": "lifo"}, "'lifo'.*cache_strategy"),
        ({"max_cache_size": "lots"}, "int.*max_cache_size"),
    ],
)
def test_a_wrong_cache_stops_the_start(
    folders: dict[str, str], out: RecordingOutbox, cache: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        loaded(stage(folders["zimage"], cache=cache), out)
