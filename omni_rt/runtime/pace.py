"""Whether speech keeps up with being played, and who may still come without stopping it.

Every value is seconds. The real-time factor of a stage is the time it needs to make one second of
sound for each of its requests; above 1 the listener hears a gap. Plain and synchronous: `Core`
tells what came, `check` decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from omni_rt.config import PipelineConfig
from omni_rt.errors import Overloaded
from omni_rt.graph import Plan
from omni_rt.runtime.stage import Stage
from omni_rt.runtime.steptimes import Mean, StepTimes
from omni_rt.wire.messages import Chunk, Finished, Step, TextPiece
from omni_rt.wire.tensors import nbytes_of

# What ended requests count for in the steps per second of sound, with each further one that ends.
_FADE = 0.9
_BYTES_PER_SAMPLE = 2
_RETRY_S = 1.0  # what a refused client is told before any request has ended
_SOON_S = 0.1  # the least that it is told
_HOLD_S = 1.0  # how long an accepted request may wait for its first step


@dataclass(slots=True)
class Voice:
    """A live request that gives sound."""

    plays: bool  # its sound is played while it comes
    since: float
    steps: dict[str, float]  # by stage on the way of the sound
    made_s: float = 0.0  # seconds of sound so far
    chunk_s: float = 0.0  # seconds of the last chunk
    begun: float | None = None  # when its first chunk came; later by the gaps there were
    ahead_s: float = 0.0  # how far the sound was ahead of the listener when its last chunk came
    made: bool = False  # all of the sound is there


class Pace:
    def __init__(self, config: PipelineConfig, stages: Mapping[str, Stage]) -> None:
        self._limits = config.playback
        self._workers = {name: stage.worker or name for name, stage in config.stages.items()}
        self._stages = stages
        self._voices: dict[str, Voice] = {}
        self._times: dict[str, StepTimes] = {name: StepTimes() for name in config.stages}
        self._held: dict[str, float] = {}  # accepted, and until when they may wait, in order
        self._paths: dict[tuple[str, ...], tuple[str, ...]] = {}  # by a plan's outputs
        self._made_s = 0.0  # seconds of sound of requests that have ended, old ones fading
        self._steps: dict[str, float] = dict.fromkeys(config.stages, 0.0)  # that these took
        self._chunk = Mean()
        self._life = Mean()  # of a request with sound, from its submission to its end
        self._promised = 0.0  # up to this time, refused clients were told of places

    def __repr__(self) -> str:
        return f"<Pace {len(self._voices)} voices>"

    # ---- what came

    def enter(self, request: str, plan: Plan, plays: bool, now: float) -> bool:
        """A request was accepted. Whether it may begin at once; if not, `let_in` says when."""
        path = self._path(plan)
        if not path:
            return True
        held = self._limits.rtf is not None and (self._held or self._interrupts(path))
        self._voices[request] = Voice(plays, now, dict.fromkeys(path, 0.0))
        if held:
            self._held[request] = now + _HOLD_S
        return not held

    def let_in(self) -> list[str]:
        """The held requests whose first steps nobody hears any more, in order."""
        ready: list[str] = []
        while self._held:
            request = next(iter(self._held))
            if self._interrupts(tuple(self._voices[request].steps)):
                break
            del self._held[request]
            ready.append(request)
        return ready

    def expired(self, now: float) -> dict[str, Overloaded]:
        """Requests that were held for too long, and what to tell them."""
        late = [request for request, until in self._held.items() if until <= now]
        why = "somebody who has just begun would hear a gap"
        return {request: self._overloaded(why, None, now) for request in late}

    def next_time(self) -> float | None:
        return min(self._held.values(), default=None)

    def stepped(self, step: Step, identity: str, now: float) -> None:
        """A stage told of a step: learn how long it took and how much sound it made."""
        if not self._voices:
            return
        sounding: set[str] = set()
        for item in step.items:
            voice = self._voices.get(item.request)
            if voice is None:
                continue
            if isinstance(item, Chunk) and (seconds := sound_s(item)):
                sounding.add(item.request)
                self._hear(voice, seconds, now)
                voice.steps[step.stage] = voice.steps.get(step.stage, 0) + 1
            elif isinstance(item, Finished) and self._gives_sound(step.stage):
                voice.made = True
                self._life.add(now - voice.since)
        if step.steps and step.batch:
            self._learn(step, identity, len(sounding))

    def _learn(self, step: Step, identity: str, sounding: int) -> None:
        """Of a stage that gives sound, a step counts those that got some; of others, all."""
        times = self._times[step.stage]
        batch = sounding if self._gives_sound(step.stage) else step.batch
        if not self._gives_sound(step.stage):
            for request in self._running(step.stage, identity):
                if (voice := self._voices.get(request)) and step.stage in voice.steps:
                    voice.steps[step.stage] += step.steps
        usual = times.of(batch) if batch else None
        if step.new and usual is not None:
            times.first.add(max(0.0, step.step_s - usual * step.steps) / step.new)
        elif batch and not step.new:
            times.add(batch, step.step_s / step.steps)

    def _running(self, stage: str, identity: str) -> set[str]:
        replicas = self._stages[stage].replicas
        return next((one.running for one in replicas if one.identity == identity), set())

    def _hear(self, voice: Voice, seconds: float, now: float) -> None:
        if voice.begun is None or voice.begun + voice.made_s < now:  # after a gap it begins anew
            voice.begun = now - voice.made_s
        voice.made_s += seconds
        voice.chunk_s = seconds
        voice.ahead_s = voice.begun + voice.made_s - now
        self._chunk.add(seconds)

    def leave(self, request: str) -> None:
        """A request has ended."""
        voice = self._voices.pop(request, None)
        self._held.pop(request, None)
        if voice is not None and voice.made:
            self._made_s = self._made_s * _FADE + voice.made_s
            for stage in self._steps:
                self._steps[stage] = self._steps[stage] * _FADE + voice.steps.get(stage, 0.0)

    # ---- who may come

    def check(self, plan: Plan, plays: bool, now: float) -> None:
        """Raises `Overloaded` if somebody's sound would stop were the request accepted."""
        limit = self._limits.rtf
        path = self._path(plan)
        if limit is None or not path or not self._voices:
            return
        if not plays and not any(voice.plays for voice in self._voices.values()):
            return
        stage, why = self._against(path, plays, limit)
        if stage:
            raise self._overloaded(why, stage, now)

    def _against(self, path: tuple[str, ...], plays: bool, limit: float) -> tuple[str, str]:
        """The stage that speaks against one more request, and why; "" if none does."""
        if plays:
            for name in path:
                stage = self._stages[name]
                if len(stage.members) >= stage.max_batch * len(stage.replicas):
                    return name, f"stage {name} has no place free"
        if not self._made_s and len(self._voices) < self._limits.unmeasured:
            return "", ""
        factors = self.factors(path)
        if not factors:
            return path[-1], "how fast sound is made is not known yet"
        slowest = max(factors, key=lambda name: factors[name])
        if factors[slowest] > limit:
            return slowest, f"sound would take {factors[slowest]:.2f} s for each second of it"
        return "", ""

    def _overloaded(self, why: str, stage: str | None, now: float) -> Overloaded:
        return Overloaded(
            f"{why}: {len(self._voices)} requests with sound are under way",
            stage=stage,
            retry_after_s=self._retry_after_s(now),
        )

    def factors(self, path: tuple[str, ...], more: int = 1) -> dict[str, float]:
        """The real-time factors with so many more requests: of each worker, by its last stage."""
        sums: dict[str, tuple[str, float]] = {}
        for name in path:
            stage = self._stages[name]
            batch = math.ceil((len(stage.members) + more) / len(stage.replicas))
            step_s = self._times[name].of(min(batch, stage.max_batch))
            steps = self._steps_per_second(name)
            if step_s is not None and steps is not None:
                _, others = sums.get(self._workers[name], ("", 0.0))
                sums[self._workers[name]] = (name, others + step_s * steps)
        return dict(sums.values())

    def _steps_per_second(self, stage: str) -> float | None:
        """Steps of the stage for each second of sound of one request: of those that have ended
        by themselves, for a stage is ahead of the sound until then. If there are none, of all."""
        if self._made_s:
            return self._steps[stage] / self._made_s
        live = [voice for voice in self._voices.values() if voice.made_s]
        made_s = sum(voice.made_s for voice in live)
        steps = sum(voice.steps.get(stage, 0.0) for voice in live)
        return steps / made_s if made_s and steps else None

    def _interrupts(self, path: tuple[str, ...]) -> bool:
        """Whether the first steps of one more request, and of those that have not begun to speak,
        take longer than everything may stop before somebody hears it."""
        coming = [
            name
            for request, voice in self._voices.items()
            if voice.begun is None and request not in self._held
            for name in voice.steps
        ]
        stop_s = sum(self._times[name].first.value for name in (*coming, *path))
        return stop_s > self._spare_s(max(self.factors(path, 0).values(), default=1.0))

    def _spare_s(self, factor: float) -> float:
        """How far ahead who is the least ahead will be when the next chunk is due."""
        players = [voice for voice in self._voices.values() if voice.plays and not voice.made]
        spare = [v.ahead_s - factor * v.chunk_s for v in players if v.begun is not None]
        if any(v.begun is None and any(v.steps.values()) for v in players):  # about to begin
            spare.append(self._chunk.value * (1 - factor))
        return max(0.0, min(spare, default=math.inf))

    def _retry_after_s(self, now: float) -> float:
        """Until a place that nobody was told of before is free, at the rate at which they become
        free; at most until all who are there now have left."""
        if not self._life.count:
            return _RETRY_S
        life_s = self._life.value
        self._promised = max(self._promised, now) + life_s / max(1, len(self._voices))
        self._promised = min(self._promised, now + life_s)
        return round(max(self._promised - now, _SOON_S), 1)

    # ---- which stages

    def _path(self, plan: Plan) -> tuple[str, ...]:
        """The stages that make the plan's sound while it is played, in order; () if it has none."""
        key = tuple(sorted(plan.outputs))
        if key not in self._paths:
            self._paths[key] = self._make_path(plan)
        return self._paths[key]

    def _make_path(self, plan: Plan) -> tuple[str, ...]:
        path = {stage for stage, port in plan.outputs.values() if self._is_sound(stage, port)}
        for stage in reversed(plan.stages):
            if stage in path:
                path |= {e.source for e in plan.edges if e.target == stage and e.stream}
        return tuple(stage for stage in plan.stages if stage in path)

    def _gives_sound(self, stage: str) -> bool:
        ports = self._stages[stage].ports
        return ports is not None and any(port.kind == "audio" for port in ports.outputs)

    def _is_sound(self, stage: str, port: str) -> bool:
        ports = self._stages[stage].ports
        return ports is not None and any(
            spec.name == port and spec.kind == "audio" for spec in ports.outputs
        )


def sound_s(chunk: Chunk) -> float:
    """Seconds of sound in a chunk of 16-bit samples of one channel; 0 if it is none."""
    rate = (chunk.meta or {}).get("sample_rate")
    if not rate or isinstance(chunk.data, TextPiece):
        return 0.0
    samples = nbytes_of(chunk.data.dtype, chunk.data.shape) / _BYTES_PER_SAMPLE
    return samples / float(rate)
