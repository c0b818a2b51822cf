"""The evaluation over HTTP, against a server that draws by rule instead of by model."""

import base64
import io
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import evaluate
import speech
import world
from world import Scene

DIALOGUES = evaluate.held_out_dialogues(12, seed=3)

Reply = Callable[[speech.Dialogue], tuple[int, dict[str, Any]]]


def message(text: str, scene: Scene | None) -> dict[str, Any]:
    if scene is None:
        return {"role": "assistant", "content": text}
    file = io.BytesIO()
    world.draw(scene, random.Random(0)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    images = [{"type": "image_url", "image_url": {"url": url}}]
    return {"role": "assistant", "content": text, "images": images}


@contextmanager
def serving(reply: Reply) -> Iterator[str]:
    """An address where each of DIALOGUES is answered by `reply`."""
    known = {json.dumps(dialogue.messages()): dialogue for dialogue in DIALOGUES}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["model"] == "shapes"
            status, answer = reply(known[json.dumps(body["messages"])])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": answer}]}).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def summary(reply: Reply) -> dict[str, float | int]:
    with serving(reply) as url:
        return evaluate.examine(DIALOGUES, evaluate.http_asker(url), workers=4)


def test_right_answers_pass() -> None:
    def reply(dialogue: speech.Dialogue) -> tuple[int, dict[str, Any]]:
        scene = dialogue.last.scene
        return 200, message(f"Here is {scene}.", scene)

    result = summary(reply)
    assert result["requests"] == len(DIALOGUES)
    assert result["accuracy"] == result["text_exact"] == 1.0


def test_another_picture_is_a_fault_though_the_text_is_right() -> None:
    def reply(dialogue: speech.Dialogue) -> tuple[int, dict[str, Any]]:
        return 200, message(f"Here is {dialogue.last.scene}.", world.TRAINING_SINGLES[0])

    result = summary(reply)
    assert result["accuracy"] == 0.0
    assert result["text_exact"] == 1.0


def test_an_answer_without_a_picture_is_a_fault() -> None:
    assert summary(lambda dialogue: (200, message("I cannot.", None)))["accuracy"] == 0.0


def test_a_refused_request_is_a_fault_and_does_not_end_the_run() -> None:
    result = summary(lambda dialogue: (503, {}))
    assert result["requests"] == len(DIALOGUES)
    assert result["accuracy"] == 0.0


def test_requests_are_held_out_and_the_same_every_time() -> None:
    assert evaluate.held_out_dialogues(12, seed=3) == DIALOGUES
    for dialogue in DIALOGUES:
        assert dialogue.last.scene is not None
        assert world.is_held_out(dialogue.last.scene)
