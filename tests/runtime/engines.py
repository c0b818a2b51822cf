"""Engines for tests that run real processes: both cannot be made."""

from __future__ import annotations

from typing import NoReturn

from omni_rt.errors import ConfigError
from omni_rt.wire.messages import StageSpec
from omni_rt_workers.engine import Outbox


def refuse(spec: StageSpec, out: Outbox) -> NoReturn:
    raise ConfigError("it cannot be made as it is described")


def stumble(spec: StageSpec, out: Outbox) -> NoReturn:
    raise RuntimeError("it cannot be made, and nobody thought of why")
