"""What happens outside of requests: making an engine, and encoding pictures."""

from __future__ import annotations

import subprocess
import sys
from io import BytesIO

import pytest
from PIL import Image

from omni_rt_workers import media

_LIGHT = """
import sys
from omni_rt.wire.messages import StageSpec
from omni_rt_workers.engines import diffusers_dit
spec = StageSpec(name="p", engine="diffusers", model="m", part=None, device="cpu", max_batch=1,
                 options={}, sampling={}, credits={})
engine = diffusers_dit.make(spec, None)
print(sorted({"torch", "diffusers", "transformers", "PIL"} & set(sys.modules)))
"""


def test_making_an_engine_imports_nothing_heavy() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}{_LIGHT}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "[]\n"


@pytest.fixture
def picture() -> Image.Image:
    gradient = Image.linear_gradient("L").resize((40, 24))
    return Image.merge("RGB", (gradient, gradient.rotate(90), gradient.rotate(180)))


def test_png_keeps_every_pixel(picture: Image.Image) -> None:
    decoded = Image.open(BytesIO(media.png(picture)))
    assert decoded.format == "PNG"
    assert decoded.tobytes() == picture.tobytes()


def test_jpeg_keeps_the_size_and_drops_transparency(picture: Image.Image) -> None:
    picture.putalpha(128)
    decoded = Image.open(BytesIO(media.jpeg(picture)))
    assert (decoded.format, decoded.mode, decoded.size) == ("JPEG", "RGB", (40, 24))
