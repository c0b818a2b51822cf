"""The step protocol: what an engine is, what it is handed, and how it gives its output away.

An engine is a stepper. The worker's loop calls `add`, `feed` and `abort` between steps and `step`
as long as the engine is not idle. One step is one token of every running request for a language
model, one denoise step for a diffusion model, one chunk for a vocoder. All calls come from one
thread. Output leaves through the `Outbox`, at any time inside `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from omni_rt.errors import OmniError
from omni_rt.wire.messages import Emit, Ports, StageSpec, TextPiece

if TYPE_CHECKING:
    import torch

Say = Callable[[str, float], None]
"""Called while loading with (phase, fraction of the load); also counts as a sign of life."""


class EngineBroken(OmniError):
    """Raised by an engine that cannot go on in this process, from any of its methods: the worker
    ends, and main starts another and has it do again what can be done again."""


@dataclass(eq=False, slots=True)
class Task:
    """One request inside one stage, from `add` until it is finished, failed or aborted.

    `inputs` hands out views of memory that another process wrote: read-only by contract and valid
    until `release`d or until the task ends. Copy what must live longer.
    """

    request: str
    attempt: int
    values: dict[str, Any]  # "prompt", "messages", "seed"
    inputs: Inputs
    params: dict[str, Any]  # request parameters over the stage's `sampling` defaults
    emit: dict[str, Emit]  # wanted output ports; produce nothing for a port that is not in it
    priority: int
    held: bool = False  # set by the outbox: its output finds no room, do not step this task now
    state: Any = None  # the engine's own
    deadline: float | None = None  # on `time.monotonic`; main ends the request then


class Inputs(Protocol):
    """The tensors a task was handed, by input port."""

    def tensors(self, port: str) -> list[torch.Tensor]:
        """All chunks that have arrived on `port`, in order, as zero-copy views: of ordinary memory
        or, if one of them is there, all on the device."""
        ...

    def views(self, port: str) -> list[memoryview]:
        """The same as raw bytes, for engines without torch."""
        ...

    def texts(self, port: str) -> list[str]:
        """The pieces of text that have arrived on `port`, in order."""
        ...

    def ports(self) -> list[str]:
        """The input ports that carry something in this request, streamed ones included."""
        ...

    def count(self, port: str) -> int:
        """Chunks that have arrived on `port` so far, released ones included."""
        ...

    def ended(self, port: str) -> bool:
        """Whether the port's last chunk has arrived. True for inputs that were whole at `add`."""
        ...

    def release(self, port: str, count: int) -> None:
        """Give the first `count` chunks of `port` back before the task ends.

        An engine must do so with the streamed chunks it has consumed: its producer is held when
        too many of them are out. Released chunks are not in `tensors` and `views` any more.
        """
        ...


class Outbox(Protocol):
    """Where an engine puts what it produced. Nothing here blocks.

    When there is no room left for the task's output (its port's byte credits or the arena are used
    up), what was put waits in order in the worker's own memory and `task.held` is set until there
    is room again; an engine must not step a held task, so at most one step's output waits.
    """

    def text(self, task: Task, text: str, tokens: tuple[int, ...] = ()) -> None:
        """The next piece of the port `text`. Ignored if nobody wants it."""
        ...

    def piece(self, task: Task, piece: TextPiece) -> None:
        """The same with what goes with the text: log-probabilities, calls of tools, ..."""
        ...

    def put(self, task: Task, port: str, tensor: torch.Tensor, *, last: bool = False) -> None:
        """Copy a tensor of any device out. One copy."""
        ...

    def reserve(self, task: Task, port: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """A tensor to write into, in place in the arena if there is room. Then `publish` it."""
        ...

    def publish(
        self, task: Task, port: str, *, last: bool = False, meta: dict[str, Any] | None = None
    ) -> None:
        """Send what was written into the tensor reserved last for this task and port. No copy."""
        ...

    def put_bytes(
        self,
        task: Task,
        port: str,
        data: bytes | bytearray | memoryview,
        *,
        last: bool = False,
        meta: dict[str, Any] | None = None,
    ) -> None:
        """Encoded media or raw bytes, as a uint8 tensor."""
        ...

    def progress(self, task: Task, step: int, total: int) -> None: ...

    def finish(
        self,
        task: Task,
        reason: str = "stop",
        usage: dict[str, int] | None = None,
        facts: tuple[str, ...] = (),
    ) -> None:
        """The task is done; it may not be touched afterwards."""
        ...

    def fail(self, task: Task, error: BaseException) -> None:
        """Give one task up. An `OmniError` keeps its kind; anything else is `StageFailed`."""
        ...


class Engine(Protocol):
    """A stage's model. Its maker (`MakeEngine`) must not import or load anything heavy."""

    def load(self, say: Say) -> Ports:
        """Import libraries, load weights, warm up. Called once, before anything else."""
        ...

    def add(self, task: Task) -> None:
        """Take a request in. An exception fails this request alone (`BadRequest` becomes 400)."""
        ...

    def feed(self, task: Task, port: str) -> None:
        """More of a streamed input has arrived, or it has ended: see `task.inputs`."""
        ...

    def abort(self, task: Task) -> None:
        """Drop the task; it may not be touched afterwards. Its inputs are released by the loop."""
        ...

    def step(self) -> None:
        """Advance the requests that can be advanced by one step.

        An exception that escapes fails every task the engine holds and the loop then calls
        `abort` for each; the engine must be usable afterwards or raise `EngineBroken`.
        """
        ...

    @property
    def idle(self) -> bool:
        """Whether a call of `step` would do nothing: the loop then sleeps until a message."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes by purpose, e.g. {"weights": ..., "kv_cache": ...}."""
        ...

    def close(self) -> None:
        """Free the device. Called once, at the end."""
        ...


MakeEngine = Callable[[StageSpec, Outbox], Engine]
