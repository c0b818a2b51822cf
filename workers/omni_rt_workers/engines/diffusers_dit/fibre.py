"""A request's run of a pipeline, parked whenever the pipeline calls a heavy module."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from greenlet import getcurrent, greenlet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Aborted(BaseException):
    """Raised inside a fibre to end it. No `Exception`, so that no pipeline can swallow it."""


@dataclass(eq=False, slots=True)
class Call:
    """One call of a module that a fibre waits for.

    `context` is the pipeline's own name for the call ("cond", "uncond"), if it gave one.
    """

    component: str
    function: Callable[..., Any]  # of the real module: the module itself, or its `decode`
    signature: Any  # inspect.Signature of `function`
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: str | None = None


class Fibre(greenlet):
    """One `pipeline(**kwargs)` on a shell of its own. It must be finished, by running or `end`.

    A greenlet that is merely dropped is never freed: its owner calls `end` in every case.
    """

    def __init__(self, pipeline: Any, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._kwargs = kwargs
        self.parked: Call | None = None
        self.calls = 0  # parked calls so far
        self.context: str | None = None
        self.result: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.result = self._pipeline(**self._kwargs)
        except Aborted:
            pass
        except Exception as error:
            self.error = error

    def start(self) -> None:
        """Run to the first parked call."""
        self._hop(self.switch)

    def resume(self, value: Any) -> None:
        """Give the parked call its result and run to the next one."""
        self._hop(lambda: self.switch(value))

    def fail(self, error: Exception) -> None:
        """Raise `error` out of the parked call, in this fibre alone."""
        self._hop(lambda: self.throw(type(error), error, error.__traceback__))

    def end(self) -> None:
        """Stop if running and drop all that is held, so that memory returns without the gc.

        A shell and its scheduler refer to themselves; clearing them breaks these cycles.
        """
        while self:  # started and not finished
            self._hop(lambda: self.throw(Aborted))
        for part in _own_parts(self._pipeline):
            vars(part).clear()
        self._pipeline = self.parked = self.result = self.error = None
        self._kwargs = {}

    def _hop(self, switch: Callable[[], Any]) -> None:
        # Fibres share the thread's grad mode with the engine: `no_grad` in one fibre restores what
        # it found, in the middle of another, so it must find the mode off and leave it off.
        torch.set_grad_enabled(False)
        self.parked = None
        self.parked = switch()
        torch.set_grad_enabled(False)


def park(call: Call) -> Any:
    """Wait, in the current fibre, for the result of `call`."""
    fibre = getcurrent()
    if not isinstance(fibre, Fibre) or fibre.parent is None:
        return call.function(*call.args, **call.kwargs)
    call.context = fibre.context
    fibre.calls += 1
    return fibre.parent.switch(call)


@contextmanager
def name_calls(name: str, **_: Any) -> Iterator[None]:
    """Stands in for a module's `cache_context`: the name goes with the calls, not to the module.

    A name on the shared module would be every fibre's name at once.
    """
    fibre = getcurrent()
    if not isinstance(fibre, Fibre):
        yield
        return
    before, fibre.context = fibre.context, name
    try:
        yield
    finally:
        fibre.context = before


def _own_parts(pipeline: Any) -> list[Any]:
    """The shell and the schedulers that it owns."""
    if pipeline is None:
        return []
    return [*vars(pipeline).get("_own_schedulers", ()), pipeline]
