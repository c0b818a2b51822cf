"""What is shown of a pipeline is that pipeline; the schema takes what the program takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from omni_rt.config import PipelineConfig, effective, load_pipeline, parse_pipeline, schema
from omni_rt.config.source import Dumper
from tests.config.files import ECHO, SHIPPED


def without_preset(config: PipelineConfig) -> PipelineConfig:
    """The effective form has the preset's values instead."""
    return msgspec.structs.replace(config, preset=None)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_effective_form_is_the_same_pipeline(file: Path) -> None:
    again = parse_pipeline(effective(file), "effective.yaml")
    assert again == without_preset(load_pipeline(file))


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES = st.recursive(
    SCALARS | TEXT | st.sampled_from(["1e-3", "no", "~", "# x", "a: b", "- a", "|", " "]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_effective_form_keeps_any_value(
    tmp_path_factory: pytest.TempPathFactory, sampling: dict[str, Any]
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    stages = {"echo": {"engine": "echo", "sampling": sampling}}
    text = yaml.dump({"stages": stages, "outputs": {"text": "echo.text"}}, Dumper=Dumper)
    file.write_text(text, encoding="utf-8")
    config = load_pipeline(file)
    assert config.stages["echo"].sampling == sampling
    assert parse_pipeline(effective(file), "effective.yaml") == msgspec.structs.replace(
        config, name="any"
    )


def test_every_value_has_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "preset: simulated-omni\n"
        "stages:\n"
        "  writer: {queue: 3}\n"
        "  painter: {engine: echo}\n"
        "edges:\n"
        "  - writer.hidden -> painter.in\n"
        "outputs: {text: writer.text}\n"
    )
    lines = effective(file).splitlines()
    assert "name: mine  # the file's name" in lines
    assert f"    queue: 3  # {file}:3" in lines
    assert "    engine: simulated  # preset simulated-omni:4" in lines
    assert "      step_s: 0.02  # preset simulated-omni:4" in lines
    assert f"    engine: echo  # {file}:4" in lines
    assert f"  text: writer.text  # {file}:7" in lines
    assert "stall_s: 120.0  # default" in lines
    (edge,) = (line for line in lines if line.startswith("  - "))
    assert edge.endswith(f"# {file}:6")
    painter = lines[lines.index("  painter:") : lines.index("  vocoder:")]
    assert "    simulated: {}  # default" in painter, "nothing is left of the preset's painter"


def test_effective_form_of_a_wrong_file_is_its_error(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: x\nstages: {a: {engine: echo}}\noutput: {}")
    with pytest.raises(Exception, match=f"{file}:3: output: unknown key"):
        effective(file)


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(schema())


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_schema_takes_shipped_files_and_their_effective_form(file: Path, validator: Any) -> None:
    validator.validate(yaml.safe_load(file.read_text()))
    validator.validate(yaml.safe_load(effective(file)))


@pytest.mark.parametrize(
    "text",
    [
        "preset: echo",
        "preset: echo\nstages: {echo: {queue: 3}}",
        f"{ECHO}edges: [a.x -> b.y, {{from: a.x, to: b.y, stream: true}}]",
        ECHO.replace("engine: echo", "engine: 'my.engine:make'"),
    ],
)
def test_schema_takes_short_forms(text: str, validator: Any) -> None:
    validator.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    [
        f"{ECHO}outptus: {{}}",
        ECHO.replace("engine: echo", "engine: echo, arenna: 1MiB"),
        ECHO.replace("engine: echo", "engine: ecko"),
        ECHO.replace("engine: echo", "engine: echo, device: gpu"),
        ECHO.replace("echo:", "Echo:"),
        ECHO.replace("echo.text", "echo"),
        f"{ECHO}edges: [a.x to b.y]",
        f"{ECHO}edges: [{{from: a.x, too: b.y}}]",
        "name: x",
    ],
)
def test_schema_refuses_what_is_wrong(text: str, validator: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(yaml.safe_load(text))
