"""The painter's autoencoder: 128 x 128 pixels to a 16 x 16 latent of 8 channels and back."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor

import judge
import world
from training import Schedule, fit


@dataclass(frozen=True)
class AutoencoderSettings:
    widths: tuple[int, ...] = (16, 24, 32, 48)  # three halvings: a factor of 8
    latent_channels: int = 8
    batch: int = 8  # pictures
    small_size: int = 64  # pixels; a quarter of the work, and as good for learning the colours
    small_steps: int = 1200  # of the schedule's, at the beginning
    thing_weight: float = 6.0  # more than the ground weighs: things cover a tenth of a picture
    kl_weight: float = 1e-4  # per picture value; enough to keep the latents close to normal
    first_log_variance: float = -3.0  # of the latents; at 0 noise hides the colours for long
    checks: int = 300  # pictures painted back at the end
    schedule: Schedule = Schedule(steps=3000, peak_rate=2.5e-3, average_decay=0.99)
    polish: Schedule = Schedule(steps=1800, peak_rate=1e-3, average_decay=0.99)  # a second round
    latent_noise: float = 0.05  # of the latents' deviation, while the decoder learns alone
    like_share: float = 0.4  # of its pictures show two things of one colour, the hardest to tell
    decoder: Schedule = Schedule(steps=1500, peak_rate=1e-3, average_decay=0.99)


FULL = AutoencoderSettings()
QUICK = AutoencoderSettings(
    checks=4,
    batch=4,
    small_steps=15,
    schedule=Schedule(steps=20, peak_rate=2.5e-3, warmup=10),
    polish=Schedule(steps=5, peak_rate=1e-3, warmup=5),
    decoder=Schedule(steps=5, peak_rate=1e-3, warmup=5),
)


def train_autoencoder(out: Path, work: Path, settings: AutoencoderSettings, seed: int) -> None:
    """Train the autoencoder and save it as a diffusers model folder at `out`."""
    torch.manual_seed(seed)
    model = make_autoencoder(settings)

    def loss_at(step: int) -> Tensor:
        rng = random.Random(f"autoencoder {seed} {step}")
        size = settings.small_size if step < settings.small_steps else world.PICTURE_SIZE
        scenes = [world.training_scene(rng) for _ in range(settings.batch)]
        noise = torch.Generator().manual_seed(seed + step)
        return _loss(model, draw_batch(scenes, rng, size), settings, noise)

    first_round = settings.schedule.steps
    fit(model, loss_at, settings.schedule, work / "autoencoder.pt")
    fit(model, lambda step: loss_at(first_round + step), settings.polish, work / "polish.pt")
    standardise_latents(model, random.Random(f"statistics {seed}"))
    train_decoder(model, work, settings, seed)
    model.save_pretrained(out)
    print(f"autoencoder: {check(model, settings.checks)}", flush=True)


def train_decoder(
    model: AutoencoderKL, work: Path, settings: AutoencoderSettings, seed: int
) -> None:
    """A last round for the decoder alone: the latents stay as they are."""
    like = [s for s in world.TRAINING_PAIRS if s.things[0].color == s.things[1].color]

    def loss_at(step: int) -> Tensor:
        rng = random.Random(f"decoder {seed} {step}")
        scenes = [
            rng.choice(like) if rng.random() < settings.like_share else world.training_scene(rng)
            for _ in range(settings.batch)
        ]
        pictures = draw_batch(scenes, rng)
        latents = encode(model, pictures)
        noise = torch.Generator().manual_seed(seed + step)
        latents += settings.latent_noise * torch.randn(latents.shape, generator=noise)
        with torch.autocast("cpu", torch.bfloat16):
            painted = model.decode(latents).sample.float()
        return _error(painted, pictures, settings)

    fit(model.decoder, loss_at, settings.decoder, work / "decoder.pt")


def make_autoencoder(settings: AutoencoderSettings) -> AutoencoderKL:
    model = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * len(settings.widths),
        up_block_types=("UpDecoderBlock2D",) * len(settings.widths),
        block_out_channels=settings.widths,
        layers_per_block=1,
        latent_channels=settings.latent_channels,
        norm_num_groups=4,
        sample_size=world.PICTURE_SIZE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )
    spread = model.encoder.conv_out  # makes means, then log variances
    with torch.no_grad():
        spread.weight[settings.latent_channels :] *= 0.1
        spread.bias[settings.latent_channels :] = settings.first_log_variance
    return model


def draw_batch(
    scenes: list[world.Scene],
    rng: random.Random,
    size: int = world.PICTURE_SIZE,
    variety: float = 1.0,
) -> Tensor:
    """Pictures of the scenes, [N, 3, size, size], from -1 to 1."""
    pictures = np.stack([np.asarray(world.draw(scene, rng, size, variety)) for scene in scenes])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def _loss(
    model: AutoencoderKL,
    pictures: Tensor,
    settings: AutoencoderSettings,
    noise: torch.Generator,
) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):  # twice as fast, and no less sharp
        latent = model.encode(pictures).latent_dist
        painted = model.decode(latent.sample(noise)).sample.float()
    kl: Tensor = latent.kl().float().mean() / pictures[0].numel()
    return _error(painted, pictures, settings) + settings.kl_weight * kl


def _error(painted: Tensor, pictures: Tensor, settings: AutoencoderSettings) -> Tensor:
    chroma = pictures.amax(1, keepdim=True) - pictures.amin(1, keepdim=True)
    weight = 1 + settings.thing_weight * (chroma > 0.3)
    difference = (painted - pictures).abs()
    return (weight * (difference + 2 * difference**2)).mean() / weight.mean()


@torch.no_grad()
def encode(model: AutoencoderKL, pictures: Tensor) -> Tensor:
    """Latents as the painter meets them: scaled, [N, channels, size / 8, size / 8]."""
    latents: Tensor = model.encode(pictures).latent_dist.mode()
    latents = (latents - model.config.shift_factor) * model.config.scaling_factor
    return latents


@torch.no_grad()
def standardise_latents(model: AutoencoderKL, rng: random.Random, pictures: int = 800) -> None:
    """Fold a shift and scale per channel into the two layers next to the latent.

    After this each channel has mean 0 and deviation 1 over training pictures, so noise drowns all
    of them at the same rate, and the config's single scaling factor can be 1.
    """
    batches = range(0, pictures, 100)
    scenes = [[world.training_scene(rng) for _ in range(100)] for _ in batches]
    latents = torch.cat([encode(model, draw_batch(some, rng)) for some in scenes])
    mean, scale = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    channels = len(mean)
    last, first = model.encoder.conv_out, model.decoder.conv_in
    # The encoder's last layer makes means, then log variances, of each channel.
    last.weight[:channels] /= scale[:, None, None, None]
    last.bias[:channels] = (last.bias[:channels] - mean) / scale
    last.bias[channels:] -= 2 * scale.log()
    # The decoder's first layer pads with zeros, which stood for latents of 0 and now stand for
    # the mean: the difference at the border is what check() would show.
    first.bias += (first.weight * mean[None, :, None, None]).sum((1, 2, 3))
    first.weight *= scale[None, :, None, None]


@torch.no_grad()
def check(model: AutoencoderKL, pictures: int) -> str:
    """How many pictures the judge still knows after a way through the latent."""
    rng = random.Random("autoencoder check")
    right = 0
    error = 0.0
    for _ in range(pictures):
        scene = rng.choice(world.HELD_OUT)
        before = draw_batch([scene], rng)
        after = model.decode(model.encode(before).latent_dist.mode()).sample
        error += float((after.clamp(-1, 1) - before).abs().mean()) * 127.5 / pictures
        right += judge_scene(to_pictures(after)[0], scene) is None
    return f"paintings back judged right {right}/{pictures}, mean error {error:.2f} of 255"


def to_pictures(values: Tensor) -> list[Image.Image]:
    scaled = ((values.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(pixels) for pixels in scaled]


def judge_scene(picture: Image.Image, scene: world.Scene) -> str | None:
    """The judge's fault with the picture, None when it shows the scene."""
    things = [(thing.color, thing.shape) for thing in scene.things]
    return judge.fault(picture, things, scene.relation, scene.background)
