"""The training loop the three phases share: seeded, resumable, with a progress bar."""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

THREADS = 1  # small layers gain little from a second core, and lose much where it is not free
_SAVE_EVERY = 200  # steps
_LAYER = re.compile(r"\.(attention|feed_forward)\.")


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to learn; `steps` is fixed, so a run can be repeated."""

    steps: int
    peak_rate: float
    warmup: int = 100
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.0
    average_decay: float = 0.0  # of the running average of the weights; 0 keeps none
    muon_rate: float = 0.0  # peak rate for the layers' matrices by Muon; 0: AdamW for them too

    def factor(self, step: int) -> float:
        """Of the peak rate: linear warm-up, then a cosine down to two hundredths."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return min(1.0, (step + 1) / self.warmup) * max(0.02, cosine)

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        by_muon = [
            weight
            for name, weight in model.named_parameters()
            if self.muon_rate and weight.ndim == 2 and _LAYER.search(name)
        ]
        taken = set(map(id, by_muon))
        others = [weight for weight in model.parameters() if id(weight) not in taken]
        adam = torch.optim.AdamW(
            others, self.peak_rate, betas=self.betas, weight_decay=self.weight_decay
        )
        if not by_muon:
            return [adam]
        muon = torch.optim.Muon(
            by_muon, self.muon_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        )
        return [adam, muon]


class Average:
    """A running average of a model's weights, which samples better than the last weights do."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.weights = {name: weight.detach().clone() for name, weight in _weights(model)}
        self._decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self._decay, step / (step + 50))  # early weights are soon forgotten
        new = [weight for _, weight in _weights(model)]
        torch._foreach_lerp_(list(self.weights.values()), new, 1 - decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        for name, weight in _weights(model):
            weight.copy_(self.weights[name])


def _weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, weight.data) for name, weight in model.named_parameters()]


def fit(
    model: nn.Module,
    loss_at: Callable[[int], Tensor],
    schedule: Schedule,
    checkpoint: Path,
    look: Callable[[int], str] | None = None,
    look_every: int = 1000,
) -> None:
    """Train `model` in place; with an average, it ends up holding the averaged weights.

    `loss_at(step)` must draw its batch from `step` alone: then a run that was interrupted goes on
    from `checkpoint` as if it had not been. `look(step)` returns a line to print; it sees the
    averaged weights.
    """
    optimizers = schedule.optimizers(model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    average = Average(model, schedule.average_decay) if schedule.average_decay else None
    start = _resume(checkpoint, model, optimizers, average)
    model.train()
    losses: list[float] = []
    quiet = not sys.stderr.isatty()
    bar = tqdm(
        range(start, schedule.steps),
        desc=checkpoint.stem,
        initial=start,
        total=schedule.steps,
        mininterval=20 if quiet else 0.5,
        dynamic_ncols=not quiet,
    )
    for step in bar:
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * schedule.factor(step)
        loss = loss_at(step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if average:
            average.update(model, step)
        losses.append(loss.item())
        done = step + 1
        if done % 50 == 0:
            bar.set_postfix(loss=f"{sum(losses[-50:]) / len(losses[-50:]):.4f}", refresh=False)
        if done % _SAVE_EVERY == 0:
            _save(checkpoint, done, model, optimizers, average)
        if look and done % look_every == 0 and done < schedule.steps:
            bar.write(_looked(look, done, model, average), file=sys.stderr)
    _save(checkpoint, schedule.steps, model, optimizers, average)
    if average:
        average.copy_to(model)
    model.eval()


def _looked(
    look: Callable[[int], str], step: int, model: nn.Module, average: Average | None
) -> str:
    model.eval()
    live = {name: weight.clone() for name, weight in _weights(model)}
    if average:
        average.copy_to(model)
    line = look(step)
    with torch.no_grad():
        for name, weight in _weights(model):
            weight.copy_(live[name])
    model.train()
    return f"step {step}: {line}"


def _save(
    path: Path,
    step: int,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    average: Average | None,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(
        {
            "step": step,
            "model": dict(_weights(model)),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "average": average.weights if average else {},
        },
        partial,
    )
    partial.replace(path)  # an interruption leaves the old file whole


def _resume(
    path: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    average: Average | None,
) -> int:
    """Load what an interrupted run left, if anything; the number of steps already done."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    with torch.no_grad():
        for name, weight in _weights(model):
            weight.copy_(state["model"][name])
    for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(kept)
    if average:
        average.weights = state["average"]
    return int(state["step"])
