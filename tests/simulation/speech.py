"""Speech under more load than the stages can carry: what each listener hears, on virtual time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from omni_rt.config import parse_pipeline
from omni_rt.errors import Overloaded
from omni_rt.request import Audio, Request
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
CARRIED = 14  # requests at once that the talker can carry


@dataclass
class Listener:
    asked: float
    tries: int = 0
    accepted: float | None = None
    waits: list[float] = field(default_factory=list)  # what each refusal said
    arrivals: list[float] = field(default_factory=list)
    samples: int = 0
    ended: bool = False

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
) -> list[Listener]:
    """Listeners that come at random times, `load` times as many as the talker can carry; or `burst`
    of them at once."""
    loop = VirtualLoop()
    listeners: list[Listener] = []
    try:
        loop.run_until_complete(
            _run(loop, random.Random(seed), listeners, rtf, load, seconds, retries, burst, warm)
        )
    finally:
        loop.close()
    return listeners


async def _run(
    loop: VirtualLoop,
    rng: random.Random,
    listeners: list[Listener],
    rtf: str,
    load: float,
    seconds: float,
    retries: bool,
    burst: int,
    warm: bool,
) -> None:
    world = World(loop, Fate(rng, latency_s=0.0005))
    config = parse_pipeline(PIPELINE % {"rtf": rtf}, "speech.yaml")
    omni = AsyncOmni(config, channel=world, launcher=world)
    await omni.start()
    await omni.ready()
    mean_tokens = 40
    reply_s = mean_tokens * CHUNK_S
    async with asyncio.TaskGroup() as group:

        def come() -> None:
            listeners.append(Listener(loop.time()))
            tokens = rng.randint(10, 2 * mean_tokens - 10)
            group.create_task(_listen(omni, listeners[-1], tokens, retries))

        if burst:
            for _ in range(4 if warm else 0):  # so that something has been measured
                come()
                await asyncio.sleep(20)
            for _ in range(burst):
                come()
        else:
            end = loop.time() + seconds
            while loop.time() < end:
                come()
                await asyncio.sleep(rng.expovariate(load * CARRIED / reply_s))
    assert not omni._core.flows
    await omni.close(0)


async def _listen(omni: AsyncOmni, listener: Listener, tokens: int, retries: bool) -> None:
    loop = asyncio.get_running_loop()
    request = Request(prompt="say", playback=True, params={"steps": tokens})
    while listener.accepted is None:
        listener.tries += 1
        try:
            stream = omni.submit(request)
        except Overloaded as error:
            listener.waits.append(error.retry_after_s)
            if not retries:
                return
            await asyncio.sleep(error.retry_after_s)
        else:
            listener.accepted = loop.time()
    async with stream:
        async for output in stream:
            if isinstance(output, Audio):
                listener.arrivals.append(loop.time())
                listener.samples += len(output.data) // 2
    listener.ended = True
    assert listener.samples == tokens * SAMPLES
