"""Workers for tests, loaded by vLLM by their names."""

from __future__ import annotations

from typing import Any

from omni_rt_workers.engines.vllm_ar.rows import Ref
from omni_rt_workers.engines.vllm_ar.scheduler import OmniARScheduler
from omni_rt_workers.engines.vllm_ar.worker import OmniCPUWorker


class CountingWorker(OmniCPUWorker):
    """Counts requests that come back after they were preempted."""

    resumed = 0

    def execute_model(self, scheduler_output: Any, *args: Any) -> Any:
        self.resumed += len(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        return super().execute_model(scheduler_output, *args)

    def count_resumed(self) -> int:
        return self.resumed


class FailingWorker(OmniCPUWorker):
    """Raises, when told to, at one place of a step that computes something."""

    once = ""
    poison = ("", -1)
    watching = False

    def fail_once(self, where: str) -> None:
        self.once = where

    def fail_on(self, where: str, token: int, only_rank: int | None = None) -> None:
        """In every step with a request that has `token` in its prompt; in the forward: in every
        one that computes on it."""
        if only_rank in (None, self.rank):
            self.poison = (where, token)
        if not self.watching:
            self.get_model().register_forward_pre_hook(self._look, with_kwargs=True)
            self.watching = True

    def execute_model(self, scheduler_output: Any, *args: Any) -> Any:
        self._in_step = self._prompts(scheduler_output)
        self._fail("before the forward")
        out = super().execute_model(scheduler_output, *args)
        self._fail("after the forward")
        return out

    def sample_tokens(self, grammar_output: Any) -> Any:
        self._fail("before sampling")
        out = super().sample_tokens(grammar_output)
        self._fail("after sampling")
        return out

    def _prompts(self, scheduler_output: Any) -> list[list[int]]:
        new = {one.req_id: one.prompt_token_ids for one in scheduler_output.scheduled_new_reqs}
        known = self.model_runner.requests
        ids = scheduler_output.num_scheduled_tokens
        return [new.get(id) or known[id].prompt_token_ids for id in ids]

    def _look(self, module: Any, args: Any, kwargs: Any) -> None:
        where, token = self.poison
        if where == "in the forward" and (kwargs["input_ids"] == token).any():
            raise RuntimeError(f"poisoned {where}")

    def _fail(self, here: str) -> None:
        if self._in_step and self.once == here:
            self.once = ""
            raise RuntimeError(f"made to fail {here}")
        where, token = self.poison
        if where == here and any(token in prompt for prompt in self._in_step):
            raise RuntimeError(f"poisoned {here}")


class FailingScheduler(OmniARScheduler):
    """Raises in the middle of its work on a request that has `poison` in its prompt."""

    poison = -1
    where = ""

    def _reserve_prefill_lookahead(self, request: Any, *args: Any) -> Any:
        self._fail("in schedule", request)
        return super()._reserve_prefill_lookahead(request, *args)

    def _update_request_with_output(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._fail("in update_from_output", request)
        return super()._update_request_with_output(request, *args, **kwargs)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        for request, *_ in self.booking:
            self._fail("at the end of booking", request)
        return super().make_stats(*args, **kwargs)

    def _fail(self, here: str, request: Any) -> None:
        if self.where == here and self.poison in request.prompt_token_ids:
            raise RuntimeError(f"poisoned {here}")


class PoisonedWorker(FailingWorker):
    """As `FailingWorker`, told by its stage: `additional_config` has places by token."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.get_model().register_forward_pre_hook(self._look, with_kwargs=True)
        places = self.vllm_config.additional_config["poison"]
        self.places = {int(token): where for token, where in places.items()}

    def take_rows(self, *args: Any) -> Any:
        taken = super().take_rows(*args)
        assert all(isinstance(part, Ref) for parts in taken for part in parts)
        return taken

    def _look(self, module: Any, args: Any, kwargs: Any) -> None:
        for token in kwargs["input_ids"].tolist():
            if self.places.get(token) == "in the forward":
                raise RuntimeError("poisoned in the forward")

    def _fail(self, here: str) -> None:
        for token in {token for prompt in self._in_step for token in prompt}:
            where = self.places.get(token)
            if where == here or (where == f"{here}, on rank 1 alone" and self.rank == 1):
                raise RuntimeError(f"poisoned {here}")
