"""WAV files from 16-bit samples (RIFF WAVE, format 1), without a library."""

from __future__ import annotations

import struct

_BYTES = 2  # of one sample


def wav(pcm: bytes, sample_rate: int, channels: int = 1) -> bytes:
    """A whole file from signed 16-bit little-endian samples, channels interleaved."""
    block = channels * _BYTES
    form = struct.pack(
        "<4sIHHIIHH", b"fmt ", 16, 1, channels, sample_rate, sample_rate * block, block, 8 * _BYTES
    )
    data = struct.pack("<4sI", b"data", len(pcm))
    size = len(b"WAVE") + len(form) + len(data) + len(pcm)
    return b"".join((struct.pack("<4sI", b"RIFF", size), b"WAVE", form, data, pcm))
