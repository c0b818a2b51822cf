"""Flow matching in windows: from noise to mel frames, by transformers' DiT of Qwen2.5-Omni.

The ODE is solved by the 3/8 rule, as transformers does. A DiT that looks `back` blocks back and
`ahead` blocks ahead in one evaluation reaches that many blocks further with each of the
evaluations of a solve, so a window does not contain all that its frames depend on. What lies
before it need not be in it: of the `back` blocks before the new ones we know at which values the
DiT was evaluated when they were made (their course), and put these in at each evaluation. So
nothing is lost on the left. On the right the window ends some blocks after the new ones; these
blocks are solved again later, when there is more after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

_EVALUATIONS = 4  # of a step


@dataclass(eq=False, slots=True)
class Voice:
    """What a speaker sounds like, on the model's device."""

    cond: torch.Tensor  # [enc_emb_dim]
    ref_mel: torch.Tensor  # [reference frames, mel_dim]


@dataclass(eq=False, slots=True)
class Solve:
    """One window of one request on its way from noise to mel frames."""

    codes: torch.Tensor  # int64 [frames / repeats]
    voice: Voice
    mel: torch.Tensor  # [frames, mel_dim]: noise at first
    known: torch.Tensor  # [evaluations, left, mel_dim]: course of the first `left` frames
    keep: slice  # frames whose course the next window will want
    steps: int = 0  # done
    course: list[torch.Tensor] = field(default_factory=list)  # of `keep`, an evaluation each


class Solver:
    """Solves windows of the same length together, whatever step each of them is at."""

    def __init__(self, dit: nn.Module, points: int, guidance: float, sway: float) -> None:
        self._dit = dit
        self._guidance = guidance
        device = next(dit.parameters()).device
        times = torch.linspace(0, 1, points, device=device)
        self._times = times + sway * (torch.cos(torch.pi / 2 * times) - 1 + times)

    @property
    def evaluations(self) -> int:
        return (len(self._times) - 1) * _EVALUATIONS

    def over(self, solve: Solve) -> bool:
        return solve.steps == len(self._times) - 1

    def advance(self, solves: Sequence[Solve]) -> None:
        """One step of the ODE for all of them; none is changed if it fails."""
        at = [solve.steps for solve in solves]
        begin, end = self._times[at], self._times[[step + 1 for step in at]]
        seen: list[torch.Tensor] = []
        evaluate = self._evaluate(solves, seen)
        mel = torch.stack([solve.mel for solve in solves])
        mel = mel + three_eighths(evaluate, begin, end, mel)
        for k, solve in enumerate(solves):
            solve.course += [values[k, solve.keep].clone() for values in seen]
            solve.mel = mel[k]
            solve.steps += 1

    def _evaluate(self, solves: Sequence[Solve], seen: list[torch.Tensor]) -> Velocity:
        speakers = torch.stack([s.voice.cond.expand(len(s.mel), -1) for s in solves])
        references = torch.stack([solve.voice.ref_mel for solve in solves])
        codes = torch.stack([solve.codes for solve in solves])
        guided = self._guidance > 0

        def velocity(time: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            values = values.clone()
            for k, solve in enumerate(solves):
                known = solve.known
                if known.shape[1]:
                    values[k, : known.shape[1]] = known[_EVALUATIONS * solve.steps + len(seen)]
            seen.append(values)
            out: torch.Tensor = self._dit(
                hidden_states=values,
                condition_vector=references,
                speaker_embedding=speakers,
                quantized_code=codes,
                time_step=time,
                apply_cfg=guided,
            )
            if not guided:
                return out
            told, untold = out.chunk(2)
            return told + (told - untold) * self._guidance

        return velocity


Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(times [batch], values [batch, ...]) -> their derivative."""


def three_eighths(
    f: Velocity, begin: torch.Tensor, end: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """What Kutta's 3/8 rule adds to y [batch, ...] from time `begin` to `end`, both [batch]."""
    step = end - begin
    h = step.view(-1, *[1] * (y.ndim - 1))
    k1 = f(begin, y)
    k2 = f(begin + step / 3, y + h * k1 / 3)
    k3 = f(begin + step * 2 / 3, y + h * (k2 - k1 / 3))
    k4 = f(end, y + h * (k1 - k2 + k3))
    return (k1 + 3 * (k2 + k3) + k4) * h / 8
