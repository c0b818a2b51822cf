"""Schedulers that can hold requests back: vLLM's own, with some requests left out of a step."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class Booked(NamedTuple):
    """A request as it was before a step's result was booked."""

    request: Any
    sampled: int  # tokens of the reply
    hashes: int  # blocks that have a hash


class Holding:
    """Mixin for vLLM's schedulers.

    A held request that runs keeps its KV blocks and its place; one that waits is not let in.
    `phase` and `under_way` say, after a step that raised, how far it had come.
    """

    requests: dict[str, Any]
    running: list[Any]
    waiting: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: set[str] = set()  # vLLM's request ids; set by the engine before each step
        self.last: Any = None  # SchedulerOutput of the latest step
        self.under_way: list[Any] = []  # those whose results have not come yet
        self.phase = ""  # or "schedule", "update": what is being done
        self.booking: list[Booked] = []  # while results are booked: what was before
        self.pooled: dict[str, Any] = {}  # of the latest step, if the worker was asked for it

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.phase = "schedule"
        self.last = self._schedule(*args, **kwargs)
        self.under_way.append(self.last)
        self.phase = ""
        return self.last

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        for request in self.running:
            if request.request_id in self.held:
                request.next_decode_eligible_step = sys.maxsize
            elif request.next_decode_eligible_step == sys.maxsize:
                request.next_decode_eligible_step = 0
        if not self.held:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        waiting = [one for one in self.waiting if one.request_id in self.held]
        self.waiting.remove_requests(waiting)
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            for request in reversed(waiting):
                self.waiting.prepend_request(request)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.phase = "update"
        found = (self.requests.get(id) for id in scheduler_output.num_scheduled_tokens)
        self.booking = [
            Booked(request, request.num_output_tokens, len(request.block_hashes))
            for request in found
            if request is not None and not request.is_finished()
        ]
        output = self._without_pooled(model_runner_output)
        updated = super().update_from_output(scheduler_output, output)  # type: ignore[misc]
        self.under_way = [one for one in self.under_way if one is not scheduler_output]
        self.booking = []
        self.phase = ""
        return updated

    def _without_pooled(self, output: Any) -> Any:
        """vLLM takes a reply with a `pooler_output` for one of a model that only embeds."""
        if output.pooler_output is None:
            return output
        self.pooled = dict(zip(output.req_ids, output.pooler_output, strict=True))
        return replace(output, pooler_output=None)


class OmniARScheduler(Holding, Scheduler):
    pass


class OmniARAsyncScheduler(Holding, AsyncScheduler):
    """With `async_scheduling`: a held request may give out one more step that was under way."""
