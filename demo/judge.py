"""A rule-based recogniser of Shapes World pictures. It shares nothing with the code that draws.

It goes by hue, connected patches and the overlap of a patch with ideal outlines, so it does not
know the drawer's palette, sizes or places.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

Mask = npt.NDArray[np.bool_]

# Hue in degrees up to which a colour reaches, in order round the circle.
HUES = (
    (14, "red"),
    (39, "orange"),
    (72, "yellow"),
    (175, "green"),
    (256, "blue"),
    (330, "purple"),
    (360, "red"),
)
MIN_CHROMA = 60  # of 255; anything less colourful counts as background
MIN_THING = 0.02  # of the picture's area: a thing
MAX_STRAY = 0.004  # of the picture's area: a patch that is neither a thing nor a speck
MIN_OVERLAP = 0.8  # intersection over union with the ideal outline
MIN_CLEAN_GROUND = 0.93  # of the background's area in the background's tone
MIN_APART, MAX_ASKEW = 0.15, 0.15  # of the picture's side, between the centres


@dataclass(frozen=True)
class Seen:
    """A thing found in a picture; x and y (downwards) as fractions of the side."""

    color: str
    shape: str
    x: float
    y: float


@dataclass(frozen=True)
class View:
    background: str
    things: tuple[Seen, ...]


def look(picture: Image.Image) -> View | str:
    """What the picture shows, or why it cannot be told."""
    pixels = np.asarray(picture.convert("RGB"), dtype=np.int32)
    chroma = pixels.max(-1) - pixels.min(-1)
    colorful = chroma >= MIN_CHROMA
    background = _background(pixels, colorful)
    if background is None:
        return "no even background"
    hue = _hue(pixels)
    things: list[Seen] = []
    low = 0
    red: Mask = np.zeros_like(colorful)
    masks: dict[str, Mask] = {}
    for high, color in HUES:
        band = colorful & (hue >= low) & (hue < high)
        masks[color] = masks.get(color, red) | band
        low = high
    for color, mask in masks.items():
        for patch in _patches(mask):
            share = patch.sum() / patch.size
            if share <= MAX_STRAY:
                continue
            if share < MIN_THING:
                return f"a stray {color} patch"
            firm = patch & (chroma >= np.median(chroma[patch]) / 2)  # without the edge's blur
            shape = _shape(firm)
            if shape is None:
                return f"a {color} thing of no known shape"
            rows, columns = np.nonzero(patch)
            height, width = patch.shape
            things.append(Seen(color, shape, columns.mean() / width, rows.mean() / height))
    return View(background, tuple(things))


def fault(
    picture: Image.Image,
    things: list[tuple[str, str]],
    relation: str | None,
    background: str,
) -> str | None:
    """Why the picture does not show these (colour, shape) things so placed; None when it does."""
    view = look(picture)
    if isinstance(view, str):
        return view
    if view.background != background:
        return f"the background is {view.background}"
    found = [(seen.color, seen.shape) for seen in view.things]
    if sorted(found) != sorted(things):
        return "it shows " + (" and ".join(" ".join(pair) for pair in found) or "nothing")
    if relation is None:
        return None
    one, other = view.things
    for first, second in ((one, other), (other, one)):  # like things may stand for each other
        named = [(first.color, first.shape), (second.color, second.shape)]
        if named == things and _related(first, second, relation):
            return None
    return "the things are in other places"


def _related(first: Seen, second: Seen, relation: str) -> bool:
    right, down = first.x - second.x, first.y - second.y
    along, across = {
        "above": (-down, right),
        "below": (down, right),
        "to the left of": (-right, down),
        "to the right of": (right, down),
    }[relation]
    return along > MIN_APART and abs(across) < MAX_ASKEW


def _background(pixels: npt.NDArray[np.int32], colorful: Mask) -> str | None:
    """The tone of the colourless pixels, if nearly all of them agree."""
    tone = pixels[~colorful].mean(-1)
    if tone.size < 0.3 * colorful.size:
        return None
    shares = {
        "black": float((tone < 85).mean()),
        "gray": float(((tone >= 85) & (tone < 205)).mean()),
        "white": float((tone >= 205).mean()),
    }
    name = max(shares, key=lambda key: shares[key])
    return name if shares[name] >= MIN_CLEAN_GROUND else None


def _hue(pixels: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Hue of each pixel in degrees, [H, W]; meaningless where there is no colour."""
    red, green, blue = (pixels[..., i].astype(np.float64) for i in range(3))
    high = pixels.max(-1)
    spread = np.maximum(high - pixels.min(-1), 1)
    hue = np.where(
        high == red,
        (green - blue) / spread % 6,
        np.where(high == green, (blue - red) / spread + 2, (red - green) / spread + 4),
    )
    return np.asarray(hue * 60, dtype=np.float64)


def _patches(mask: Mask) -> Iterator[Mask]:
    """The connected patches of a mask (sharing a side), each as a mask of the same size."""
    height, width = mask.shape
    left = mask.copy()
    for start in np.argwhere(mask):
        row, column = int(start[0]), int(start[1])
        if not left[row, column]:
            continue
        patch = np.zeros_like(mask)
        left[row, column] = False
        todo = [(row, column)]
        while todo:
            row, column = todo.pop()
            patch[row, column] = True
            for r, c in (
                (row + 1, column),
                (row - 1, column),
                (row, column + 1),
                (row, column - 1),
            ):
                if 0 <= r < height and 0 <= c < width and left[r, c]:
                    left[r, c] = False
                    todo.append((r, c))
        yield patch


def _shape(patch: Mask) -> str | None:
    """The outline, fitted into the patch's bounding box, that the patch fills best."""
    rows, columns = np.nonzero(patch)
    box = patch[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    height, width = box.shape
    if not 0.75 < height / width < 1.33:
        return None
    down = (np.arange(height)[:, None] + 0.5) / height
    right = (np.arange(width)[None, :] + 0.5) / width
    outlines = {
        "circle": (down - 0.5) ** 2 + (right - 0.5) ** 2 <= 0.25,
        "square": np.ones_like(box),
        "triangle": np.abs(right - 0.5) <= down / 2,
    }
    overlaps = {
        shape: float((box & outline).sum() / (box | outline).sum())
        for shape, outline in outlines.items()
    }
    best = max(overlaps, key=lambda shape: overlaps[shape])
    return best if overlaps[best] >= MIN_OVERLAP else None
