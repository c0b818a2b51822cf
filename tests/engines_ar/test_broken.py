"""An engine that cannot go on says so, and its worker ends."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from omni_rt.wire.arena import Arena
from omni_rt.wire.messages import Ports
from omni_rt_workers.engine import Engine, EngineBroken
from omni_rt_workers.engines.vllm_ar.engine import AREngine
from omni_rt_workers.loop import Loop
from omni_rt_workers.memory import Memory

from .fakes import Greedy, Loaded, RecordingOutbox, loaded, prompts, stage, task
from .test_failure import OPTIONS, scheduler
from .test_loop import Channel

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[Loaded]:
    vllm = {**OPTIONS, "additional_config": {"pooler_output": True}}
    with loaded(folder, vllm=vllm) as made:
        yield made


def test_an_engine_whose_runner_gives_pooler_outputs_replies_all_the_same(
    one: Loaded, reference: Any, greedy: Greedy
) -> None:
    ids = prompts(1, 20, 20)[0]
    each = task(ids, max_tokens=2, ignore_eos=True)
    one.engine.add(each)
    one.engine.step()
    (rows,) = scheduler(one).pooled.values()
    one.run()
    assert one.out.said[each.request].tokens == greedy(ids, 2)
    with torch.no_grad():
        wanted = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    assert torch.allclose(rows, wanted, rtol=0, atol=2e-5)


def test_steps_that_fail_without_a_request_to_blame_break_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(held: set[str]) -> None:
        raise RuntimeError("always")

    engine = AREngine(stage(None), RecordingOutbox())
    core = SimpleNamespace(step=fail, search=lambda *args: iter(()), owes_step=True)
    monkeypatch.setattr(engine, "_core", core, raising=False)
    for _ in range(7):  # each failed step is followed by a search
        engine.step()
    with pytest.raises(EngineBroken, match="whatever request is in them"):
        engine.step()


# A request with a structured output whose token has been booked.
GRAMMAR = (SimpleNamespace(num_output_tokens=3, use_structured_output=True), 2, 0)


class World:
    """What `failure.settle` sees of vLLM: one request in one step under way."""

    def __init__(self, **parts: Any) -> None:
        self.answers: list[Any] = [(["a"], None)]
        self.request = SimpleNamespace(
            num_computed_tokens=7, num_tokens=7, num_output_tokens=2, is_finished=lambda: False
        )
        step = SimpleNamespace(num_scheduled_tokens={"a": 1})
        self.scheduler = SimpleNamespace(
            phase="", booking=[], under_way=[step], requests={"a": self.request}, held=set()
        )
        self.executor = SimpleNamespace()
        for name, value in parts.items():
            owner, name = name.split("__")
            setattr(getattr(self, owner), name, value)
        core = SimpleNamespace(model_executor=self.executor, batch_queue=None)
        self.llm = SimpleNamespace(
            engine_core=SimpleNamespace(engine_core=core),
            collective_rpc=lambda *args, **kwargs: self.answers,
        )

    def settle(self, error: Exception) -> None:
        from omni_rt_workers.engines.vllm_ar import failure

        failure.settle(self.llm, self.scheduler, error)


@pytest.mark.parametrize(
    ("parts", "error", "says"),
    [
        ({}, RuntimeError("CUDA error: misaligned address"), "cannot go on in this process"),
        ({"executor__is_failed": True}, RuntimeError("Executor failed."), "cannot go on"),
        ({}, TimeoutError("RPC call to execute_model timed out."), "cannot go on"),
        (
            {"scheduler__booking": [GRAMMAR]},
            ValueError("x"),
            "while it booked a step: ValueError: x",
        ),
        ({"scheduler__under_way": []}, ValueError("x"), "outputs of a step were lost"),
        (
            {"scheduler__phase": "schedule", "scheduler__requests": {}, "scheduler__under_way": []},
            ValueError(),
            "no request",
        ),
    ],
)
def test_what_cannot_be_settled_is_not_tried(
    parts: dict[str, Any], error: Exception, says: str
) -> None:
    with pytest.raises(EngineBroken, match=says):
        World(**parts).settle(error)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([(["a"], None), ([], "RuntimeError: CUDA error")], "could not be set right: RuntimeError"),
        ([(["a"], None), (["a", "b"], None)], "ranks of vLLM do not know the same requests"),
    ],
)
def test_a_rank_that_is_not_like_the_others_breaks_the_engine(
    answers: list[Any], says: str
) -> None:
    world = World()
    world.answers = answers
    with pytest.raises(EngineBroken, match=says):
        world.settle(ValueError("x"))


def test_what_settling_raises_breaks_the_engine() -> None:
    world = World()
    world.llm.collective_rpc = None
    with pytest.raises(EngineBroken, match=r"\(ValueError: x\): TypeError"):
        world.settle(ValueError("x"))


class Broken:
    """An engine that breaks in its first step."""

    idle = False

    def load(self, say: Any) -> Ports:
        return Ports((), (), (), 1)

    def memory(self) -> dict[str, int]:
        return {}

    def step(self) -> None:
        raise EngineBroken("it is over")


def test_a_broken_engine_ends_the_worker() -> None:
    memory = Memory(Arena.create(1, 1 << 16), epoch=1)
    loop = Loop(Channel(), memory, attach=lambda message: None)
    loop.load(stage(None), lambda spec, out: cast(Engine, Broken()), {}, 0)
    with pytest.raises(EngineBroken, match="it is over"):
        loop.turn(block=False)
