"""Who may still come: decided from what the stages told."""

from __future__ import annotations

import pytest

from omni_rt.config import parse_pipeline
from omni_rt.errors import Overloaded
from omni_rt.graph import Graph, Plan
from omni_rt.runtime.pace import Pace
from omni_rt.runtime.stage import Stage
from omni_rt.runtime.steptimes import StepTimes
from omni_rt.wire.messages import Chunk, Finished, Ports, PortSpec, Step
from omni_rt.wire.tensors import Inline

PIPELINE = """
playback: {rtf: 0.9, unmeasured: 2}
stages:
  talker: {engine: simulated, max_batch: 8}
  vocoder: {engine: simulated, max_batch: 8}
edges:
  - {from: talker.codes, to: vocoder.codes, stream: true}
outputs: {text: talker.text, audio: vocoder.audio}
"""
RATE = 24_000
TALKER = Ports((), (PortSpec("codes", "tensor"), PortSpec("text", "text")), (), 8)
VOCODER = Ports((PortSpec("codes", "tensor"),), (PortSpec("audio", "audio"),), (), 8)


class World:
    """A talker and a vocoder that take the time they are told to, and the clock."""

    def __init__(self, text: str = PIPELINE) -> None:
        config = parse_pipeline(text, "speech.yaml")
        graph = Graph.from_config(config)
        self.sound, self.text = graph.plan(("audio",)), graph.plan(("text",))
        self.stages = {name: Stage(name, [k], 8, 64) for k, name in enumerate(config.stages)}
        for stage, ports in zip(self.stages.values(), (TALKER, VOCODER), strict=True):
            stage.ports = ports
            stage.replicas[0].identity = stage.name
        self.pace = Pace(config, self.stages)
        self.now = 0.0

    def ask(self, name: str, plan: Plan | None = None, *, plays: bool = True) -> bool:
        """Whether it may begin at once. Raises `Overloaded`."""
        plan = plan or self.sound
        self.pace.check(plan, plays, self.now)
        for stage in plan.stages:
            self.stages[stage].members.add(name)
        return self.pace.enter(name, plan, plays, self.now)

    def step(self, *names: str, talker_s: float, sound_s: float = 0.1, new: int = 0) -> None:
        """The talker makes a step, and the vocoder at once `sound_s` of each request."""
        self.now += talker_s
        for stage in self.stages.values():
            stage.replicas[0].running.update(names)
        data = bytes(2 * int(sound_s * RATE))
        codes = [Chunk(name, 1, "codes", 0, Inline("uint8", (1,), b"x"), False) for name in names]
        audio = [
            Chunk(name, 1, "audio", 0, Inline("uint8", (len(data),), data), False, _META)
            for name in names
        ]
        self.pace.stepped(
            Step("talker", [*codes], talker_s, len(names), 1, new), "talker", self.now
        )
        self.pace.stepped(Step("vocoder", [*audio], 0.001, len(names)), "vocoder", self.now)

    def end(self, name: str) -> None:
        done = Finished(name, 1, "stop", {})
        self.pace.stepped(Step("vocoder", [done], 0.0, 1, 0), "vocoder", self.now)
        self.pace.leave(name)
        for stage in self.stages.values():
            stage.members.discard(name)
            stage.discard(name)


_META = {"media_type": "audio/pcm", "sample_rate": RATE}


def _one_reply(world: World, talker_s: float, steps: int = 20) -> None:
    world.ask("first")
    for _ in range(steps):
        world.step("first", talker_s=talker_s)
    world.end("first")


def test_one_more_is_refused_when_sound_would_take_longer_than_playing_it() -> None:
    world = World()
    _one_reply(world, 0.03)  # for 0.1 s of sound; nothing says that two take less than 0.06
    for name in "abc":
        world.ask(name)
    with pytest.raises(Overloaded, match=r"sound would take 1\.20 s"):
        world.ask("d")


def test_what_larger_batches_took_counts_and_not_their_size() -> None:
    world = World()
    _one_reply(world, 0.03)
    for name in "abc":
        world.ask(name)
    for _ in range(10):
        world.step("a", "b", talker_s=0.031)
        world.step("a", "b", "c", talker_s=0.032)
    world.ask("d")
    world.ask("e")


def test_before_anything_is_measured_a_few_may_come() -> None:
    world = World()
    world.ask("a")
    world.ask("b")
    with pytest.raises(Overloaded, match="not known yet") as caught:
        world.ask("c")
    assert caught.value.retry_after_s == 1.0


def test_a_first_one_may_always_come_however_slow_the_machine() -> None:
    world = World()
    _one_reply(world, 0.5)
    world.ask("a")
    with pytest.raises(Overloaded):
        world.ask("b")


def test_who_is_not_listened_to_may_come_unless_somebody_listens() -> None:
    world = World()
    _one_reply(world, 0.5)
    for name in "abc":
        world.ask(name, plays=False)
    with pytest.raises(Overloaded):
        world.ask("listener")
    for name in "abc":
        world.end(name)
    world.ask("listener")
    with pytest.raises(Overloaded):
        world.ask("d", plays=False)


def test_text_alone_is_never_refused_for_the_sake_of_sound() -> None:
    world = World()
    _one_reply(world, 0.5)
    world.ask("a")
    world.ask("b", world.text)


def _one_who_has_just_begun(world: World) -> None:
    _one_reply(world, 0.03)
    assert world.ask("a")
    world.step("a", talker_s=0.03 + 0.09, new=1)  # a first step takes 0.09 s more


def test_a_prompt_waits_until_nobody_would_hear_it() -> None:
    world = World()
    _one_who_has_just_begun(world)
    assert not world.ask("b")
    assert not world.ask("c")  # behind it
    assert world.pace.let_in() == []
    for _ in range(2):
        world.step("a", talker_s=0.03)  # now the sound is a tenth of a second more ahead
    assert world.pace.let_in() == ["b"]
    assert world.pace.let_in() == []  # until b has begun to speak, it may still interrupt
    world.step("a", "b", talker_s=0.03 + 0.09, new=1)
    for _ in range(3):
        world.step("a", "b", talker_s=0.03)
    assert world.pace.let_in() == ["c"]
    assert world.pace.next_time() is None


def test_a_prompt_that_has_waited_for_a_second_is_refused() -> None:
    world = World()
    _one_who_has_just_begun(world)
    asked = world.now
    assert not world.ask("b")
    assert world.pace.next_time() == asked + 1.0
    assert world.pace.expired(asked + 0.9) == {}
    refused = world.pace.expired(asked + 1.0)["b"]
    assert "just begun" in str(refused)
    world.pace.leave("b")
    assert world.pace.next_time() is None


def test_prompts_that_come_together_on_an_idle_server_all_begin_at_once() -> None:
    world = World()
    _one_who_has_just_begun(world)
    world.end("a")
    assert world.ask("b")
    assert world.ask("c")


def test_refused_clients_are_told_different_times_of_places_that_become_free() -> None:
    world = World()
    _one_reply(world, 0.025, steps=120)  # a reply takes 3 s
    for name in "abc":
        world.ask(name)
    waits: list[float] = []
    for _ in range(4):
        with pytest.raises(Overloaded) as caught:
            world.ask("d")
        waits.append(caught.value.retry_after_s)
    assert waits == [1.0, 2.0, 3.0, 3.0]  # three leave in 3 s, and later nobody is left


def test_without_a_limit_nobody_is_refused() -> None:
    world = World(PIPELINE.replace("rtf: 0.9", "rtf: null"))
    _one_reply(world, 0.5)
    for k in range(20):
        world.ask(str(k))


def test_an_interrupted_reply_says_nothing_about_the_pace() -> None:
    """The talker is ahead of the sound while a reply goes on: counted then, it seems slow."""
    world = World()
    _one_reply(world, 0.03)
    world.ask("a")
    world.stages["talker"].replicas[0].running.add("a")
    step = Step("talker", [], 30.0, 1, 1000)
    world.pace.stepped(step, "talker", world.now)
    world.pace.leave("a")
    for stage in world.stages.values():
        stage.members.discard("a")
    before = world.pace.factors(("talker", "vocoder"))
    assert before["talker"] == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize(
    ("batch", "seconds"),
    [
        (1, 0.02),  # smaller than any seen: no faster
        (2, 0.02),
        (3, 0.025),  # between two sizes: on the line
        (4, 0.03),
        (6, 0.04),  # beyond: on the line
        (8, 0.05),
        (16, 0.1),  # and from twice the largest on in proportion
    ],
)
def test_step_times_between_and_beyond_the_batches_seen(batch: int, seconds: float) -> None:
    times = StepTimes()
    assert times.of(batch) is None
    times.add(2, 0.02)
    times.add(4, 0.03)
    assert times.of(batch) == pytest.approx(seconds)


def test_old_step_times_fade() -> None:
    times = StepTimes()
    for _ in range(1000):
        times.add(1, 0.1)
    for _ in range(200):
        times.add(1, 0.2)
    assert times.of(1) == pytest.approx(0.2, abs=0.001)
