"""Workers for tests, loaded by vLLM by their names."""

from __future__ import annotations

from typing import Any

from omni_rt_workers.engines.vllm_ar.worker import OmniCPUWorker


class CountingWorker(OmniCPUWorker):
    """Counts requests that come back after they were preempted."""

    resumed = 0

    def execute_model(self, scheduler_output: Any) -> Any:
        self.resumed += len(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        return super().execute_model(scheduler_output)

    def count_resumed(self) -> int:
        return self.resumed


class FailingWorker(OmniCPUWorker):
    """Raises once, when told to, at one place of a step that computes something."""

    where = ""

    def fail_once(self, where: str) -> None:
        self.where = where

    def execute_model(self, scheduler_output: Any) -> Any:
        self._busy = bool(scheduler_output.total_num_scheduled_tokens)
        self._fail("before the forward")
        out = super().execute_model(scheduler_output)
        self._fail("after the forward")
        return out

    def sample_tokens(self, grammar_output: Any) -> Any:
        self._fail("before sampling")
        out = super().sample_tokens(grammar_output)
        self._fail("after sampling")
        return out

    def _fail(self, here: str) -> None:
        if self._busy and self.where in (here, "always"):
            self.where = "" if self.where == here else "always"
            raise RuntimeError(f"made to fail {here}")
