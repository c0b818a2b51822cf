"""What is refused before anything loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_rt.errors import ConfigError
from omni_rt_workers.engines import vllm_ar
from omni_rt_workers.engines.vllm_ar import guard

from . import tiny
from .fakes import RecordingOutbox, load, stage


def refusal(model: Path | None, **spec: Any) -> str:
    engine = vllm_ar.make(stage(model, **spec), RecordingOutbox())
    with pytest.raises(ConfigError) as caught:
        load(engine, [])
    engine.close()
    return str(caught.value)


def test_making_an_engine_imports_nothing_heavy() -> None:
    code = (
        "import sys; from omni_rt_workers.engines import vllm_ar; "
        "from omni_rt_workers.engines.vllm_ar import arguments, engine, guard; "
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ".:workers"})


def test_an_unknown_option_is_named_with_the_nearest(folder: Path) -> None:
    assert "did you mean 'threads'?" in refusal(folder, thread=1)
    assert "did you mean 'layer'?" in refusal(folder, hidden={"layers": 1})
    assert "rows one of: reply, prompt, all" in refusal(folder, hidden={"rows": "some"})
    assert "has no model" in refusal(None)
    assert "there is no folder /nowhere" in refusal(Path("/nowhere"))


def test_an_untested_version_is_refused_with_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(guard.TESTED, "vllm", ((0, 1), (0, 2)))
    with pytest.raises(ConfigError, match=r"vllm 0\.\S+ is untested .*0\.1.*run: pip install"):
        guard.check_versions("writer")


def test_a_missing_package_is_refused_with_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "_version", lambda package: None)
    with pytest.raises(ConfigError, match=r"needs vllm.*run: pip install 'vllm"):
        guard.check_versions("writer")


@pytest.mark.model
def test_all_seams_are_there() -> None:
    guard.check_seams("writer")


@pytest.mark.model
def test_a_seam_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
    monkeypatch.setitem(guard.CALLS, path, ("moon",))
    monkeypatch.setitem(guard.FIELDS, "vllm.sampling_params:Gone", ("a",))
    with pytest.raises(ConfigError, match=r"schedule has no moon; .*Gone is gone.*run: pip"):
        guard.check_seams("writer")


@pytest.mark.model
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"vllm": {"max_model_length": 8}}, "did you mean 'max_model_len'?"),
        ({"vllm": {"max_num_batched_tokens": 0}}, "max_num_batched_tokens Input should be great"),
        ({"memory_bytes": 1 << 14}, "not enough GPU memory available"),
        ({"sampling": {"temprature": 0}}, "did you mean 'temperature'?"),
        ({"hidden": {"layer": 9}}, "hidden.layer is 9, and the model has 3 layers"),
        ({"facts": {"image": "<|picture|>"}}, "no token '<|picture|>'"),
    ],
)
def test_a_wrong_setting_is_refused(folder: Path, spec: dict[str, Any], says: str) -> None:
    assert says in refusal(folder, **spec)


@pytest.mark.model
def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert "vLLM cannot serve" in refusal(tmp_path)


@pytest.mark.model
def test_a_model_without_a_chat_template_completes_the_prompt(tmp_path: Path) -> None:
    from omni_rt.errors import BadRequest

    from .fakes import loaded, task

    with loaded(tiny.save_model(tmp_path, chat=False)) as one:
        whole, ids = one.run(
            task("once upon", max_tokens=4, ignore_eos=True),
            task(one.engine.core.tokenizer.encode("once upon"), max_tokens=4, ignore_eos=True),
        )
        assert whole.tokens == ids.tokens
        message = {"role": "user", "content": "hello"}
        with pytest.raises(BadRequest, match="no chat template"):
            one.engine.add(task({"messages": [message]}))
