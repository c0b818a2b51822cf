"""A main process for tests that kill it: `python -m tests.engines_ar.asking pipeline.yaml`.

It says "ready", then answers each line on stdin, a JSON list of prompts that are asked all at
once, with a line of JSON: for each of them tokens, hidden states and the error's kind, if any.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from typing import Any

from omni_rt.errors import OmniError
from omni_rt.request import Data, Request
from omni_rt.runtime.omni import AsyncOmni


async def main(config: str) -> None:
    async with AsyncOmni(config) as omni:
        say("ready")
        while line := await asyncio.to_thread(sys.stdin.readline):
            say(await asyncio.gather(*[ask(omni, prompt) for prompt in json.loads(line)]))


async def ask(omni: AsyncOmni, prompt: str) -> dict[str, Any]:
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    found = {"tokens": b"", "hidden": b""}
    try:
        async with omni.submit(Request(prompt=prompt, params=params)) as stream:
            async for output in stream:
                if isinstance(output, Data):
                    found[output.output] += output.data
    except OmniError as error:
        return {"error": f"{error.kind}: {error}"}
    tokens = list(memoryview(found["tokens"]).cast("q"))
    return {"tokens": tokens, "hidden": base64.b64encode(found["hidden"]).decode()}


def say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
