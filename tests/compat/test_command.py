"""`vllm serve MODEL --omni` chooses stages by the folder; without `--omni` vLLM's own runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_rt.compat import command, folder
from omni_rt.compat.folder import pipeline_of, preset_of
from omni_rt.config import bundled, presets
from omni_rt.errors import ConfigError
from omni_rt_workers.engines.vllm_ar import plugin

SHAPES = bundled().parent / "shapes"
VLLM = Path(sys.executable).with_name("vllm")


def test_a_diffusers_folder_becomes_a_stage_that_paints() -> None:
    config = pipeline_of(str(SHAPES / "painter"))
    assert {name: stage.engine for name, stage in config.stages.items()} == {"painter": "diffusers"}
    assert (config.name, config.model) == ("painter", str(SHAPES / "painter"))
    assert config.outputs == {"image": "painter.image"}


def test_a_language_models_folder_becomes_a_stage_that_writes() -> None:
    config = pipeline_of(str(SHAPES / "writer"))
    assert {name: stage.engine for name, stage in config.stages.items()} == {"writer": "vllm"}
    assert config.outputs == {"text": "writer.text"}


def test_a_pipeline_file_in_or_beside_the_folder_or_named_wins(tmp_path: Path) -> None:
    assert pipeline_of(str(SHAPES)).outputs.keys() == {"text", "image"}
    (tmp_path / "model_index.json").write_text('{"_class_name": "X"}')
    file = tmp_path / "pipeline.yaml"
    file.write_text("stages: {a: {engine: echo}}\noutputs: {text: a.text}\n")
    assert pipeline_of(str(tmp_path)).stages.keys() == {"a"}
    assert pipeline_of(str(file)).stages.keys() == {"a"}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "holds no model"),
        ({"config.json": "{}"}, "no model class"),
        ({"config.json": "{"}, "cannot read"),
        ({"model_index.json": "[]"}, "no JSON object"),
        ({"model_index.json": "{}"}, "no pipeline"),
    ],
)
def test_another_folder_is_refused(tmp_path: Path, files: dict[str, str], says: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        pipeline_of(str(tmp_path))


@pytest.mark.parametrize("model", ["./nothing", "nobody/nothing", "nothing"])
def test_a_model_that_is_not_there_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        pipeline_of(model)


def test_a_preset_fits_by_letters_and_digits() -> None:
    names = ["echo", "qwen2.5-omni", "qwen2.5"]
    assert preset_of("qwen2_5_omni", names) == "qwen2.5-omni"
    assert preset_of("Qwen/Qwen2.5-Omni-7B", names) == "qwen2.5-omni"
    assert preset_of("llama", names) is None


def test_a_model_of_a_presets_family_is_served_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = tmp_path / "qwen2.5-omni.yaml"
    preset.write_text("stages: {talker: {engine: vllm}}\noutputs: {text: talker.text}\n")
    both = {**presets(), preset.stem: preset}
    monkeypatch.setattr(folder, "presets", lambda: both)
    monkeypatch.setattr("omni_rt.config.load.presets", lambda: both)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2_5_omni"}')
    local, hub = pipeline_of(str(model)), pipeline_of("Qwen/Qwen2.5-Omni-7B")
    assert (list(local.stages), local.model, local.name) == (["talker"], str(model), "model")
    assert (list(hub.stages), hub.model) == (["talker"], "Qwen/Qwen2.5-Omni-7B")


def test_a_model_that_is_called_like_an_engine_without_one_is_not_that() -> None:
    with pytest.raises(ConfigError, match="no preset"):
        pipeline_of("nobody/echo")


def test_omni_is_taken_out_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def run(self: command.OmniServeCommand, args: list[str]) -> int:
        seen.append(args)
        return 3

    monkeypatch.setattr(command.OmniServeCommand, "run", run)
    for argv in (["serve", "x", "--omni", "--port", "1"], ["--omni", "serve", "x", "--port", "1"]):
        monkeypatch.setattr(sys, "argv", ["vllm", *argv])
        assert command.main() == 3
    assert seen == [["serve", "x", "--port", "1"]] * 2


def test_without_omni_vllms_own_main_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__spec__=object()))
    called: list[list[str]] = []
    theirs = SimpleNamespace(main=lambda: called.append(sys.argv))
    monkeypatch.setitem(sys.modules, "vllm.entrypoints", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.main", theirs)
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "x"])
    assert command.main() == 0
    assert called == [["vllm", "serve", "x"]]


def test_errors_are_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "./nothing", "--omni"])
    assert command.main() == 2
    assert capsys.readouterr().err == "vllm --omni: there is no folder ./nothing\n"


@pytest.mark.parametrize("wrong", [["serve", "x", "--foo"], ["bench", "x"], ["serve"]])
def test_wrong_options_are_status_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.OmniServeCommand().run(wrong)
    assert "usage: vllm serve MODEL --omni" in capsys.readouterr().err


def test_the_script_serves_with_omni(tmp_path: Path) -> None:
    file = tmp_path / "said.yaml"
    file.write_text("stages: {a: {engine: echo, arena: 4MiB}}\noutputs: {text: a.text}\n")
    options = ["--omni", "--port", "0", "--served-model-name", "parrot"]
    with subprocess.Popen(
        [VLLM, "serve", str(file), *options], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            lines = (re.search(r"serves parrot on (http://\S+);", line) for line in process.stderr)
            url = next(found[1] for found in lines if found)
            with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
                assert json.load(answer)["data"][0]["id"] == "parrot"
        finally:
            process.terminate()


@pytest.mark.model
def test_the_scripts_version_is_vllms() -> None:
    done = subprocess.run([VLLM, "--version"], capture_output=True, text=True, timeout=100)
    program = "import vllm; print(vllm.__version__)"
    theirs = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, theirs.stdout), done.stderr


def test_vllm_finds_the_plugin_and_models_are_registered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="omni_rt")
    assert found.load() is plugin.register
    plugin.register()  # nothing to register: vLLM is not even loaded
    registered: dict[str, str] = {"Known": "vllm:Known"}
    registry = SimpleNamespace(
        get_supported_archs=registered.keys, register_model=registered.__setitem__
    )
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    plugin.register({"Known": "ours:Known", "New": "ours:New"})
    plugin.register({"New": "other:New"})
    assert registered == {"Known": "vllm:Known", "New": "ours:New"}
