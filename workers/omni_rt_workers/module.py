"""What a module stage is written against: `engine: torch` runs a class of this form.

How to write one, with an example: docs/engines.md. All calls come from one thread; `add` and `step`
run under `torch.inference_mode`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omni_rt.wire.messages import ParamSpec

if TYPE_CHECKING:
    import torch

Kind = Literal["tensor", "audio"]

Outputs = Mapping[str, "torch.Tensor"]
"""By output port. Of kind audio: float [samples] in -1..1, one channel."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a module is made from."""

    device: torch.device
    dtype: torch.dtype  # as the stage says; a module may know better
    weights: Path | None  # the stage's model folder, with its `part`
    options: Mapping[str, Any]  # the stage's `options`: check them, and refuse unknown ones
    say: Callable[[str, float], None]  # (phase, fraction) of the load; also a sign of life


@dataclass(frozen=True, slots=True)
class Window:
    """How a streamed input is cut into pieces, in rows (dimension 0 of its tensors).

    Pieces begin at rows 0, `first`, `first + chunk`, `first + 2 * chunk`, ... whatever the sizes of
    the chunks that arrive, and whenever they do. Each comes as soon as `right` rows after it are
    there, or the input's end, and with up to `left` rows before it.
    """

    first: int
    chunk: int
    left: int = 0
    right: int = 0
    whole: int | None = None  # rows of a piece of an input that is not streamed; None: all of it


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a streamed input, or all of one that is not streamed."""

    rows: torch.Tensor  # [left + new + right, ...] on the module's device; not to be written to
    left: int  # rows of context before the new ones
    right: int  # and after them: they come again, as new ones
    start: int  # number of the first new row
    last: bool  # the new rows are the input's last ones

    @property
    def new(self) -> int:
        return self.rows.shape[0] - self.left - self.right


@dataclass(eq=False, slots=True)
class Job:
    """One request inside a module, from `add` until its last step."""

    params: Mapping[str, Any]
    seed: int  # of this request: draw from a generator of your own, never from the global one
    prompt: str = ""  # of the request; in a stage that has inputs ""
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # whole ones; read-only
    piece: Piece | None = None  # of the input with a `Window`, if there is one
    state: Any = None  # the module's own, carried from step to step


class Module:
    """A stage as a class. Override `step`, and whatever else differs from what stands here."""

    inputs: Mapping[str, Window | None] = {}  # None: wanted whole. At most one has a window.
    outputs: Mapping[str, Kind] = {}
    params: Sequence[ParamSpec] = ()  # request parameters
    sample_rate: int = 0  # Hz, of outputs of kind audio

    def __init__(self, setup: Setup) -> None:
        """Load. Raise `ConfigError` for options or weights that cannot be used."""

    def add(self, job: Job) -> None:
        """A new request, its whole inputs there. Raise `BadRequest` for one that cannot be done."""

    def key(self, job: Job) -> Hashable:
        """Jobs of equal keys may be in one `step`. Here: those with inputs of the same shapes."""
        piece = job.piece and (job.piece.left, job.piece.right, *job.piece.rows.shape)
        return piece, tuple((name, tensor.shape) for name, tensor in sorted(job.inputs.items()))

    def step(self, jobs: Sequence[Job]) -> Sequence[Outputs | None]:
        """Advance these jobs. For each what it gave, or None: "call me again, I am not through".

        A job is over with its last piece, or, if it has none, with its first outputs. If this
        raises, each job is tried alone, so that only the culprit fails: change `job.state` last.
        """
        raise NotImplementedError
