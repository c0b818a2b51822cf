"""A step that raised: vLLM is set right again, and the request that makes it fail is found.

An exception out of a step leaves vLLM half-way: the scheduler counts tokens as being computed
that never will be, the worker may not have heard of new and ended requests, and may have drawn
tokens that nobody got. `settle` undoes that: every request goes back to waiting with the tokens
it has, and is computed again from its first position. Then the requests of the failed step are run
again, all of them first, then half of them at a time, until each has either got past the place
where it was or has failed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.request import RequestStatus

from omni_rt_workers.engine import EngineBroken

ANSWER_S = 60.0  # for what costs a rank no time; one that hangs in a step does not answer at all

# What a device says when it will say nothing else until its process ends. Out of memory is not
# among them. From other ranks an error comes as text, so the type is not enough.
_STICKY = ("CUDA error", "CUDA driver error", "cuBLAS", "CUBLAS_STATUS", "NCCL error")


@dataclass(frozen=True, slots=True)
class Culprit:
    """A request that failed alone; vLLM has been rid of it."""

    id: str  # vLLM's
    error: Exception


def search(
    llm: Any,
    scheduler: Any,
    error: Exception,
    step_only: Callable[[set[str]], list[Any]],
    runnable: Callable[[], set[str]],
) -> Iterator[list[Any] | Culprit]:
    """Each step's outputs and each culprit, until all requests of the failed step are judged.

    `step_only` makes a step of these requests alone, by vLLM's id; `runnable` are those that may be
    stepped. Requests that may not, or are gone, are let off. Raises `EngineBroken`.
    """
    marks = settle(llm, scheduler, first_error(llm, error))
    trials = [list(marks)]
    passed = set[str]()
    while trials:
        group = trials.pop()
        while (now := _unjudged(scheduler, group, passed, runnable())) or scheduler.under_way:
            try:
                outputs = step_only(now)
            except Exception as raised:
                again = first_error(llm, raised)
                blamed = list(settle(llm, scheduler, again))
                if len(blamed) == 1:
                    llm.abort_request(blamed, internal=True)
                    yield Culprit(blamed[0], again)
                    blamed = []
                rest = [id for id in group if id not in blamed]
                middle = len(blamed) // 2
                trials += [half for half in (rest, blamed[:middle], blamed[middle:]) if half]
                break
            passed |= {id for id in now if _is_past(scheduler.requests.get(id), marks[id])}
            yield outputs
            if not scheduler.last.total_num_scheduled_tokens:
                break  # nobody else has memory now, so this does not happen; it must not hang


def first_error(llm: Any, raised: Exception) -> Exception:
    """With a step scheduled ahead, an error can wait behind one that it brought about."""
    for future, _, _ in reversed(llm.engine_core.engine_core.batch_queue or ()):
        if future.done() and isinstance(found := future.exception(), Exception):
            return found
    return raised


def settle(llm: Any, scheduler: Any, error: Exception) -> dict[str, int]:
    """Set vLLM right after a step that raised `error`.

    The requests of the failed step by vLLM's id, each with the position it would have come to.
    Raises `EngineBroken` if vLLM or its device cannot be used any more.
    """
    _refuse(llm, scheduler, error)
    _unbook(scheduler, error)
    marks = _marks(scheduler)
    empty = not any(output.num_scheduled_tokens for output in scheduler.under_way)
    if not marks and empty:
        raise EngineBroken(f"vLLM failed in a step of no request: {said(error)}") from error
    try:
        known = _settle_ranks(llm, scheduler)
        _settle_scheduler(llm, scheduler, known)
    except EngineBroken:
        raise
    except Exception as another:
        raise EngineBroken(
            f"vLLM could not be set right after a failed step ({said(error)}): {said(another)}"
        ) from another
    return marks


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def is_sticky(error: Exception) -> bool:
    """Whether only a new process helps: a device error, a rank that is gone or does not answer."""
    kinds = (torch.AcceleratorError, TimeoutError, ConnectionError, EngineDeadError)
    gone = isinstance(error, kinds)
    return gone or any(word in str(error) for word in _STICKY)


def _refuse(llm: Any, scheduler: Any, error: Exception) -> None:
    executor = llm.engine_core.engine_core.model_executor
    if is_sticky(error) or getattr(executor, "is_failed", False):
        raise EngineBroken(f"vLLM cannot go on in this process: {said(error)}") from error
    if not scheduler.phase and not scheduler.under_way:
        raise EngineBroken(f"the outputs of a step were lost: {said(error)}") from error


def _unbook(scheduler: Any, error: Exception) -> None:
    """If the step failed while its results were booked: take back what has been. Nobody has been
    told of any of it."""
    for request, sampled, hashes in scheduler.booking:
        if request.num_output_tokens == sampled and not request.is_finished():
            continue
        if request.use_structured_output:  # its grammar has moved on, or has not
            raise EngineBroken(f"vLLM failed while it booked a step: {said(error)}") from error
        del request._output_token_ids[sampled:]
        del request._all_token_ids[request.num_prompt_tokens + sampled :]
        del request.block_hashes[hashes:]
        if request.is_finished():
            request.status = RequestStatus.PREEMPTED
            request.stop_reason = None
            scheduler.running = [one for one in scheduler.running if one is not request]
            scheduler.waiting.remove_requests([request])
            scheduler.finished_req_ids.discard(request.request_id)
            scheduler.requests[request.request_id] = request  # `_take_in_lost` sees to the rest
    scheduler.booking = []


def _marks(scheduler: Any) -> dict[str, int]:
    """Who was in the steps under way, and how far each would be. `schedule` itself moves nobody
    before its end: if it raised, anyone it could choose from is suspected."""
    if scheduler.phase == "schedule" and not scheduler.under_way:
        return {
            id: request.num_computed_tokens + 1
            for id, request in scheduler.requests.items()
            if id not in scheduler.held
        }
    ids = {id for output in scheduler.under_way for id in output.num_scheduled_tokens}
    return {
        id: request.num_computed_tokens
        for id, request in scheduler.requests.items()
        if id in ids and not request.is_finished()
    }


def _unjudged(scheduler: Any, group: list[str], passed: set[str], runnable: set[str]) -> set[str]:
    return {id for id in group if id in scheduler.requests and id in runnable and id not in passed}


def _is_past(request: Any, mark: int) -> bool:
    return request is None or request.num_computed_tokens - request.num_in_flight_tokens >= mark


def _settle_ranks(llm: Any, scheduler: Any) -> set[str]:
    """The requests that the workers know."""
    held = {
        id: (request.num_tokens, request.num_output_tokens)
        for id, request in scheduler.requests.items()
    }
    answers = llm.collective_rpc("settle", timeout=ANSWER_S, args=(held,))
    for known, complaint in answers:
        if complaint is not None:
            raise EngineBroken(f"a worker could not be set right: {complaint}")
        if set(known) != set(answers[0][0]):
            raise EngineBroken("the ranks of vLLM do not know the same requests any more")
    return set(answers[0][0])


def _settle_scheduler(llm: Any, scheduler: Any, known: set[str]) -> None:
    batches = llm.engine_core.engine_core.batch_queue
    if batches:
        batches.clear()
    for request in scheduler.requests.values():
        request.num_in_flight_tokens = 0
        request.num_output_placeholders = 0
        request.num_stale_output_tokens = 0
    for output in scheduler.under_way:  # the worker may not have heard of this; twice is harmless
        scheduler.finished_req_ids |= output.finished_req_ids
        scheduler.reset_preempted_req_ids |= output.preempted_req_ids or set()
    scheduler.under_way.clear()
    _take_in_lost(scheduler)
    # All go back to waiting. The cache counts blocks as computed from when they are scheduled.
    llm.reset_prefix_cache(reset_running_requests=True)
    if any(request.has_encoder_inputs for request in scheduler.requests.values()):
        llm.reset_encoder_cache()
    for request in scheduler.waiting:
        if request.status == RequestStatus.PREEMPTED and request.request_id not in known:
            # It must be sent as a new one, not as a resumed one.
            request.status = RequestStatus.WAITING
    scheduler.phase = ""


def _take_in_lost(scheduler: Any) -> None:
    """What raised may have taken requests out of one queue and put them in none."""
    queued = {*scheduler.running, *scheduler.waiting, *scheduler.kv_holding_waiting}
    for request in scheduler.requests.values():
        if request not in queued and not request.is_finished():
            scheduler.kv_cache_manager.free(request)
            request.status = RequestStatus.PREEMPTED
            request.num_computed_tokens = 0
            scheduler.waiting.add_request(request)
