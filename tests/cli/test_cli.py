"""The commands, as processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import wave
from pathlib import Path

import pytest

from tests.processes import all_end, serving, shared_memory, short_folder, workers_of

ROOT = Path(__file__).resolve().parents[2]
ECHO = """
stages:
  echo: {engine: echo, arena: 4MiB}
outputs: {text: echo.text}
"""
SLOW = """
name: slow
stages:
  slow: {engine: simulated, arena: 4MiB, simulated: {step_s: 0.01, steps: 100000, ports: {text: {every: 1}}}}
outputs: {text: slow.text}
shutdown_s: 0.5
"""  # noqa: E501


def omni(*args: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omni_rt", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    path = tmp_path / "echo.yaml"
    path.write_text(ECHO)
    return path


def test_run_prints_the_reply(echo: Path) -> None:
    done = omni("run", "one two three", "--config", str(echo))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "one two three\n"


def test_run_writes_the_sound_and_the_picture_beside_it(tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    preset = tmp_path / "p.yaml"
    preset.write_text("preset: simulated-omni\n")
    done = omni("run", "x", "--config", str(preset), "-o", str(out))
    assert done.returncode == 0, done.stderr
    with wave.open(str(out)) as file:
        assert (file.getframerate(), file.getnframes()) == (24_000, 10 * 65536 // 2)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_run_writes_the_picture(tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    preset = tmp_path / "p.yaml"
    preset.write_text("preset: simulated-omni\n")
    done = omni("run", "x", "--config", str(preset), "-o", str(out), "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "seed 3" in done.stdout


@pytest.mark.parametrize(
    ("param", "message"),
    [("stepz=3", "no stage of this request has a parameter 'stepz'"), ("x", "NAME=VALUE")],
)
def test_run_refuses_a_wrong_parameter(echo: Path, param: str, message: str) -> None:
    done = omni("run", "x", "--config", str(echo), "--param", param)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_file_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(ECHO.replace("arena", "arenna"))
    for command in ("serve", "run"):
        args = ["x"] if command == "run" else []
        done = omni(command, *args, "--config", str(path))
        assert done.returncode == 2
        assert f"{path}:3: stages.echo.arenna: unknown key" in done.stderr
        assert "did you mean 'arena'?" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_config_prints_the_effective_form_and_the_schema(echo: Path) -> None:
    shown = omni("config", str(echo)).stdout
    assert "max_batch: 8  # default" in shown
    assert f"engine: echo  # {echo}:3" in shown
    assert json.loads(omni("config", "--schema").stdout)["$defs"]["StageConfig"]


def test_help_loads_no_web_framework_and_no_models() -> None:
    code = (
        "import sys; from omni_rt.cli import app; "
        "from typer.main import get_command; get_command(app); "
        "print([m for m in ('litestar', 'uvicorn', 'torch', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_taken_port_stops_the_server_before_anything_loads(echo: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = omni("serve", "--config", str(echo), "--port", str(port))
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "choose another with --port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("serve", "--port", "70000"), "--port"),
        (("run", "x", "--seed", "-1"), "--seed"),
        (("run", "x", "-o", "nowhere/out.png"), "there is no folder nowhere"),
        (("run", "x", "-o", "."), "is a folder"),
        (("run", " "), "the prompt is empty"),
    ],
)
def test_what_cannot_work_is_said_before_anything_loads(
    echo: Path, args: tuple[str, ...], message: str
) -> None:
    done = omni(*args, "--config", str(echo))
    assert done.returncode == 2
    assert message in done.stderr
    assert "loading" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_host_that_is_none_is_one_clear_line(echo: Path) -> None:
    done = omni("serve", "--config", str(echo), "--host", "256.0.0.1", "--port", "0")
    assert done.returncode == 1
    assert "cannot listen on 256.0.0.1:0" in done.stderr
    assert "--port" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_stage_that_cannot_load_ends_the_server_with_its_error(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(SLOW.replace("step_s", "step_sec"))
    done = omni("serve", "--config", str(path), "--port", "0")
    assert done.returncode == 1
    assert "stage slow cannot load" in done.stderr
    assert "step_sec" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_ends_in_order_and_leaves_nothing(
    number: signal.Signals, tmp_path: Path
) -> None:
    config = tmp_path / "slow.yaml"
    config.write_text(SLOW)
    folder = short_folder()
    shm = shared_memory()
    with serving(config, folder) as (process, url):
        workers = workers_of(process.pid)
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True})
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert reply.readline().startswith(b"data: ")
            process.send_signal(number)
            rest = reply.read()  # the request is ended with an error, not cut off
        assert b'"code":"cancelled"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert process.wait(30) == 0
        assert all_end(workers, 2)
    assert shared_memory() == shm
    assert os.listdir(folder) == []
    folder.rmdir()


def _state(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
            return str(json.load(reply)["status"])
    except urllib.error.HTTPError as error:
        with error:
            return str(json.load(error)["status"])


def test_while_it_stops_it_refuses_and_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    config = tmp_path / "slow.yaml"
    config.write_text(SLOW.replace("shutdown_s: 0.5", "shutdown_s: 600"))
    folder = short_folder()
    with serving(config, folder) as (process, url):
        workers = workers_of(process.pid)
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True})
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert reply.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            assert any("a second signal" in line for line in process.stderr)
            while _state(url) != "stopping":  # the signal is said first, then acted upon
                time.sleep(0.01)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=30)
            assert refused.value.code == 503
            refused.value.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 1
        assert all_end(workers, 2)
    assert os.listdir(folder) == []
    folder.rmdir()


def test_nothing_is_left_of_a_killed_server(tmp_path: Path) -> None:
    config = tmp_path / "slow.yaml"
    config.write_text(SLOW)
    folder = short_folder()
    with serving(config, folder) as (process, _):
        workers = workers_of(process.pid)
        process.kill()
        assert workers
        assert all_end(workers, 2)
    assert os.listdir(folder) == []
    folder.rmdir()


def test_the_command_reference_lists_every_command_and_option() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    for command in ("serve", "run", "config"):
        help_text = omni(command, "--help").stdout
        assert f"## omni-rt {command}" in text
        for option in re.findall(r"--[a-z-]+", help_text):
            assert option in text, f"{command} {option} is not documented"
