"""Shapes World: which scenes exist, which of them are never trained on, and how they are drawn."""

import itertools
import random
import zlib
from dataclasses import dataclass

from PIL import Image, ImageDraw

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (45, 80, 220),
    "yellow": (245, 205, 30),
    "purple": (140, 50, 170),
    "orange": (245, 130, 30),
}
SHAPES = ("circle", "square", "triangle")
BACKGROUNDS = {"white": (245, 245, 245), "black": (20, 20, 20), "gray": (150, 150, 150)}
# Where the first thing lies as seen from the second; y grows downwards.
RELATIONS = {
    "above": (0, -1),
    "below": (0, 1),
    "to the left of": (-1, 0),
    "to the right of": (1, 0),
}
OPPOSITES = {"below": "above", "to the right of": "to the left of"}

PICTURE_SIZE = 128  # pixels, both sides
SINGLES_SHARE = 0.2  # of random scenes
HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Thing:
    color: str
    shape: str

    def __str__(self) -> str:
        article = "an" if self.color[0] in "aeiou" else "a"
        return f"{article} {self.color} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """One thing, or two and where the first lies as seen from the second."""

    things: tuple[Thing, ...]
    relation: str | None
    background: str

    def __str__(self) -> str:
        background = f"on a {self.background} background"
        if self.relation is None:
            return f"{self.things[0]} {background}"
        return f"{self.things[0]} {self.relation} {self.things[1]} {background}"


def all_scenes() -> list[Scene]:
    """Every scene there is, one thing first, in a fixed order."""
    things = [Thing(color, shape) for color in COLORS for shape in SHAPES]
    singles = [Scene((thing,), None, back) for thing in things for back in BACKGROUNDS]
    pairs = [
        Scene((first, second), relation, back)
        for first, second in itertools.product(things, things)
        for relation in RELATIONS
        for back in BACKGROUNDS
    ]
    return singles + pairs


def is_held_out(scene: Scene) -> bool:
    """Whether the scene belongs to the tenth of two-thing combinations that training never sees.

    The background plays no part, and "a above b" goes with "b below a": a held-out picture
    does not come back in training under another name.
    """
    if scene.relation is None:
        return False
    first, second, relation = *scene.things, scene.relation
    if relation in OPPOSITES:
        first, second, relation = second, first, OPPOSITES[relation]
    return zlib.crc32(f"{first} {relation} {second}".encode()) % HELD_OUT_ONE_IN == 0


_SCENES = all_scenes()
TRAINING_SINGLES = [scene for scene in _SCENES if scene.relation is None]
TRAINING_PAIRS = [scene for scene in _SCENES if scene.relation and not is_held_out(scene)]
HELD_OUT = [scene for scene in _SCENES if is_held_out(scene)]


def training_scene(rng: random.Random) -> Scene:
    return rng.choice(TRAINING_SINGLES if rng.random() < SINGLES_SHARE else TRAINING_PAIRS)


def draw(
    scene: Scene, rng: random.Random, size: int = PICTURE_SIZE, variety: float = 1.0
) -> Image.Image:
    """Paint the scene, with a little chance in place and size; an RGB picture, `size` square."""
    smooth = 4  # drawn larger and averaged down: ImageDraw does not smooth edges
    picture = Image.new("RGB", (size * smooth, size * smooth), BACKGROUNDS[scene.background])
    pen = ImageDraw.Draw(picture)
    for thing, (x, y), radius in _layout(scene, rng, variety):
        scale = size * smooth
        _draw_thing(pen, thing, x * scale, y * scale, radius * scale)
    return picture.reduce(smooth)


def _layout(
    scene: Scene, rng: random.Random, variety: float
) -> list[tuple[Thing, tuple[float, float], float]]:
    """Each thing with its centre and radius, as fractions of the picture's side."""
    if scene.relation is None:
        centers, radius = [(0.5, 0.5)], 0.25
    else:
        dx, dy = RELATIONS[scene.relation]
        centers, radius = (
            [(0.5 + 0.225 * sign * dx, 0.5 + 0.225 * sign * dy) for sign in (1, -1)],
            0.17,
        )
    placed = []
    for thing, (x, y) in zip(scene.things, centers, strict=True):
        shift, growth = 0.02 * variety, 0.07 * variety
        center = (x + rng.uniform(-shift, shift), y + rng.uniform(-shift, shift))
        placed.append((thing, center, radius * rng.uniform(1 - growth, 1 + growth)))
    return placed


def _draw_thing(pen: ImageDraw.ImageDraw, thing: Thing, x: float, y: float, radius: float) -> None:
    fill = COLORS[thing.color]
    if thing.shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    elif thing.shape == "square":
        half = 0.88 * radius
        pen.rectangle((x - half, y - half, x + half, y + half), fill=fill)
    else:
        top, base, half = y - radius, y + 0.8 * radius, radius
        pen.polygon([(x, top), (x - half, base), (x + half, base)], fill=fill)
