"""Schedulers that can hold requests back: vLLM's own, with some requests left out of a step."""

from __future__ import annotations

import sys
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class Holding:
    """Mixin for vLLM's schedulers.

    A held request that runs keeps its KV blocks and its place; one that waits is not let in.
    """

    running: list[Any]
    waiting: Any
    finished_req_ids: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: set[str] = set()  # vLLM's request ids; set by the engine before each step
        self.last: Any = None  # SchedulerOutput of the latest step

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        for request in self.running:
            if request.request_id in self.held:
                request.next_decode_eligible_step = sys.maxsize
            elif request.next_decode_eligible_step == sys.maxsize:
                request.next_decode_eligible_step = 0
        if not self.held:
            self.last = super().schedule(*args, **kwargs)  # type: ignore[misc]
            return self.last
        waiting = [one for one in self.waiting if one.request_id in self.held]
        self.waiting.remove_requests(waiting)
        try:
            self.last = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            for request in reversed(waiting):
                self.waiting.prepend_request(request)
        return self.last

    def repeat_ends(self) -> None:
        """The latest step failed: the worker may not have heard which requests had ended."""
        if self.last is not None:
            self.finished_req_ids |= self.last.finished_req_ids


class OmniARScheduler(Holding, Scheduler):
    pass


class OmniARAsyncScheduler(Holding, AsyncScheduler):
    """With `async_scheduling`: a held request may give out one more step that was under way."""
