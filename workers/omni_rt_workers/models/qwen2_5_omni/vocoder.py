"""From mel frames to samples in windows, by transformers' BigVGAN: equal to doing all at once.

BigVGAN is convolutional: a sample depends on a limited number of frames. A window that has them
all gives the same sample, wherever it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

_MAX_FRAMES = 1000  # new ones of a window: bounds the memory that long speech takes


@dataclass(eq=False, slots=True)
class Tail:
    """The mel frames of one reply that are still needed."""

    mel: torch.Tensor  # [frames, mel_dim], from frame `base` of the reply on
    after: torch.Tensor  # [frames, mel_dim]: a first guess at those that come next
    base: int = 0
    spoken: int = 0  # frames of the reply that have become samples

    @property
    def end(self) -> int:
        return self.base + self.mel.shape[0]


class Vocoder:
    def __init__(self, bigvgan: Any) -> None:
        self._bigvgan = bigvgan
        self.hop = prod(up[0].stride[0] for up in bigvgan.ups)  # samples of a frame
        self.left, self.right = reach(bigvgan)  # frames that a frame's samples depend on

    def speak(self, tails: Sequence[Tail], last: Sequence[bool]) -> list[torch.Tensor]:
        """For each the samples [frames * hop], on the CPU, of the frames that have all that their
        samples depend on after them, guessed or not, or of all frames if it is the `last`.
        Changes no tail: see `advance`."""
        cuts = [
            (k, low, high)
            for k, (tail, ends) in enumerate(zip(tails, last, strict=True))
            for low, high in self._cuts(tail, ends)
        ]
        sound: list[list[torch.Tensor]] = [[] for _ in tails]
        windows = {cut: self._window(tails[cut[0]], *cut[1:]) for cut in cuts}
        done: dict[tuple[int, int, int], torch.Tensor] = {}
        for length in {mel.shape[0] for mel, _ in windows.values()}:
            same = [cut for cut in cuts if windows[cut][0].shape[0] == length]
            mel = torch.stack([windows[cut][0] for cut in same]).transpose(1, 2)
            done |= zip(same, self._bigvgan(mel).reshape(len(same), -1), strict=True)
        for cut in cuts:
            k, low, high = cut
            skip = windows[cut][1] * self.hop
            sound[k].append(done[cut][skip : skip + (high - low) * self.hop])
        return [torch.cat(parts) if parts else torch.empty(0) for parts in sound]

    def advance(self, tail: Tail, frames: int) -> None:
        """`frames` more have become samples: forget those that no further sample depends on."""
        tail.spoken += frames
        base = max(tail.base, tail.spoken - self.left)
        tail.mel = tail.mel[base - tail.base :].clone()
        tail.base = base

    def _cuts(self, tail: Tail, ends: bool) -> list[tuple[int, int]]:
        settled = tail.end if ends else tail.end - max(0, self.right - len(tail.after))
        starts = range(tail.spoken, settled, _MAX_FRAMES)
        return [(low, min(low + _MAX_FRAMES, settled)) for low in starts]

    def _window(self, tail: Tail, low: int, high: int) -> tuple[torch.Tensor, int]:
        """The frames that samples of frames `low` to `high` depend on; how many come before."""
        begin, end = (
            max(tail.base, low - self.left),
            min(tail.end + len(tail.after), high + self.right),
        )
        mel = torch.cat([tail.mel, tail.after]) if high + self.right > tail.end else tail.mel
        return mel[begin - tail.base : end - tail.base], low - begin


def reach(bigvgan: Any) -> tuple[int, int]:
    """How many frames before and after its own a frame's samples depend on.

    Walks from a frame's first and last sample (0 and hop - 1) back to the input.
    """
    span = (0, prod(up[0].stride[0] for up in bigvgan.ups) - 1)
    span = _through_activation(bigvgan.activation_post, _through_conv(bigvgan.conv_post, span))
    blocks = bigvgan.num_residual_blocks
    for layer in reversed(range(len(bigvgan.ups))):
        spans = [
            _through_block(block, span)
            for block in bigvgan.resblocks[layer * blocks : (layer + 1) * blocks]
        ]
        span = (min(low for low, _ in spans), max(high for _, high in spans))
        span = _through_transposed(bigvgan.ups[layer][0], span)
    low, high = _through_conv(bigvgan.conv_pre, span)
    return -low, high


Span = tuple[int, int]
"""First and last position."""


def _through_conv(conv: nn.Conv1d, span: Span) -> Span:
    """The inputs that the outputs in `span` depend on; likewise for the others."""
    pad, width = int(conv.padding[0]), conv.dilation[0] * (conv.kernel_size[0] - 1)
    return span[0] - pad, span[1] - pad + width


def _through_transposed(conv: nn.ConvTranspose1d, span: Span) -> Span:
    pad, size, stride = int(conv.padding[0]), conv.kernel_size[0], conv.stride[0]
    return -(-(span[0] + pad - size + 1) // stride), (span[1] + pad) // stride


def _through_block(block: Any, span: Span) -> Span:
    for k in reversed(range(len(block.convs1))):
        span = _through_activation(
            block.activations[2 * k + 1], _through_conv(block.convs2[k], span)
        )
        span = _through_activation(block.activations[2 * k], _through_conv(block.convs1[k], span))
    return span


def _through_activation(activation: Any, span: Span) -> Span:
    """Up-sampled, a function of each sample, down-sampled."""
    down, up = activation.downsample, activation.upsample
    low = span[0] * down.stride - down.pad_left
    high = span[1] * down.stride - down.pad_left + down.kernel_size - 1
    first = -(-(low + up.pad_left - up.kernel_size + 1) // up.stride) - up.pad
    return first, (high + up.pad_left) // up.stride - up.pad
