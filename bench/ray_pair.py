"""Ray's object store between two actors, for `python -m bench.handoff --ray`."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch

from bench.common import PAUSE_S

now = time.perf_counter_ns


class Sink:
    def take(self, box: list[Any]) -> int:
        """The time at which the tensor was held. A ref in a list is not resolved by Ray itself."""
        import ray

        tensor = torch.from_numpy(ray.get(box[0]))
        got = now()
        tensor.sum()
        return got


class Source:
    def send(self, sink: Any, size: int, count: int, depth: int) -> tuple[list[int], list[int]]:
        import ray

        source = np.arange(size // 4, dtype=np.float32)
        sent: list[int] = []
        under_way: list[Any] = []
        got: list[int] = []
        for _ in range(count):
            if len(under_way) == depth:
                got.append(ray.get(under_way.pop(0)))
            if depth == 1 and sent:
                time.sleep(PAUSE_S)
            sent.append(now())
            under_way.append(sink.take.remote([ray.put(source)]))
        return sent, got + ray.get(under_way)


class RayPair:
    """Both actors and Ray's own processes. A context manager."""

    def __enter__(self) -> RayPair:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        actor = ray.remote(num_cpus=0)
        self._source, self._sink = actor(Source).remote(), actor(Sink).remote()
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        ray.shutdown()

    def run(self, size: int, count: int, depth: int) -> tuple[list[int], list[int]]:
        import ray

        times: tuple[list[int], list[int]] = ray.get(
            self._source.send.remote(self._sink, size, count, depth)
        )
        return times
