"""Qwen2.5-Omni's voice as a module stage: from codec tokens to sound, while they come.

    vocoder:
      engine: torch
      module: omni_rt_workers.models.qwen2_5_omni.token2wav:Token2Wav

Options, in blocks of the DiT's attention (`block_size` mel frames: 0.24 s): `first` (2) of the
first piece of a stream, `chunk` (2) of every further one, `ahead` (2) that are looked at after
each, and `whole` (50) of a piece of what is not streamed. And of the solver `num_steps` (10),
`guidance_scale` (0.5) and `sway_coefficient` (-1).

What comes in one piece is what transformers gives. Of several pieces each differs from it by what
lies more than `ahead` blocks after it: see docs/engines.md.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from omni_rt.errors import BadRequest, ConfigError, StageFailed, nearest
from omni_rt.wire.messages import ParamSpec
from omni_rt_workers.models.qwen2_5_omni.checkpoint import load_token2wav, load_voices
from omni_rt_workers.models.qwen2_5_omni.solver import Solve, Solver, Voice
from omni_rt_workers.models.qwen2_5_omni.vocoder import Tail, Vocoder
from omni_rt_workers.module import Job, Module, Outputs, Piece, Setup, Window

_DEFAULT_VOICE = "Chelsie"  # transformers' too


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    first: int = 2
    chunk: int = 2
    ahead: int = 2
    whole: int = 50  # 12 s; attention takes the square of it
    num_steps: int = 10
    guidance_scale: float = 0.5
    sway_coefficient: float = -1.0

    def __post_init__(self) -> None:
        if min(self.first, self.chunk, self.whole) < 1 or self.ahead < 0 or self.num_steps < 2:
            raise ValueError("first, chunk and whole are at least 1, ahead 0 and num_steps 2")


@dataclass(eq=False, slots=True)
class _Speech:
    """One request: what it carries from piece to piece."""

    voice: Voice
    noise: torch.Generator
    drawn: torch.Tensor  # noise [frames, mel_dim] from the window's first frame on
    course: torch.Tensor  # [evaluations, left frames, mel_dim], see `Solve.known`
    tail: Tail
    solve: Solve | None = None  # of the present piece


class Token2Wav(Module):
    outputs = {"audio": "audio"}
    sample_rate = 24_000

    def __init__(self, setup: Setup) -> None:
        options = _options(setup)
        if setup.weights is None:
            raise ConfigError("the stage has no model", hint="name the checkpoint's folder")
        self._device = setup.device
        self._voices = load_voices(setup.weights, setup.device)
        self.model = load_token2wav(setup.weights, setup.device)
        config = self.model.config.dit_config
        self._repeats: int = config.repeats
        self._codes: int = config.num_embeds + 1
        self._mel_dim: int = config.mel_dim
        self._solver = Solver(
            self.model.code2wav_dit_model,
            options.num_steps,
            options.guidance_scale,
            options.sway_coefficient,
        )
        self._vocoder = Vocoder(self.model.code2wav_bigvgan_model)
        self._window = window(options, config)
        self.inputs = {"codes": self._window}
        names = tuple(self._voices)
        self._default = _DEFAULT_VOICE if _DEFAULT_VOICE in names else names[0]
        self.params = (ParamSpec("voice", "str", choices=names, about=f"default {self._default}"),)

    def add(self, job: Job) -> None:
        name = job.params.get("voice", self._default)
        if name not in self._voices:
            hint = nearest(str(name), self._voices)
            raise BadRequest(f"there is no voice '{name}'", param="voice", hint=hint)
        nothing = torch.empty(0, self._mel_dim, device=self._device)
        noise = torch.Generator().manual_seed(job.seed)
        course = nothing.expand(self._solver.evaluations, 0, -1)
        job.state = _Speech(self._voices[name], noise, nothing, course, Tail(nothing, nothing))

    def key(self, job: Job) -> Hashable:
        """A step joins windows of one length, of voices whose reference has one length."""
        assert job.piece is not None
        return len(job.piece.rows), len(job.state.voice.ref_mel)

    def step(self, jobs: Sequence[Job]) -> Sequence[Outputs | None]:
        """One step of the ODE for each; those that are through with it become sound."""
        solves = [self._solve(job) for job in jobs]
        if moving := [solve for solve in solves if not self._solver.over(solve)]:
            self._solver.advance(moving)
        through = [job for job, s in zip(jobs, solves, strict=True) if self._solver.over(s)]
        sounds = dict(zip(through, self._speak(through), strict=True))
        return [{"audio": sounds[job]} if job in sounds else None for job in jobs]

    # ---- one piece

    def _solve(self, job: Job) -> Solve:
        """The solve of the job's piece, begun if it is new."""
        speech, piece = job.state, job.piece
        assert isinstance(speech, _Speech)
        assert piece is not None
        if speech.solve is None:
            codes = self._checked(piece.rows)
            frames = len(codes) * self._repeats
            self._draw(speech, frames)
            speech.solve = Solve(
                codes, speech.voice, speech.drawn[:frames], speech.course, self._kept(piece)
            )
        return speech.solve

    def _checked(self, codes: torch.Tensor) -> torch.Tensor:
        codes = codes.view(-1).long()
        if codes.min() < 0 or codes.max() >= self._codes:
            what = f"codes are from 0 to {self._codes - 1}, got {codes.min()} to {codes.max()}"
            raise StageFailed(what)
        return codes

    def _draw(self, speech: _Speech, frames: int) -> None:
        """Noise, a frame after the other: each frame has the same however it is cut, and the same
        as transformers' with this seed on a CPU."""
        missing = frames - len(speech.drawn)
        if missing > 0:
            new = torch.randn(missing, self._mel_dim, generator=speech.noise)
            speech.drawn = torch.cat([speech.drawn, new.to(self._device)])

    def _kept(self, piece: Piece) -> slice:
        """The new frames that will be the next piece's left context."""
        if piece.last:
            return slice(0, 0)
        end = piece.left + piece.new
        return slice(self._next_base(piece) * self._repeats, end * self._repeats)

    def _next_base(self, piece: Piece) -> int:
        """The row, counted from the window's first, at which the next window begins."""
        return max(0, piece.left + piece.new - self._window.left)

    def _speak(self, jobs: Sequence[Job]) -> list[torch.Tensor]:
        """The samples that the jobs' pieces settle. Changes no job if something is wrong."""
        tails = [self._longer(job) for job in jobs]
        sounds = self._vocoder.speak(tails, [_piece(job).last for job in jobs])
        frames = [len(sound) // self._vocoder.hop for sound in sounds]
        for job, tail, new in zip(jobs, tails, frames, strict=True):
            if _piece(job).last and tail.spoken + new != tail.end:
                raise StageFailed(f"{tail.end} frames gave the samples of {tail.spoken + new}")
        for job, tail, new in zip(jobs, tails, frames, strict=True):
            self._vocoder.advance(tail, new)
            self._commit(job, tail)
        return sounds

    def _longer(self, job: Job) -> Tail:
        """The reply's mel with the piece's new frames, and the first guess at those after them."""
        speech, piece = job.state, _piece(job)
        low = piece.left * self._repeats
        high = low + piece.new * self._repeats
        mel, tail = speech.solve.mel, speech.tail
        return Tail(torch.cat([tail.mel, mel[low:high]]), mel[high:], tail.base, tail.spoken)

    def _commit(self, job: Job, tail: Tail) -> None:
        """The piece is done: keep what the next one wants."""
        speech, piece = job.state, _piece(job)
        speech.tail = tail
        if not piece.last:
            speech.course = torch.stack(speech.solve.course)
            speech.drawn = speech.drawn[self._next_base(piece) * self._repeats :].clone()
            speech.solve = None


def window(options: Options, config: Any) -> Window:
    """In codes. The left context is as far as one evaluation of the DiT looks back."""
    block = math.lcm(config.block_size, config.repeats) // config.repeats
    return Window(
        first=options.first * block,
        chunk=options.chunk * block,
        left=len(config.look_backward_layers) * block,
        right=options.ahead * block,
        whole=options.whole * block,
    )


def _piece(job: Job) -> Piece:
    assert job.piece is not None
    return job.piece


def _options(setup: Setup) -> Options:
    try:
        return msgspec.convert(dict(setup.options), Options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"options of token2wav: {error}") from error
