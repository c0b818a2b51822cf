"""Module stages for test_device_edges.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omni_rt_workers.module import Job, Module, Outputs, Setup

VALUES = 1 << 20  # of float32 in a tensor that crosses


class Maker(Module):
    """Gives a tensor full of the number that is the prompt."""

    outputs = {"x": "tensor"}

    def __init__(self, setup: Setup) -> None:
        self.device = setup.device

    def step(self, jobs: Sequence[Job]) -> Sequence[Outputs | None]:
        return [{"x": torch.full((VALUES,), float(job.prompt), device=self.device)} for job in jobs]


class Taker(Module):
    """Gives the tensor's sum and where it lay."""

    inputs = {"x": None}
    outputs = {"y": "tensor"}

    def step(self, jobs: Sequence[Job]) -> Sequence[Outputs | None]:
        sums = [job.inputs["x"].sum(dtype=torch.float64) for job in jobs]
        return [{"y": one.reshape(1).cpu()} for one in sums]
