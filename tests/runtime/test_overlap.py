"""Stages work at the same time, in real processes."""

from __future__ import annotations

from omni_rt.request import Request
from tests.runtime.real import collect, done_of, running

SPEECH = """
stages:
  thinker: {engine: simulated, simulated: {step_s: 0.01, steps: 60, ports: {text: {every: 1}, hidden: {bytes: 7168, every: 1}}}}
  talker: {engine: simulated, simulated: {step_s: 0.004, inputs: [hidden], ports: {codes: {bytes: 64, every: 4}}}}
  vocoder: {engine: simulated, simulated: {step_s: 0.002, inputs: [codes], ports: {audio: {kind: audio, bytes: 15360, every: 1}}}}
edges:
  - {from: thinker.hidden, to: talker.hidden, stream: true}
  - {from: talker.codes, to: vocoder.codes, stream: true}
outputs: {text: thinker.text, audio: vocoder.audio}
"""


async def test_talker_and_vocoder_have_worked_long_before_the_thinker_has_ended() -> None:
    async with running(SPEECH) as omni:
        done = done_of(await collect(omni, Request(prompt="say it")))
    assert done.first_output_s["talker"] < done.first_output_s["vocoder"] < done.stage_s["thinker"]
    assert set(done.first_output_s) == set(done.stage_s) == {"thinker", "talker", "vocoder"}


async def test_text_alone_never_reaches_the_stages_that_speak() -> None:
    async with running(SPEECH) as omni:
        done = done_of(await collect(omni, Request(prompt="say it", outputs=("text",))))
    assert set(done.first_output_s) == {"thinker"}
