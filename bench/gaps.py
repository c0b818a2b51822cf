"""vLLM workers that note when each step was computed: how long is the device left without work?

Between the end of one `execute_model` and the beginning of the next lie sampling, vLLM's
bookkeeping and scheduling, and whatever the program around vLLM does. On CPU `execute_model`
returns when the step is computed; on CUDA it returns when the step is launched, and the figures
say how long the host takes between two launches instead.
"""

from __future__ import annotations

import time
from array import array
from pathlib import Path
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from omni_rt_workers.engines.vllm_ar.worker import OmniCPUWorker

# Longer ones are pauses between two runs.
_PAUSE_S = 0.05


class Noted:
    """Mixin: appends (begin, end) of each step, float64 seconds, to the file that
    `additional_config["steps_file"]` names."""

    vllm_config: Any

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        begin = time.perf_counter()
        result = super().execute_model(scheduler_output)  # type: ignore[misc]
        times = array("d", (begin, time.perf_counter()))
        with Path(self.vllm_config.additional_config["steps_file"]).open("ab") as file:
            times.tofile(file)
        return result


class BareWorker(Noted, CPUWorker):
    pass


class OmniWorker(Noted, OmniCPUWorker):
    pass


def gaps_s(file: Path) -> list[float]:
    """Seconds between the steps noted in a file, which is emptied."""
    times = array("d")
    with file.open("rb") as opened:
        times.frombytes(opened.read())
    file.write_bytes(b"")
    between = [begin - end for end, begin in zip(times[1::2], times[2::2], strict=False)]
    return [gap for gap in between if gap < _PAUSE_S]
