"""Asking a server for a reply and its picture, with the standard library alone."""

from __future__ import annotations

import base64
import io
import json
import urllib.error
import urllib.request
from typing import Any

from PIL import Image


def post(url: str, path: str, body: dict[str, Any], timeout_s: float) -> tuple[int, dict[str, Any]]:
    """Status and body. Raises `TimeoutError` or `URLError` when there is no answer in time."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def chat(url: str, text: str, timeout_s: float = 60, **more: Any) -> tuple[int, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": text}], **more}
    return post(url, "/v1/chat/completions", body, timeout_s)


def answer(url: str, text: str, **more: Any) -> tuple[str, Image.Image | None]:
    status, reply = chat(url, text, **more)
    assert status == 200, reply
    message = reply["choices"][0]["message"]
    images = message.get("images")
    return message["content"], picture(images[0]["image_url"]["url"]) if images else None


def picture(data_url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data_url.partition(",")[2]))).convert("RGB")


def get(url: str, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(url + path, timeout=10) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
