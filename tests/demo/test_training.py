"""The training loop, on a model of a few numbers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import training
from training import Schedule, fit

SCHEDULE = Schedule(steps=12, peak_rate=0.05, warmup=3, average_decay=0.9, muon_rate=0.05)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.ModuleDict({"attention": nn.Linear(4, 4)})])
        self.last = nn.Linear(4, 1)

    def loss_at(self, step: int) -> Tensor:
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        inner: Tensor = self.layers[0]["attention"](batch)  # type: ignore[index]
        loss: Tensor = (self.last(inner.tanh()) - batch.sum(1, keepdim=True)).square().mean()
        return loss


def weights(model: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in model.parameters()]


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_SAVE_EVERY", 5)
    whole = Toy()
    fit(whole, whole.loss_at, SCHEDULE, tmp_path / "whole.pt")

    broken = Toy()

    def until_step_8(step: int) -> Tensor:
        if step == 8:
            raise KeyboardInterrupt
        return broken.loss_at(step)

    with pytest.raises(KeyboardInterrupt):
        fit(broken, until_step_8, SCHEDULE, tmp_path / "broken.pt")
    resumed = Toy()
    steps: list[int] = []

    def counted(step: int) -> Tensor:
        steps.append(step)
        return resumed.loss_at(step)

    fit(resumed, counted, SCHEDULE, tmp_path / "broken.pt")
    assert steps == list(range(5, 12))
    assert all(map(torch.equal, weights(resumed), weights(whole)))


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    first, again = Toy(), Toy()
    fit(first, first.loss_at, SCHEDULE, tmp_path / "toy.pt")

    def fail(step: int) -> Tensor:
        raise AssertionError(step)

    fit(again, fail, SCHEDULE, tmp_path / "toy.pt")
    assert all(map(torch.equal, weights(first), weights(again)))


def test_a_look_sees_the_average_and_leaves_the_weights_alone(tmp_path: Path) -> None:
    plainly, watched = Toy(), Toy()
    fit(plainly, plainly.loss_at, SCHEDULE, tmp_path / "plainly.pt")
    looks: list[int] = []

    def look(step: int) -> str:
        looks.append(step)
        assert not watched.training
        return "seen"

    fit(watched, watched.loss_at, SCHEDULE, tmp_path / "watched.pt", look, look_every=4)
    assert looks == [4, 8]
    assert all(map(torch.equal, weights(plainly), weights(watched)))
