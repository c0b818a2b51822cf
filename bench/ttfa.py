"""Speech while the model still thinks: time to the first sound, and whether it ever stops.

`python -m bench.ttfa [--rounds 5] [--chunks 10000] [--model DIR]`. Keys: docs/bench.md.
`--model` measures a Qwen2.5-Omni checkpoint with the preset of that name instead, without what only
simulated stages can tell (the ideal, gaps in the ramp, admission).

The stages are simulated with the times that "Qwen3-Omni Technical Report" (arXiv 2509.17765, table
of first-packet latencies) gives for a 30B-A3B model with one and four requests at once: thinker 88
ms to the first token, then 75 and 63 tokens a second; talker 57 ms to the first code and 140 and
125 a second, with 14 and 16 ms for the other codebooks of each frame; vocoder 3 and 5 ms. A frame
is 1,920 samples at 24 kHz, four frames are a chunk. Four frames for each token of text: 3.1 tokens
a second, as people speak. A hidden state has the size of Qwen2.5-Omni-7B's: 3,584 of two bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from bench.common import child_path, finish, p50, p99
from omni_rt import AsyncOmni, Request, Text
from omni_rt.config import PipelineConfig, parse_pipeline
from omni_rt.errors import Overloaded
from omni_rt.request import Audio, Output
from omni_rt.runtime.stream import Stream
from omni_rt_workers.engines.simulated import ramp

RATE, HOP, FRAMES = 24_000, 1_920, 4  # samples a second, samples a frame, frames a chunk
SAMPLES = HOP * FRAMES
TOKENS, FRAMES_PER_TOKEN = 200, 4
THINKER_S, TALKER_S, VOCODER_S = 0.0133, 0.0071 + 0.014, 0.003
THINKER_FIRST_S, TALKER_FIRST_S = 0.088 - THINKER_S, 0.057 - 0.0071
THINKER_MORE_S, TALKER_MORE_S, VOCODER_MORE_S = 0.0009, 0.001, 0.0007  # with each further request
IDEAL_S = (
    THINKER_FIRST_S + THINKER_S + TALKER_FIRST_S + FRAMES * TALKER_S + VOCODER_S
)  # nothing but the stages' own times
AT_ONCE = 16
# What the steps of `AT_ONCE` requests take longer than those of one, up to the first sound.
GROWTH_S = (AT_ONCE - 1) * (
    THINKER_FIRST_S + THINKER_MORE_S + TALKER_FIRST_S + FRAMES * TALKER_MORE_S + VOCODER_MORE_S
)
LATER = 8
PIPELINE = f"""
stages:
  thinker:
    engine: simulated
    max_batch: {AT_ONCE}
    simulated:
      step_s: {THINKER_S}
      more_s: {THINKER_MORE_S}
      first_s: {THINKER_FIRST_S}
      steps: {TOKENS}
      ports: {{text: {{every: 1}}, hidden: {{bytes: 7168, every: 1}}}}
  talker:
    engine: simulated
    max_batch: {AT_ONCE}
    simulated:
      step_s: {TALKER_S}
      more_s: {TALKER_MORE_S}
      first_s: {TALKER_FIRST_S}
      steps: {TOKENS * FRAMES_PER_TOKEN}
      repeat: {FRAMES_PER_TOKEN}
      inputs: [hidden]
      ports: {{codes: {{bytes: {16 * 8 * FRAMES}, every: {FRAMES}}}}}
  vocoder:
    engine: simulated
    max_batch: {AT_ONCE}
    simulated:
      step_s: {VOCODER_S}
      more_s: {VOCODER_MORE_S}
      steps: {TOKENS * FRAMES_PER_TOKEN // FRAMES}
      inputs: [codes]
      ports: {{audio: {{kind: audio, bytes: {2 * SAMPLES}, every: 1}}}}
edges:
  - {{from: thinker.hidden, to: talker.hidden, stream: true}}
  - {{from: talker.codes, to: vocoder.codes, stream: true}}
outputs: {{text: thinker.text, audio: vocoder.audio}}
"""


@dataclass
class Heard:
    """What a client heard of one reply, with the times of arrival in seconds from submission."""

    text_s: float | None = None  # first token
    sound_s: float | None = None  # first chunk that is not silence
    chunks: list[tuple[float, bytes]] = field(default_factory=list)  # PCM, 16 bits
    end_s: float = 0.0
    retry_after_s: float | None = None  # it was refused

    @property
    def samples(self) -> int:
        return sum(len(data) // 2 for _, data in self.chunks)

    @property
    def in_order(self) -> bool:
        """Whether it is the ramp that a simulated vocoder gives, without a gap."""
        return all(data == ramp(k, len(data) // 2) for k, (_, data) in enumerate(self.chunks))

    def underruns(self) -> list[float]:
        """Seconds that chunks were late which were not there when those before had been played."""
        late, played = [], self.chunks[0][0] if self.chunks else 0.0
        for arrived, data in self.chunks:
            if arrived > played:
                late.append(arrived - played)
            played = max(arrived, played) + len(data) / 2 / RATE
        return late


def pcm_of(output: Output) -> bytes | None:
    return output.data if isinstance(output, Audio) else None


def sounds(data: bytes) -> bool:
    """Whether it is louder than -60 dB of full scale."""
    return max(map(abs, array("h", data)), default=0) > 32


@dataclass(frozen=True)
class Speaker:
    """A running pipeline that speaks."""

    omni: AsyncOmni
    length: str  # the thinker's parameter for the number of tokens

    def submit(self, audio: bool, tokens: int, plays: bool) -> Stream:
        request = Request(
            prompt="what is a song?",
            outputs=("text", "audio") if audio else ("text",),
            stage_params={"thinker": {self.length: tokens}},
            playback=plays,
        )
        return self.omni.submit(request)


async def listen(
    speaker: Speaker,
    audio: bool = True,
    until: str = "end",
    tokens: int = TOKENS,
    plays: bool = False,
    firsts: asyncio.Queue[float] | None = None,
) -> Heard:
    """One reply, up to the first "text", the first "sound" or its "end".

    `firsts` gets the time of its first token at once.
    """
    heard = Heard()
    started = time.perf_counter()
    try:
        stream = speaker.submit(audio, tokens, plays)
    except Overloaded as error:
        heard.retry_after_s = error.retry_after_s
        return heard
    async with stream:
        async for output in stream:
            now = time.perf_counter() - started
            if isinstance(output, Text) and heard.text_s is None:
                heard.text_s = now
                if firsts is not None:
                    firsts.put_nowait(now)
                if until == "text":
                    break
            elif pcm := pcm_of(output):
                heard.chunks.append((now, pcm))
                if heard.sound_s is None and sounds(pcm):
                    heard.sound_s = now
                    if until == "sound":
                        break
    heard.end_s = time.perf_counter() - started
    return heard


async def served(speaker: Speaker, tokens: int, waits: list[float]) -> Heard:
    """One reply that is played while it comes; who is refused comes again when told."""
    while (heard := await listen(speaker, tokens=tokens, plays=True)).retry_after_s is not None:
        waits.append(heard.retry_after_s)
        await asyncio.sleep(heard.retry_after_s)
    return heard


async def rest() -> None:
    """What was left early ends in every stage, so that it does not count in the next figure."""
    await asyncio.sleep(0.3)


# ---- the first sound


async def first_sound(speaker: Speaker, rounds: int) -> dict[str, object]:
    """Of one reply alone: over the ideal, and over that of stages which wait for each other."""
    firsts: list[float] = []
    wholes: list[float] = []
    text = PIPELINE.replace("stream: true", "stream: false")
    async with AsyncOmni(parse_pipeline(text, "whole.yaml")) as omni:
        whole = Speaker(omni, "steps")
        for _ in range(rounds):
            for _ in range(4):
                firsts.append((await listen(speaker, until="sound")).sound_s or 0.0)
                await rest()
            wholes.append((await listen(whole, until="sound")).sound_s or 0.0)
            await rest()
    print(f"first sound after {p50(firsts):.3f} s, ideal {IDEAL_S:.3f}, whole {p50(wholes):.3f}")
    return {
        "ttfa_over_ideal": round(p50(firsts) / IDEAL_S, 4),
        "ttfa_over_whole": round(p50(firsts) / p50(wholes), 4),
        "ttfa_s": round(p50(firsts), 4),
        "ttfa_ideal_s": round(IDEAL_S, 4),
        "ttfa_whole_s": round(p50(wholes), 3),
    }


async def first_sound_of_model(speaker: Speaker, rounds: int) -> dict[str, object]:
    """Of one reply alone, over its own end, which is earlier than that of stages which wait."""
    heard = [await listen(speaker) for _ in range(rounds)]
    firsts = [one.sound_s or one.end_s for one in heard]
    ends = [one.end_s for one in heard]
    print(f"first sound after {p50(firsts):.3f} s, end after {p50(ends):.3f} s")
    return {
        "ttfa_over_ideal": None,
        "ttfa_over_whole": round(p50(firsts) / p50(ends), 4),
        "ttfa_s": round(p50(firsts), 4),
        "ttfa_whole_s": round(p50(ends), 3),
    }


# ---- the first token


async def first_token_s(speaker: Speaker, at_once: int, audio: bool) -> tuple[float, float]:
    """Of requests that come together, and of one more that comes while they go on: medians.

    They come while another's prompt is worked on: so all of them get into the same next step.
    """
    firsts: asyncio.Queue[float] = asyncio.Queue()
    before = asyncio.create_task(listen(speaker, audio, until="text"))
    await asyncio.sleep(THINKER_FIRST_S / 4)
    tasks = [asyncio.create_task(listen(speaker, audio, firsts=firsts)) for _ in range(at_once)]
    together = [await firsts.get() for _ in tasks]
    later = []
    for k in range(LATER):
        await asyncio.sleep(0.05 + k * 0.007)  # at another moment of a step each time
        later.append((await listen(speaker, audio, until="text")).text_s or 0.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(before, *tasks, return_exceptions=True)
    await rest()
    return p50(together), p50(later)


async def first_token(speaker: Speaker, rounds: int) -> dict[str, object]:
    ratios: dict[str, float] = {}
    for at_once in (1, 4, 10):
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for _ in range(rounds):
            for audio in (False, True):
                times[audio].append(await first_token_s(speaker, at_once, audio))
        for k, name in enumerate(("together", "later")):
            on, off = (p50([pair[k] for pair in times[audio]]) for audio in (True, False))
            ratios[f"{at_once}_{name}"] = round(on / off, 4)
            print(f"first token, {at_once} {name}: {on:.4f} s with audio, {off:.4f} s without")
    return {"ttft_audio_on_over_off": max(ratios.values()), "ttft_on_over_off": ratios}


# ---- playing


async def playing(speaker: Speaker, chunks: int, at_once: int) -> dict[str, object]:
    """`at_once` clients that ask again as soon as a reply has ended, until there are `chunks`."""
    rng = random.Random(1)
    heard: list[Heard] = []
    waits: list[float] = []
    started = time.perf_counter()

    async def client(k: int) -> None:
        await asyncio.sleep(k * 0.5)
        while sum(len(reply.chunks) for reply in heard) < chunks:
            heard.append(await served(speaker, rng.choice((40, 100, 200)), waits))

    async with asyncio.TaskGroup() as group:
        for k in range(at_once):
            group.create_task(client(k))
    count = sum(len(reply.chunks) for reply in heard)
    late = [seconds for reply in heard for seconds in reply.underruns()]
    paces = [(r.end_s - (r.sound_s or 0.0)) / (r.samples / RATE) for r in heard if r.samples]
    print(f"{count} chunks in {time.perf_counter() - started:.0f} s, {len(late)} underruns")
    exact = all(reply.samples % HOP == 0 for reply in heard)
    if speaker.length == "steps":  # simulated: the sound says whether it is all there
        exact = exact and all(reply.in_order for reply in heard)
    return {
        "underruns": len(late),
        "underrun_s": round(max(late, default=0.0), 3),
        "chunks": count,
        "playing_refused": len(waits),
        "samples_exact": exact,
        "playing_at_once": at_once,
        "rtf": round(p50(paces), 3),
    }


# ---- more than the stages can carry


async def crowd(speaker: Speaker, rounds: int, alone_s: float) -> dict[str, object]:
    """As many at once as there are places, and three times as many, who come again when told."""
    firsts: list[float] = []
    refused = 0
    for _ in range(rounds):
        tasks = [listen(speaker, until="sound", plays=True) for _ in range(AT_ONCE)]
        heard = await asyncio.gather(*tasks)
        firsts += [one.sound_s for one in heard if one.sound_s is not None]
        refused += sum(one.retry_after_s is not None for one in heard)
        await rest()
    limit_s = 3 * alone_s + GROWTH_S
    waits: list[float] = []
    everyone = await asyncio.gather(*(served(speaker, 40, waits) for _ in range(3 * AT_ONCE)))
    late = sum(len(one.underruns()) for one in everyone)
    print(f"{AT_ONCE} at once: first sound p99 {p99(firsts):.3f} s of {limit_s:.3f} s allowed")
    print(f"{3 * AT_ONCE} at once: {len(waits)} refusals, all served, {late} underruns")
    return {
        "ttfa_p99_16_s": round(p99(firsts), 3),
        "ttfa_p99_16_over_limit": round(p99(firsts) / limit_s, 4),
        "ttfa_p99_over_alone_16": round(p99(firsts) / alone_s, 3),
        "refused_of_16": refused / rounds,
        "served_of_48": len(everyone),
        "refused": len(waits),
        "retry_after_s": [min(waits, default=0.0), max(waits, default=0.0)],
        "underruns_of_48": late,
    }


async def simulated(rounds: int, chunks: int) -> dict[str, object]:
    async with AsyncOmni(parse_pipeline(PIPELINE, "speech.yaml")) as omni:
        speaker = Speaker(omni, "steps")
        await listen(speaker, tokens=8)
        result = await first_sound(speaker, rounds)
        result |= await first_token(speaker, rounds)
        result |= await playing(speaker, chunks, AT_ONCE // 2)
        alone = [(await listen(speaker, until="sound")).sound_s or 0.0 for _ in range(4)]
        result |= await crowd(speaker, rounds, p50(alone))
    return result


async def of_model(config: PipelineConfig, rounds: int, chunks: int) -> dict[str, object]:
    async with AsyncOmni(config) as omni:
        speaker = Speaker(omni, "max_tokens")
        await listen(speaker, tokens=8)
        result = await first_sound_of_model(speaker, rounds)
        result |= await first_token(speaker, rounds)
        result |= await playing(speaker, chunks, 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=10_000)
    parser.add_argument("--model", type=Path, help="a Qwen2.5-Omni model instead of simulation")
    args = parser.parse_args()
    child_path()
    if args.model is None:
        result = uvloop.run(simulated(args.rounds, args.chunks))
    else:
        text = f"preset: qwen2.5-omni\nmodel: {args.model.resolve()}\n"
        config = parse_pipeline(text, "model.yaml")
        result = uvloop.run(of_model(config, args.rounds, args.chunks))
    finish({"bench": "ttfa", "rounds": args.rounds, **result})


if __name__ == "__main__":
    main()
