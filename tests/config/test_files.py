"""Shipped files are right; presets lie under files; models are found; values are as written."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_rt.config import load_pipeline, parse_bytes, parse_pipeline
from omni_rt.graph import Graph
from tests.config.files import ECHO, EXAMPLES, SHIPPED


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_files_are_right(file: Path) -> None:
    config = load_pipeline(file)
    assert Graph.from_config(config).plan(()).stages, "every output has its stages"


def test_examples_show_what_they_are_for() -> None:
    chain, fast, speech = (load_pipeline(file) for file in EXAMPLES)
    assert len([edge for edge in chain.edges if edge.source == "first.out"]) == 2
    assert fast.stages["painter"].engine == "diffusers"
    assert {edge.stream.first for edge in speech.edges if edge.stream} == {1, 4}
    assert {edge.when for edge in speech.edges} == {None, "picture"}


def test_a_file_overrides_a_preset_at_every_depth_of_a_stage() -> None:
    config = parse_pipeline(
        """
preset: simulated-omni
stages:
  writer: {queue: 3, simulated: {steps: 7, ports: {text: {every: 2}}}}
""",
        "mine.yaml",
    )
    writer = config.stages["writer"]
    assert list(config.stages) == ["writer", "painter", "vocoder"]
    assert writer.queue == 3
    ports = {"text": {"every": 2}, "hidden": {"bytes": 1048576}}
    assert writer.simulated == {"step_s": 0.02, "steps": 7, "ports": ports}
    assert len(config.edges) == 2
    assert config.name == "mine"


def test_a_stage_with_another_engine_is_another_stage() -> None:
    config = parse_pipeline(
        "preset: simulated-omni\nstages: {vocoder: {engine: 'my.speech:make'}}", "mine.yaml"
    )
    assert config.stages["vocoder"].simulated == {}
    assert config.stages["writer"].simulated["steps"] == 20


def test_edges_and_outputs_replace_the_presets() -> None:
    text = "preset: simulated-omni\nedges: []\noutputs: {text: writer.text}"
    config = parse_pipeline(text, "mine.yaml")
    assert config.edges == ()
    assert config.outputs == {"text": "writer.text"}


def test_the_file_names_the_pipeline_unless_it_says_otherwise() -> None:
    assert parse_pipeline(ECHO, "some/where/mine.yaml").name == "mine"
    assert parse_pipeline(f"name: other\n{ECHO}", "mine.yaml").name == "other"


@pytest.mark.parametrize("written", ["lm", "./lm", "../{base}/lm", "{absolute}/lm"])
def test_model_folders_are_relative_to_the_file(tmp_path: Path, written: str) -> None:
    (tmp_path / "lm").mkdir()
    model = written.format(base=tmp_path.name, absolute=tmp_path)
    file = tmp_path / "mine.yaml"
    file.write_text(f"model: {model}\n{ECHO.replace('}', f', model: {model}}}', 1)}")
    config = load_pipeline(file)
    assert config.model == str(tmp_path / "lm")
    assert config.stages["echo"].model == str(tmp_path / "lm")


def test_a_model_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "lm").mkdir(parents=True)
    file = tmp_path / "mine.yaml"
    file.write_text(f"model: ~/lm\n{ECHO}")
    assert load_pipeline(file).model == str(tmp_path / "home" / "lm")


def test_any_other_model_is_a_hub_id(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"model: some/model\n{ECHO}")
    assert load_pipeline(file).model == "some/model"


def test_a_number_with_an_exponent_is_a_number() -> None:
    text = ECHO.replace("echo}", "echo, sampling: {temperature: 1e-3, note: '1e-3'}}")
    sampling = parse_pipeline(text, "mine.yaml").stages["echo"].sampling
    assert sampling == {"temperature": 0.001, "note": "1e-3"}


@pytest.mark.parametrize(
    ("one", "other"),
    [("cuda:0", "auto"), ("cuda:0", "cuda:1"), ("cpu", "auto"), ("cpu", "cpu")],
)
def test_stages_on_devices_of_one_kind_may_share_a_process(one: str, other: str) -> None:
    text = (
        f"stages:\n  a: {{engine: echo, worker: w, device: '{one}'}}\n"
        f"  b: {{engine: echo, worker: w, device: '{other}'}}\noutputs: {{text: a.text}}"
    )
    stages = parse_pipeline(text, "mine.yaml").stages
    assert (stages["a"].device, stages["b"].device) == (one, other)


@pytest.mark.parametrize("written", ["a/" * 2000 + "lm", "x" * 300])
def test_a_name_too_long_for_a_folder_is_no_folder(tmp_path: Path, written: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"model: {written}\n{ECHO}")
    assert load_pipeline(file).model == written


def test_an_anchor_is_written_once_and_used_twice() -> None:
    text = "stages: {a: &a {engine: echo, queue: 3}, b: *a}\noutputs: {text: a.text}"
    stages = parse_pipeline(text, "mine.yaml").stages
    assert stages["a"] == stages["b"]
    assert stages["b"].queue == 3


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [("1KiB", 1024), ("256MiB", 256 << 20), ("1.5 GiB", 3 << 29), ("2TiB", 2 << 40)],
)
def test_sizes_are_powers_of_two(size: str, size_bytes: int) -> None:
    assert parse_bytes(size) == size_bytes
