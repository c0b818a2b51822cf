from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from . import tiny
from .fakes import RecordingOutbox, loaded, stage

if TYPE_CHECKING:
    from omni_rt_workers.engines.diffusers_dit.engine import DiTEngine


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def caller_with_grad() -> Iterator[None]:
    """Each test starts as a thread does that knows nothing of the engine."""
    with torch.enable_grad():
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("pipelines")
    return {name: tiny.save(make(), root / name) for name, make in tiny.FAMILIES.items()}


@pytest.fixture(scope="session")
def plain() -> dict[str, Any]:
    """The pipelines as their classes make them, to compare with."""
    pipelines = {name: make() for name, make in tiny.FAMILIES.items()}
    for pipeline in pipelines.values():
        pipeline.set_progress_bar_config(disable=True)
    return pipelines


@pytest.fixture
def out() -> RecordingOutbox:
    return RecordingOutbox()


@pytest.fixture
def engine(folders: dict[str, str], out: RecordingOutbox) -> Iterator[DiTEngine]:
    """ZImage, loaded and warmed up."""
    made = loaded(stage(folders["zimage"]), out)
    yield made
    made.close()
