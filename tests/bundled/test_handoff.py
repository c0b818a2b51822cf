"""The picture knows only what crossed the process boundary."""

from __future__ import annotations

import io

import pytest
from PIL import Image

import judge
from omni_rt.config import bundled
from omni_rt.request import Image as ImageOutput
from omni_rt.request import Request, Text
from omni_rt.runtime.core import Core
from omni_rt.runtime.flow import Flow, Run
from omni_rt.runtime.ledger import key_of, leased
from omni_rt.runtime.omni import AsyncOmni
from world import Scene, Thing

pytestmark = pytest.mark.model

FIRST = Scene((Thing("red", "circle"), Thing("blue", "square")), "above", "white")
SECOND = Scene((Thing("green", "triangle"),), None, "white")


def shows(picture: Image.Image, scene: Scene) -> bool:
    things = [(thing.color, thing.shape) for thing in scene.things]
    return judge.fault(picture, things, scene.relation, scene.background) is None


async def test_swapped_hidden_states_swap_the_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncOmni(bundled()) as omni:
        text, picture = await _ask(omni, FIRST)
        assert shows(picture, FIRST), text
        _swap_at_the_painter(monkeypatch)
        first, second = omni.submit(_request(FIRST)), omni.submit(_request(SECOND))
        first_text, first_picture = await _read(first)
        second_text, second_picture = await _read(second)
    assert str(FIRST) in first_text
    assert str(SECOND) in second_text
    assert shows(first_picture, SECOND)
    assert shows(second_picture, FIRST)
    assert not shows(first_picture, FIRST)


def _swap_at_the_painter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the first request that comes to the painter until there is a second; swap their refs."""
    queue = Core._queue
    held: list[tuple[Flow, Run]] = []

    def swapping(self: Core, flow: Flow, run: Run) -> None:
        if run.stage != "painter":
            queue(self, flow, run)
            return
        held.append((flow, run))
        if len(held) < 2:
            return
        (one, run_one), (other, run_other) = held
        port_one, port_other = run_one.inputs["prompt_embeds"], run_other.inputs["prompt_embeds"]
        for port, owner, taker in ((port_one, one, other), (port_other, other, one)):
            for piece in port.pieces:
                if ref := leased(piece):
                    self.ledger.lend(key_of(ref), taker.id)
                    self.ledger.release(key_of(ref), owner.id)
        port_one.pieces, port_other.pieces = port_other.pieces, port_one.pieces
        for flow_held, run_held in held:
            queue(self, flow_held, run_held)

    monkeypatch.setattr(Core, "_queue", swapping)


def _request(scene: Scene) -> Request:
    return Request(prompt=f"draw {scene}", seed=3)


async def _ask(omni: AsyncOmni, scene: Scene) -> tuple[str, Image.Image]:
    return await _read(omni.submit(_request(scene)))


async def _read(stream: object) -> tuple[str, Image.Image]:
    text, picture = "", None
    async for output in stream:  # type: ignore[attr-defined]
        if isinstance(output, Text):
            text += output.text
        elif isinstance(output, ImageOutput):
            picture = Image.open(io.BytesIO(output.data)).convert("RGB")
    assert picture is not None
    return text, picture
