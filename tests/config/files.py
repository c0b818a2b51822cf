"""Every pipeline file that is shipped, and small ones to break."""

from __future__ import annotations

from pathlib import Path

from omni_rt.config import bundled, presets

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
SHIPPED = [bundled(), *presets().values(), *EXAMPLES]

ECHO = """\
stages:
  echo: {engine: echo}
outputs: {text: echo.text}
"""
