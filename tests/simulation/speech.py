"""Speech under more load than the stages can carry: what each listener hears, on virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from omni_rt.config import parse_pipeline
from omni_rt.errors import Overloaded
from omni_rt.request import Audio, Done, Request
from omni_rt.runtime.omni import AsyncOmni
from tests.simulation.virtual import VirtualLoop
from tests.simulation.workers import Fate, World

RATE, SAMPLES = 24_000, 7_680  # samples a second, in a chunk
CHUNK_S = SAMPLES / RATE
# A step of the talker makes 80 ms of sound and takes 20 ms, with 14 requests 72 ms: a real-time
# factor of 0.9. A prompt takes 60 ms of the thinker and 40 ms of the talker.
PIPELINE = """
playback: {rtf: %(rtf)s}
stages:
  thinker: {engine: simulated, max_batch: 64, arena: 8MiB, simulated: {step_s: 0.012, more_s: 0.001, first_s: 0.06, steps: 40, ports: {text: {every: 1}, hidden: {bytes: 64, every: 1}}}}
  talker: {engine: simulated, max_batch: 64, arena: 8MiB, simulated: {step_s: 0.02, more_s: 0.004, first_s: 0.04, repeat: 4, inputs: [hidden], ports: {codes: {bytes: 64, every: 4}}}}
  vocoder: {engine: simulated, max_batch: 64, arena: 8MiB, simulated: {step_s: 0.003, more_s: 0.0005, inputs: [codes], ports: {audio: {kind: audio, bytes: 15360, every: 1}}}}
edges:
  - {from: thinker.hidden, to: talker.hidden, stream: true}
  - {from: talker.codes, to: vocoder.codes, stream: true}
outputs: {text: thinker.text, audio: vocoder.audio}
"""
TOKENS = 40  # of a reply, on average; each is a chunk of sound
CARRIED = 14  # requests at once that the talker can carry
ALONE_S = 0.072 + 0.06 + 3 * 0.02 + 0.003  # to the first sound of one request alone
GROWTH_S = (CARRIED - 1) * (0.061 + 0.044 + 3 * 0.004 + 0.0005)  # that of the others' steps


@dataclass
class Listener:
    asked: float
    tokens: int
    plays: bool = True
    patience_s: float = math.inf  # it hangs up then
    tries: int = 0
    accepted: float | None = None
    waits: list[float] = field(default_factory=list)  # what each refusal said
    arrivals: list[float] = field(default_factory=list)
    samples: int = 0
    done: Done | None = None

    @property
    def gaps(self) -> list[float]:
        """How late chunks were, of those that were not there when they were to be played."""
        late, played = [], self.arrivals[0] if self.arrivals else 0.0
        for arrived in self.arrivals:
            if arrived > played + 1e-9:
                late.append(arrived - played)
            played = max(arrived, played) + CHUNK_S
        return late

    @property
    def first_s(self) -> float:
        assert self.accepted is not None
        return self.arrivals[0] - self.accepted


def run(
    seed: int,
    *,
    rtf: str = "0.9",
    load: float = 3.0,
    seconds: float = 60.0,
    retries: bool = False,
    burst: int = 0,
    warm: bool = True,
    mixed: bool = False,
    pipeline: str = PIPELINE,
) -> list[Listener]:
    """Listeners that come at random times, `load` times as many as the talker can carry; or `burst`
    of them at once, on a server that has served some or none (`warm`). `mixed`: some hang up, some
    do not listen while the sound comes."""
    loop = VirtualLoop()
    crowd = _Crowd(loop, random.Random(seed), load, seconds, retries, burst, warm, mixed)
    try:
        loop.run_until_complete(crowd.run(pipeline % {"rtf": rtf}))
    finally:
        loop.close()
    return crowd.listeners


@dataclass
class _Crowd:
    loop: VirtualLoop
    rng: random.Random
    load: float
    seconds: float
    retries: bool
    burst: int
    warm: bool
    mixed: bool
    listeners: list[Listener] = field(default_factory=list)

    async def run(self, pipeline: str) -> None:
        world = World(self.loop, Fate(self.rng, latency_s=0.0005))
        omni = AsyncOmni(parse_pipeline(pipeline, "speech.yaml"), channel=world, launcher=world)
        await omni.start()
        await omni.ready()
        async with asyncio.TaskGroup() as group:
            async for _ in self._arrivals():
                tokens = self.rng.randint(TOKENS // 4, TOKENS * 7 // 4)
                listener = Listener(self.loop.time(), tokens)
                if self.mixed:
                    listener.plays = self.rng.random() < 0.7
                    listener.patience_s = self.rng.choice([math.inf, self.rng.uniform(0, 6)])
                self.listeners.append(listener)
                group.create_task(_listen(omni, listener, self.retries))
        assert not omni.status().live
        await omni.close(0)

    async def _arrivals(self) -> AsyncIterator[None]:
        if self.burst:
            for _ in range(4 if self.warm else 0):
                yield
                await asyncio.sleep(30)
            for _ in range(self.burst):
                yield
            return
        end = self.loop.time() + self.seconds
        while self.loop.time() < end:
            yield
            await asyncio.sleep(self.rng.expovariate(self.load * CARRIED / (TOKENS * CHUNK_S)))


async def _listen(omni: AsyncOmni, listener: Listener, retries: bool) -> None:
    while listener.accepted is None:
        listener.tries += 1
        try:
            await _hear(omni, listener)
        except Overloaded as error:  # at once, or after a moment
            listener.accepted = None
            listener.waits.append(error.retry_after_s)
            if not retries:
                return
            await asyncio.sleep(error.retry_after_s)


async def _hear(omni: AsyncOmni, listener: Listener) -> None:
    loop = asyncio.get_running_loop()
    request = Request(prompt="say", playback=listener.plays, params={"steps": listener.tokens})
    async with omni.submit(request) as stream:
        listener.accepted = loop.time()
        async for output in stream:
            if loop.time() > listener.accepted + listener.patience_s:
                return
            if isinstance(output, Audio):
                listener.arrivals.append(loop.time())
                listener.samples += len(output.data) // 2
            elif isinstance(output, Done):
                listener.done = output
