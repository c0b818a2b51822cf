"""A stage whose model is spread over two processes, under a main process of its own."""

from __future__ import annotations

import base64
import getpass
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.processes import all_end, shared_memory, short_folder, workers_of

from .fakes import Greedy

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

# A letter in a prompt, and where a step with it fails.
POISON = {
    "1": "before the forward",
    "2": "in the forward",
    "3": "after the forward",
    "4": "before sampling",
    "5": "after sampling",
    "6": "before the forward, on rank 1 alone",
}
PIPELINE = """
stages:
  writer:
    engine: vllm
    model: {model}
    hidden: {{layer: -1, rows: all}}
    vllm:
      tensor_parallel_size: 2
      max_num_batched_tokens: 32
      worker_cls: tests.engines_ar.workers.PoisonedWorker
      additional_config: {{poison: {poison}}}
outputs: {{tokens: writer.tokens, hidden: writer.hidden}}
"""
WORDS = ("a red circle", "x" * 70, "over", "the quick brown fox jumps over the lazy dog")


@dataclass
class Main:
    process: subprocess.Popen[str]
    temporary: Path
    memory: set[str]  # what was in /dev/shm before

    @classmethod
    @contextmanager
    def started(cls, folder: Path, config: Path) -> Iterator[Main]:
        """With a stage of the model in `folder`. Its pipeline is written to `config`."""
        vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
        poison = {str(vocabulary[letter]): where for letter, where in POISON.items()}
        config.write_text(PIPELINE.format(model=folder, poison=json.dumps(poison)))
        temporary = short_folder()
        memory = shared_memory()
        settings = {
            "TMPDIR": str(temporary),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "15",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines_ar.asking", str(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings},
        )
        try:
            made = cls(process, temporary, memory)
            assert made.read() == "ready"
            yield made
        finally:
            process.kill()
            process.communicate()

    def ask(self, *prompts: str) -> list[dict[str, Any]]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompts) + "\n")
        self.process.stdin.flush()
        answers: list[dict[str, Any]] = self.read()
        return answers

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    @property
    def worker(self) -> int:
        (worker,) = workers_of(self.process.pid)
        return worker

    @property
    def processes(self) -> list[int]:
        """The worker, its two ranks and what else they started."""
        found = [self.worker, *workers_of(self.worker)]
        assert len(found) >= 3
        return found

    def named(self) -> set[str]:
        """What has a name in a place where it could be left."""
        files = set(os.listdir(self.temporary)) - {f"torchinductor_{getpass.getuser()}"}
        return files | (shared_memory() - self.memory)


@pytest.fixture(scope="module")
def main(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Main]:
    with Main.started(folder, tmp_path_factory.mktemp("ranks") / "ranks.yaml") as made:
        yield made


@pytest.fixture(scope="module")
def right(folder: Path, reference: Any, greedy: Greedy) -> Any:
    """Whether an answer is what transformers gives."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def check(prompt: str, answer: dict[str, Any]) -> None:
        message = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        assert answer["tokens"] == greedy(ids, 12)
        with torch.no_grad():
            full = torch.tensor([[*ids, *answer["tokens"][:-1]]])
            wanted = reference(full, output_hidden_states=True).hidden_states[-1][0]
        data = bytearray(base64.b64decode(answer["hidden"]))
        rows = torch.frombuffer(data, dtype=torch.float32)
        assert torch.allclose(rows.view(wanted.shape), wanted, rtol=0, atol=2e-5)

    return check


def test_replies_and_hidden_states_equal_transformers(main: Main, right: Any) -> None:
    (alone,) = main.ask(WORDS[1])
    right(WORDS[1], alone)
    prompts = [word + end for word in WORDS for end in ("", " and more")]
    for prompt, answer in zip(prompts, main.ask(*prompts), strict=True):
        right(prompt, answer)


@pytest.mark.parametrize("letter", ["1", "2", "3", "4", "5"])
def test_only_the_request_that_makes_steps_fail_fails(main: Main, right: Any, letter: str) -> None:
    poisonous, *others = main.ask("poison " * 8 + letter, *WORDS)
    assert poisonous["error"].startswith("stage_failed")
    assert f"poisoned {POISON[letter]}" in poisonous["error"]
    for prompt, answer in zip(WORDS, others, strict=True):
        right(prompt, answer)


def test_nothing_of_the_ranks_has_a_name_that_could_be_left(main: Main) -> None:
    """But for the memory that Python's own tracker sees to, whoever dies."""
    assert all(name.startswith("psm_") for name in main.named())


def test_no_process_and_no_file_is_left_when_main_is_killed(main: Main) -> None:
    processes = main.processes
    main.process.kill()
    assert all_end(processes, 2)
    assert main.named() == set()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_worker_is_started_again_when_it_or_a_rank_of_it_ends_or_fails_alone(
    folder: Path, tmp_path: Path, right: Any
) -> None:
    with Main.started(folder, tmp_path / "ranks.yaml") as main:
        processes = main.processes
        (answer,) = main.ask("6")  # the other rank waits for it, up to vLLM's limit
        assert answer["error"].startswith("stage_")
        assert all_end(processes, 2)
        _until_served(main, right)
        processes = main.processes
        os.kill(main.worker, signal.SIGKILL)
        assert all_end(processes, 2)
        _until_served(main, right)
        processes = main.processes
        os.kill(next(filter(_is_rank, processes)), signal.SIGKILL)
        assert all_end(processes, 20)  # vLLM gives the other rank some seconds
        _until_served(main, right)


def test_what_a_kill_in_the_middle_of_a_start_left_is_swept_up_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omni_rt_workers.engines.vllm_ar import ranks

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")
    left = tmp_path / "omni-rt-ranks-left"
    left.mkdir()
    (left / "vllm_dist_of_a_test").touch()
    os.utime(left, (0, 0))
    memory = Path("/dev/shm/vllm_dist_of_a_test-tp-0")
    memory.touch()
    with ranks.meeting():
        (mine,) = tmp_path.iterdir()
        assert mine != left
        assert not memory.exists()
        with ranks.meeting():  # another worker's
            assert mine.exists()
    assert list(tmp_path.iterdir()) == []


def _is_rank(process: int) -> bool:
    return b"Worker_TP" in Path(f"/proc/{process}/cmdline").read_bytes()


def _until_served(main: Main, right: Any) -> None:
    while "error" in (answer := main.ask(WORDS[0])[0]):
        assert answer["error"].startswith("stage_unavailable")
    right(WORDS[0], answer)
