"""Each family of pipelines: alone and in a crowd, each gives what the pipeline alone gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import ImageChops

from tests.tiny_models.diffusion.families import FAMILIES, Family

from .fakes import RecordingOutbox, difference, loaded, stage, task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_rt_workers.engine import Task
    from omni_rt_workers.engines.diffusers_dit.engine import DiTEngine

# Schedulers of diffusers hand tensors to numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

# What is most unlike each other is tried each time, the rest with --long.
_ALWAYS = (
    "zimage sd3 flux qwen_image pixart_sigma sana stable_diffusion stable_diffusion_inpaint "
    "instruct_pix2pix sdxl wan"
).split()


@dataclass(frozen=True)
class Ask:
    """One request of a family: the plain call and the task are made of the same values."""

    family: Family
    seed: int
    steps: int = 4
    size: int = 0  # one of the family's sizes
    scale: int = 0  # one of the family's scales

    @property
    def name(self) -> str:
        return f"r{self.seed}"

    def task(self, want: str = "latents") -> Task:
        return task(self.name, self._inputs(), self._params(), seed=self.seed, want=(want,))

    def plain(self, pipeline: Any, **more: Any) -> Any:
        generator = torch.Generator("cpu").manual_seed(self.seed)
        arguments = {**self.family.arguments(self._inputs()), **self._params()}
        arguments |= self.family.plainly
        return pipeline(**arguments, **more, generator=generator, return_dict=False)[0]

    def _inputs(self) -> dict[str, torch.Tensor]:
        return self.family.inputs(self.seed, self.family.sizes[self.size])

    def _params(self) -> dict[str, Any]:
        family = self.family
        return family.asked(self.steps, family.sizes[self.size], family.scales[self.scale])


@dataclass
class Tried:
    """A family's pipeline: its folder, and itself to compare with."""

    family: Family
    folder: str
    pipeline: Any

    def alone(self, ask: Ask) -> torch.Tensor:
        latents: torch.Tensor = ask.plain(self.pipeline, output_type="latent")
        return latents


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in _ALWAYS else [pytest.mark.long]) for name in FAMILIES
    ],
)
def tried(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tried:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    pipeline = family.make()
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder)
    return Tried(family, str(folder), pipeline)


@pytest.fixture
def engine(tried: Tried, out: RecordingOutbox) -> Iterator[DiTEngine]:
    made = loaded(stage(tried.folder), out)
    yield made
    made.close()


def settle(engine: DiTEngine, out: RecordingOutbox, crowd: dict[int, list[Task]]) -> None:
    """Step until all of `crowd`, by the number of the step before which they come, have ended."""
    waiting = dict(crowd)
    for number in range(10_000):
        for one in waiting.pop(number, []):
            engine.add(one)
        if engine.idle and not waiting:
            return
        engine.step()
    raise AssertionError("it does not end")


def test_alone_is_the_plain_pipeline_bit_for_bit(
    tried: Tried, engine: DiTEngine, out: RecordingOutbox
) -> None:
    joined = engine.counts.joined  # while it warmed up
    for scale in range(2):
        ask = Ask(tried.family, seed=scale, scale=scale)
        settle(engine, out, {0: [ask.task()]})
        assert out.said[ask.name].error is None
        assert torch.equal(out.said[ask.name].tensors["latents"], tried.alone(ask))
    if "num_frames" not in tried.family.params:
        ask = Ask(tried.family, seed=2, scale=1)
        settle(engine, out, {0: [ask.task("image")]})
        picture = ask.plain(tried.pipeline, output_type="pil")[0]
        made = out.said[ask.name].images[0]
        assert ImageChops.difference(made, picture.convert(made.mode)).getbbox() is None
    assert engine.counts.joined == joined


def test_one_at_a_time_is_the_plain_pipeline_bit_for_bit(
    tried: Tried, out: RecordingOutbox
) -> None:
    engine = loaded(stage(tried.folder, max_batch=1), out)
    asks = [Ask(tried.family, seed=n, steps=3 + n, scale=n % 2) for n in range(3)]
    settle(engine, out, {0: [asks[0].task(), asks[1].task()], 2: [asks[2].task()]})
    assert engine.counts.joined == 0
    for ask in asks:
        assert torch.equal(out.said[ask.name].tensors["latents"], tried.alone(ask))
    engine.close()


def test_in_a_mixed_crowd_each_gets_what_it_gets_alone(
    tried: Tried, engine: DiTEngine, out: RecordingOutbox
) -> None:
    """Eight with other prompts, seeds, steps, guidance and sizes come and go, and a ninth that is
    given up midway."""
    steps, sizes = (4, 6, 3, 5, 4, 3, 5, 4), (0, 0, 0, 1, 0, 1, 0, 0)
    asks = [Ask(tried.family, n, steps[n], sizes[n], scale=n % 2) for n in range(8)]
    leaver = Ask(tried.family, seed=8, steps=20).task()
    come = [one.task() for one in asks]
    joined = engine.counts.joined
    crowd = {0: [*come[:4], leaver], 2: come[4:6], 4: come[6:]}
    for number in range(5):
        for one in crowd.pop(number, []):
            engine.add(one)
        engine.step()
    engine.abort(leaver)
    settle(engine, out, {})
    expected = [tried.alone(ask) for ask in asks]
    got = [out.said[ask.name].tensors["latents"] for ask in asks]
    assert max(map(difference, got, expected)) <= 1e-5
    # Nothing of this is a comparison of equal things: somebody else's result is far off.
    same_size = [n for n, size in enumerate(sizes) if size == 0]
    for mine, others in zip(same_size, same_size[1:], strict=False):
        assert difference(got[mine], expected[others]) > 0.1
    if tried.family.apart:
        assert engine.counts.joined == joined
    else:
        assert engine.counts.widest >= 3
        assert engine.counts.joined >= joined + 5
    assert not out.said[leaver.request].ended
