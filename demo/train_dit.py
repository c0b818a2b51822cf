"""The painter: a Z-Image transformer that knows what to paint by the writer's hidden states."""

import hashlib
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

import plain
import speech
import train_lm
import train_vae
import world
from training import Schedule, fit

CAPTION = 32  # tokens; the transformer pads captions to multiples of this
PATCH = 2
NOISE_SHIFT = 2.0  # more of training and sampling near pure noise, where colours are settled


@dataclass(frozen=True)
class PainterSettings:
    width: int = 96
    heads: int = 3
    rope_dims: tuple[int, int, int] = (8, 12, 12)  # of each head: caption position, row, column
    layers: int = 4
    refiners: int = 1
    batch: int = 32
    variety: float = 0.35  # of the drawings; the autoencoder met more, so it is at ease with these
    caption_noise: float = 0.02  # of the hidden states' deviation: other engines round otherwise
    pair_wordings: int = 5  # ways each training scene of two things is asked for
    pair_drawings: int = 2
    single_wordings: int = 80
    single_drawings: int = 30
    scenes: int | None = None  # use so many only
    compiled: bool = True
    checks: int = 400  # held-out requests painted at the end
    schedule: Schedule = Schedule(steps=5000, peak_rate=2.5e-3, average_decay=0.998, muon_rate=1e-2)


FULL = PainterSettings()
QUICK = PainterSettings(
    compiled=False,
    batch=8,
    scenes=100,
    pair_wordings=1,
    pair_drawings=1,
    single_wordings=1,
    single_drawings=1,
    checks=4,
    schedule=Schedule(steps=20, peak_rate=2.5e-3, warmup=10, average_decay=0.999),
)


@dataclass(frozen=True)
class Bank:
    """Wordings and drawings of the training scenes; any wording of a scene goes with any drawing.

    captions: [wordings, CAPTION, hidden], zero after each caption's end; lengths: [wordings];
    latents: [drawings, channels, 16, 16]; wordings_of, drawings_of: [scenes, 2], first row and
    number.
    """

    captions: Tensor
    lengths: Tensor
    latents: Tensor
    wordings_of: Tensor
    drawings_of: Tensor

    @property
    def singles(self) -> int:
        return min(len(world.TRAINING_SINGLES), len(self.wordings_of))

    def batch(self, size: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Random latents [N, C, H, W], captions [N, CAPTION, hidden] and their lengths [N]."""
        scenes = len(self.wordings_of)
        single = torch.randint(self.singles, (size,), generator=rng)
        pair = torch.randint(self.singles, max(scenes, self.singles + 1), (size,), generator=rng)
        is_single = torch.rand(size, generator=rng) < world.SINGLES_SHARE
        scene = torch.where(is_single, single, pair.clamp(max=scenes - 1))
        wording = self._pick(self.wordings_of[scene], rng)
        drawing = self._pick(self.drawings_of[scene], rng)
        return self.latents[drawing], self.captions[wording], self.lengths[wording]

    @staticmethod
    def _pick(rows: Tensor, rng: torch.Generator) -> Tensor:
        first, count = rows[:, 0], rows[:, 1]
        return first + (torch.rand(len(rows), generator=rng) * count).long()


def train_painter(
    writer_folder: Path,
    out: Path,
    work: Path,
    settings: PainterSettings,
    seed: int,
) -> None:
    """Train the transformer against the finished writer and autoencoder (at `out`/vae).

    Saves the whole as a ZImagePipeline folder at `out`.
    """
    writer = Qwen3ForCausalLM.from_pretrained(writer_folder, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(writer_folder)
    vae = AutoencoderKL.from_pretrained(out / "vae", torch_dtype=torch.float32).eval()
    vae.register_to_config(_name_or_path="")  # or the folder's path would be saved with it
    bank = make_bank(writer, tokenizer, vae, settings, work, seed)
    torch.manual_seed(seed)
    model = make_transformer(settings, vae.config.latent_channels, writer.config.hidden_size)
    pipeline = ZImagePipeline(
        FlowMatchEulerDiscreteScheduler(shift=NOISE_SHIFT), vae, None, None, model
    )
    pipeline.set_progress_bar_config(disable=True)
    examination = Examination(plain.Model(tokenizer, writer, pipeline), settings.checks)
    forward = _quick_forward() if settings.compiled else batched_forward
    scale = float(bank.captions[0, : int(bank.lengths[0])].std())

    def loss_at(step: int) -> Tensor:
        rng = torch.Generator().manual_seed(seed * 1_000_003 + step)
        return _loss(forward, model, bank, settings, scale, rng)

    def look(step: int) -> str:
        return examination.report(min(50, settings.checks), work / "painter.png")

    fit(model, loss_at, settings.schedule, work / "painter.pt", look)
    pipeline.save_pretrained(out)
    print(f"painter: {examination.report(settings.checks, work / 'painter.png')}", flush=True)


def make_transformer(
    settings: PainterSettings, latent_channels: int, caption_width: int
) -> ZImageTransformer2DModel:
    return ZImageTransformer2DModel(
        all_patch_size=(PATCH,),
        all_f_patch_size=(1,),
        in_channels=latent_channels,
        dim=settings.width,
        n_layers=settings.layers,
        n_refiner_layers=settings.refiners,
        n_heads=settings.heads,
        n_kv_heads=settings.heads,
        cap_feat_dim=caption_width,
        axes_dims=list(settings.rope_dims),
        axes_lens=[128, 32, 32],
    )


def _loss(
    forward: Callable[..., Tensor],
    model: ZImageTransformer2DModel,
    bank: Bank,
    settings: PainterSettings,
    caption_scale: float,
    rng: torch.Generator,
) -> Tensor:
    """Squared error of the velocity between noise and latents, at a random noise level."""
    latents, captions, lengths = bank.batch(settings.batch, rng)
    noise = torch.randn(latents.shape, generator=rng)
    level = torch.randn(len(latents), generator=rng).sigmoid()
    level = (
        NOISE_SHIFT * level / (1 + (NOISE_SHIFT - 1) * level)
    )  # as the sampler shifts its levels
    mixed = torch.lerp(latents, noise, level[:, None, None, None])
    jitter = torch.randn(captions.shape, generator=rng) * (settings.caption_noise * caption_scale)
    velocity = forward(model, mixed, 1 - level, captions + jitter, lengths)
    return F.mse_loss(velocity, latents - noise)  # the pipeline turns the sign


def batched_forward(
    model: ZImageTransformer2DModel,
    latents: Tensor,
    time: Tensor,
    captions: Tensor,
    lengths: Tensor,
) -> Tensor:
    """What the transformer's own forward gives, for captions of at most CAPTION tokens.

    The stock forward takes lists and handles each item by itself; with all sizes equal one pass
    over whole tensors does, several times as fast. latents: [N, C, H, W]; time: [N], 1 is clean;
    captions: [N, CAPTION, hidden]; lengths: [N]. Returns [N, C, H, W].
    """
    count, channels, height, width = latents.shape
    rows, columns = height // PATCH, width // PATCH
    patches = latents.view(count, channels, rows, PATCH, columns, PATCH)
    patches = patches.permute(0, 2, 4, 3, 5, 1).reshape(count, rows * columns, -1)
    modulation = model.t_embedder(time * model.t_scale)
    image = model.all_x_embedder[f"{PATCH}-1"](patches)
    caption = model.cap_embedder(captions)
    is_pad = torch.arange(CAPTION) >= lengths[:, None]
    caption = torch.where(is_pad[..., None], model.cap_pad_token, caption)
    image_turns, caption_turns = _rotations(model, rows, columns)
    for layer in model.noise_refiner:
        image = layer(image, None, image_turns, modulation)
    for layer in model.context_refiner:
        caption = layer(caption, None, caption_turns)
    both = torch.cat([image, caption], 1)
    turns = torch.cat([image_turns, caption_turns], 1)
    for layer in model.layers:
        both = layer(both, None, turns, modulation)
    out = model.all_final_layer[f"{PATCH}-1"](both[:, : rows * columns], c=modulation)
    out = out.view(count, rows, columns, PATCH, PATCH, channels).permute(0, 5, 1, 3, 2, 4)
    velocity: Tensor = out.reshape(latents.shape)
    return velocity


def _quick_forward() -> Callable[..., Tensor]:
    """`batched_forward`, compiled if there is a C++ compiler: twice as fast on two cores."""
    if shutil.which("g++") is None:
        return batched_forward
    warnings.filterwarnings("ignore", message=".*code generation for complex operators")
    compiled: Callable[..., Tensor] = torch.compile(batched_forward)
    return compiled


def _rotations(model: ZImageTransformer2DModel, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Rotary factors of the image's and the caption's tokens, [1, tokens, head_dim / 2] each."""
    grid = model.create_coordinate_grid((1, rows, columns), (CAPTION + 1, 0, 0)).flatten(0, 2)
    line = model.create_coordinate_grid((CAPTION, 1, 1), (1, 0, 0)).flatten(0, 2)
    return model.rope_embedder(grid)[None], model.rope_embedder(line)[None]


# --- data -----------------------------------------------------------------------------------------


def make_bank(
    writer: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    vae: AutoencoderKL,
    settings: PainterSettings,
    work: Path,
    seed: int,
) -> Bank:
    """The bank for these very weights; its two halves are kept in `work` for a resumed run."""
    pairs = list(world.TRAINING_PAIRS)
    random.Random(f"scenes {seed}").shuffle(pairs)
    scenes = [*world.TRAINING_SINGLES, *pairs][: settings.scenes]

    def make_wordings() -> dict[str, Tensor]:
        rng = random.Random(f"wordings {seed}")
        asked, rows = _repeated(scenes, settings.single_wordings, settings.pair_wordings)
        dialogues = [speech.dialogue_to(speech.ask_for(scene, rng), rng) for scene in asked]
        captions, lengths = _captions(writer, tokenizer, dialogues, rng)
        return {"captions": captions, "lengths": lengths, "wordings_of": rows}

    def make_drawings() -> dict[str, Tensor]:
        rng = random.Random(f"drawings {seed}")
        drawn, rows = _repeated(scenes, settings.single_drawings, settings.pair_drawings)
        latents = [
            train_vae.encode(
                vae, train_vae.draw_batch(drawn[i : i + 50], rng, variety=settings.variety)
            )
            for i in tqdm(range(0, len(drawn), 50), desc="drawings", mininterval=10)
        ]
        return {"latents": torch.cat(latents).contiguous(), "drawings_of": rows}

    recipe = (seed, settings.scenes)
    asking = (*recipe, settings.single_wordings, settings.pair_wordings)
    drawing = (*recipe, settings.single_drawings, settings.pair_drawings, settings.variety)
    return Bank(
        **_kept(work, "wordings", _digest(asking, writer), make_wordings),
        **_kept(work, "drawings", _digest(drawing, vae), make_drawings),
    )


def _kept(
    work: Path, name: str, digest: str, make: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    file = work / f"{name}-{digest}.safetensors"
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        save_file(make(), file)
    tensors: dict[str, Tensor] = load_file(file)
    return tensors


def _digest(recipe: tuple[object, ...], model: torch.nn.Module) -> str:
    """Of all that the tensors made by `model` after this recipe depend on."""
    digest = hashlib.sha256(repr(recipe).encode())
    for weight in model.state_dict().values():
        digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def _repeated(
    scenes: list[world.Scene], single_times: int, pair_times: int
) -> tuple[list[world.Scene], Tensor]:
    """Each scene several times over, and [scenes, 2]: where its run starts and how long it is."""
    times = [pair_times if scene.relation else single_times for scene in scenes]
    starts = [sum(times[:i]) for i in range(len(times))]
    repeated = [scene for scene, n in zip(scenes, times, strict=True) for _ in range(n)]
    return repeated, torch.tensor(list(zip(starts, times, strict=True)))


@torch.no_grad()
def _captions(
    writer: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    dialogues: list[speech.Dialogue],
    rng: random.Random,
) -> tuple[Tensor, Tensor]:
    """Hidden states of the replies that these dialogues call for, and their lengths."""
    rows = [train_lm.encode(tokenizer, dialogue, rng.random() < 0.3) for dialogue in dialogues]
    captions = torch.zeros(len(rows), CAPTION, writer.config.hidden_size)
    lengths = torch.tensor([len(reply) - 1 for _, reply in rows])  # without the end token
    order = sorted(range(len(rows)), key=lambda row: len(rows[row][0]))
    for start in tqdm(range(0, len(rows), 64), desc="wordings", mininterval=10):
        some = order[start : start + 64]
        ids, mask = train_lm.padded([rows[row][0] + rows[row][1] for row in some])
        states = writer.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        for state, row in zip(states.hidden_states[plain.LAYER], some, strict=True):
            first, length = len(rows[row][0]), int(lengths[row])
            captions[row, :length] = state[first : first + length]
    return captions, lengths


# --- examination ----------------------------------------------------------------------------------


class Examination:
    """Held-out requests, put to the writer and the stock pipeline and judged."""

    def __init__(self, model: plain.Model, requests: int) -> None:
        rng = random.Random("painter check")
        self._model = model
        self._asked: list[speech.Exchange] = []
        self._hidden: list[Tensor] = []
        for _ in range(requests):
            asked = speech.dialogue_to(speech.ask_for(rng.choice(world.HELD_OUT), rng), rng)
            _, _, hidden = model.reply(asked.messages())
            if len(hidden):
                self._asked.append(asked.last)
                self._hidden.append(hidden)

    @torch.no_grad()
    def report(self, requests: int, sheet: Path) -> str:
        """Paint and judge so many; saves the first pictures on one sheet."""
        hidden = self._hidden[:requests]
        pictures: list[Image.Image] = []
        for start in range(0, len(hidden), 25):
            seeds = range(start, min(start + 25, len(hidden)))
            pictures += self._model.paint_all(hidden[start : start + 25], seeds)
        right = 0
        for picture, asked in zip(pictures, self._asked, strict=False):
            assert asked.scene is not None
            right += train_vae.judge_scene(picture, asked.scene) is None
        if pictures:  # a writer that has learnt nothing asks for none
            contact_sheet(pictures[:50]).save(sheet)
        return f"held-out pictures judged right {right}/{requests}"


def contact_sheet(pictures: list[Image.Image], columns: int = 10) -> Image.Image:
    cell = world.PICTURE_SIZE + 4
    rows = (len(pictures) + columns - 1) // columns
    sheet = Image.new("RGB", (columns * cell, rows * cell), (255, 0, 255))
    for number, picture in enumerate(pictures):
        sheet.paste(picture, (number % columns * cell + 2, number // columns * cell + 2))
    return sheet
