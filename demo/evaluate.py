"""Put held-out requests to the server (or, with --plain, to the plain scripts) and judge.

Prints the failures, the accuracy by kind of request, and one JSON object as the last line. Exits
with 1 when fewer than 97 of 100 pictures show what was asked for.
"""

import argparse
import base64
import collections
import concurrent.futures
import contextlib
import io
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from PIL import Image

import judge
import speech
import world

PASS_MARK = 0.97
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 300.0

Answer = tuple[str, Image.Image | None]
Ask = Callable[[list[speech.Message], int], Answer]


@dataclass(frozen=True)
class Result:
    kind: str
    request: str
    fault: str | None
    text_exact: bool


def main() -> int:
    options = _options()
    dialogues = held_out_dialogues(options.requests, options.seed)
    if options.plain:
        summary = examine(dialogues, plain_asker(), workers=1)
    elif options.url:
        summary = examine(dialogues, http_asker(options.url), options.concurrency)
    else:
        with running_server() as url:
            summary = examine(dialogues, http_asker(url), options.concurrency)
    print(json.dumps(summary))
    return 0 if summary["accuracy"] >= PASS_MARK else 1


def held_out_dialogues(count: int, seed: int) -> list[speech.Dialogue]:
    """Requests for scenes that training never saw, in all wordings, some after other messages."""
    rng = random.Random(f"evaluation {seed}")
    return [
        speech.dialogue_to(speech.ask_for(rng.choice(world.HELD_OUT), rng), rng)
        for _ in range(count)
    ]


def examine(dialogues: Sequence[speech.Dialogue], ask: Ask, workers: int) -> dict[str, float | int]:
    start = time.monotonic()
    results: list[Result] = []
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        jobs = [
            pool.submit(_examine_one, dialogue, ask, seed)
            for seed, dialogue in enumerate(dialogues)
        ]
        for job in concurrent.futures.as_completed(jobs):
            results.append(job.result())
            _print_progress(results, len(jobs))
    seconds = time.monotonic() - start
    _print_kinds(results)
    return {
        "requests": len(results),
        "accuracy": round(sum(r.fault is None for r in results) / len(results), 4),
        "text_exact": round(sum(r.text_exact for r in results) / len(results), 4),
        "seconds": round(seconds, 2),
    }


def _examine_one(dialogue: speech.Dialogue, ask: Ask, seed: int) -> Result:
    scene = dialogue.last.scene
    assert scene is not None
    try:
        text, picture = ask(dialogue.messages(), seed)
    except (OSError, ValueError, LookupError) as error:
        return Result(dialogue.kind, dialogue.last.request, f"no answer: {error!r}", False)
    things = [(thing.color, thing.shape) for thing in scene.things]
    fault = (
        judge.fault(picture, things, scene.relation, scene.background)
        if picture
        else f"no picture, but {text!r}"
    )
    exact = text.strip() == dialogue.last.reply.removesuffix(speech.IMAGE)
    return Result(dialogue.kind, dialogue.last.request, fault, exact)


def _print_progress(results: list[Result], total: int) -> None:
    last = results[-1]
    lead = "\r" if sys.stderr.isatty() else ""
    if last.fault:
        print(f"{lead}wrong: {last.request!r} ({last.kind}): {last.fault}", flush=True)
    if len(results) % 20 == 0 or len(results) == total:
        right = sum(result.fault is None for result in results)
        print(f"{len(results)}/{total} asked, {right} right", file=sys.stderr, flush=True)


def _print_kinds(results: list[Result]) -> None:
    kinds = collections.defaultdict(list)
    for result in results:
        kinds[result.kind].append(result.fault is None)
    for kind, right in sorted(kinds.items()):
        print(f"{kind:28} {sum(right):4}/{len(right):<4} {sum(right) / len(right):.3f}")


# --- who is asked ---------------------------------------------------------------------------------


def http_asker(url: str) -> Ask:
    def ask(messages: list[speech.Message], seed: int) -> Answer:
        body = json.dumps({"model": "shapes", "messages": messages, "seed": seed}).encode()
        request = urllib.request.Request(
            f"{url.rstrip('/')}/v1/chat/completions",
            body,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            message = json.load(response)["choices"][0]["message"]
        images = message.get("images") or []
        picture = _picture(images[0]["image_url"]["url"]) if images else None
        return message["content"], picture

    return ask


def _picture(data_url: str) -> Image.Image:
    header, _, data = data_url.partition(",")
    if header != "data:image/png;base64":
        raise ValueError(f"not a PNG in a data URL: {header[:40]!r}")
    return Image.open(io.BytesIO(base64.b64decode(data)))


def plain_asker() -> Ask:
    import plain  # torch and diffusers, which asking a server does not need

    model = plain.load()
    lock = threading.Lock()

    def ask(messages: list[speech.Message], seed: int) -> Answer:
        with lock:
            text, _, hidden = model.reply(messages)
            return text, model.paint(hidden, seed) if len(hidden) else None

    return ask


@contextlib.contextmanager
def running_server() -> Iterator[str]:
    """A server of our own on a free port, ready; stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-m", "omni_rt", "serve", "--port", str(port)])
    try:
        _wait_until_ready(server, url)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(
                f"the server ended with status {server.returncode} before it was ready"
            )
        with contextlib.suppress(OSError):  # not listening yet, or 503: not ready yet
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready after {START_TIMEOUT_S:.0f} s")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--url", help="a running server; by default one is started")
    target.add_argument(
        "--plain", action="store_true", help="no server: transformers and diffusers"
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight at once")
    parser.add_argument("--seed", type=int, default=0, help="which requests are drawn")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
