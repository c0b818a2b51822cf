"""The whole way on real devices: main, two workers, the probe, tensors that stay on the device."""

from __future__ import annotations

import os
import signal
import struct
from pathlib import Path

import pytest

from omni_rt.request import Request
from omni_rt.runtime.omni import AsyncOmni
from tests.gpu.stages import VALUES
from tests.runtime.real import collect, data_of, running

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

EDGE = "maker.x -> taker.x"
PIPELINE = """
stages:
  maker: {engine: torch, module: 'tests.gpu.stages:Maker', device: 'cuda:0', dtype: float32, max_batch: 4}
  taker: {engine: torch, module: 'tests.gpu.stages:Taker', device: 'cuda:0', dtype: float32, max_batch: 4}
edges: [maker.x -> taker.x]
outputs: {y: taker.y}
"""  # noqa: E501


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))


async def _ask(omni: AsyncOmni, value: int) -> float:
    outputs = await collect(omni, Request(prompt=str(value)))
    (total,) = struct.unpack("d", data_of(outputs, "y"))
    return float(total)


async def test_tensors_between_two_processes_stay_on_the_device() -> None:
    async with running(PIPELINE) as omni:
        assert omni.status().edges[EDGE].transport == "cuda", omni.status().edges[EDGE].about
        for value in range(100):  # three times through the pool
            assert await _ask(omni, value) == value * VALUES


@pytest.mark.parametrize("stage", ["maker", "taker"])
async def test_after_a_death_tensors_cross_on_the_device_again(stage: str) -> None:
    async with running(PIPELINE) as omni:
        for value in range(1, 4):
            pid = omni.status().stages[stage].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert await _ask(omni, value) == value * VALUES
            await omni.ready()
            assert await _ask(omni, value) == value * VALUES
        await omni.ready()
        assert omni.status().edges[EDGE].transport == "cuda", omni.status().edges[EDGE].about
