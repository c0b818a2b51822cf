"""What a stage is told of a request, and what is refused before anybody is told."""

from __future__ import annotations

import pytest

from omni_rt.config import parse_pipeline
from omni_rt.errors import BadRequest
from omni_rt.graph import Graph
from omni_rt.request import Request
from omni_rt.runtime.core import Core
from omni_rt.runtime.spec import shared_size
from omni_rt.wire.messages import ParamProduct, ParamSpec, Ports, PortSpec, Ready, Submit

PIPELINE = """
name: one
stages: {painter: {engine: diffusers, model: some/model, device: cpu}}
outputs: {image: painter.image}
"""
PORTS = Ports(
    (),
    (PortSpec("image", "image"),),
    tuple(ParamSpec(name, "int", 8, 2048) for name in ("height", "width")),
    4,
    products=(ParamProduct(("height", "width"), (512.0, 512.0), 600_000.0, "pixels"),),
)


@pytest.fixture
def core() -> Core:
    config = parse_pipeline(PIPELINE, "one.yaml")
    core = Core(config, Graph.from_config(config))
    (worker,) = core.supervisor.workers
    core.spawned(worker, shared_size(config, worker), 0.0)
    core.on_messages(worker.identity, [Ready("painter", PORTS, {})], 0.0)
    return core


def submitted(core: Core, request: Request, now: float) -> list[Submit]:
    effects = core.submit(request, f"r{len(core.flows)}", 1, now)
    return [m for sent in effects.send.values() for m in sent if isinstance(m, Submit)]


def test_a_stage_is_told_the_deadline_on_the_clock_of_the_machine(core: Core) -> None:
    (timed,) = submitted(core, Request(prompt="x", deadline_s=5.0), 100.0)
    (other,) = submitted(core, Request(prompt="x"), 100.0)
    assert (timed.deadline, other.deadline) == (105.0, None)


def test_parameters_that_are_too_much_together_are_refused_before_anything_is_queued(
    core: Core,
) -> None:
    told = r"height x width must be at most 600,000 pixels, got 512 x 2048"
    for request in (
        Request(prompt="x", params={"width": 2048}),  # with the height that nobody gave
        Request(prompt="x", stage_params={"painter": {"width": 2048}}),
        Request(prompt="x", params={"width": 8}, stage_params={"painter": {"width": 2048}}),
    ):
        with pytest.raises(BadRequest, match=told) as raised:
            submitted(core, request, 0.0)
        assert raised.value.param == "width"
    assert not core.flows
    assert submitted(core, Request(prompt="x", params={"width": 1024}), 0.0)
