"""What an import costs: the main process holds no model library, a plain worker no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MODEL_LIBRARIES = {"torch", "vllm", "diffusers", "transformers", "numpy"}
WEB_FRAMEWORK = {"litestar", "starlette", "uvicorn", "fastapi"}


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that are loaded after `statement` ran in a fresh interpreter."""
    program = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "workers")])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("import omni_rt", id="package"),
        pytest.param("import omni_rt; omni_rt.OmniLLM", id="vLLM-omni names"),
        pytest.param("import omni_rt.wire.messages, omni_rt.wire.channel", id="wire"),
    ],
)
def test_the_package_loads_no_model_library_and_no_web_framework(statement: str) -> None:
    assert loaded_by(statement) & (MODEL_LIBRARIES | WEB_FRAMEWORK) == set()


def test_a_worker_with_the_echo_engine_loads_no_torch() -> None:
    loaded = loaded_by("import omni_rt_workers.__main__, omni_rt_workers.engines.echo")
    assert loaded & (MODEL_LIBRARIES | WEB_FRAMEWORK) == set()


@pytest.mark.model
@pytest.mark.parametrize("library", ["vllm", "diffusers"])
def test_model_libraries_import_in_the_locked_environment(library: str) -> None:
    assert library in loaded_by(f"import {library}")


def test_vllm_omnis_names_are_loaded_on_their_first_use_only() -> None:
    program = "import omni_rt, sys\nassert not any('compat' in name for name in sys.modules)"
    assert "omni_rt" in loaded_by(program)
