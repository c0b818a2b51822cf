"""The judge knows drawn scenes, and is not taken in by wrong ones."""

import random

import pytest
from PIL import Image, ImageDraw

import judge
import world
from world import Scene, Thing

RED_CIRCLE, BLUE_SQUARE = Thing("red", "circle"), Thing("blue", "square")
SCENE = Scene((RED_CIRCLE, BLUE_SQUARE), "above", "white")


def fault(picture: Image.Image, scene: Scene) -> str | None:
    things = [(thing.color, thing.shape) for thing in scene.things]
    return judge.fault(picture, things, scene.relation, scene.background)


def test_drawn_scenes_are_known() -> None:
    rng = random.Random(0)
    scenes = rng.sample(world.all_scenes(), 300)
    known = sum(fault(world.draw(scene, rng), scene) is None for scene in scenes)
    assert known >= 297


@pytest.mark.parametrize(
    "other",
    [
        Scene((RED_CIRCLE, BLUE_SQUARE), "below", "white"),
        Scene((RED_CIRCLE, BLUE_SQUARE), "to the left of", "white"),
        Scene((RED_CIRCLE, BLUE_SQUARE), "above", "gray"),
        Scene((Thing("orange", "circle"), BLUE_SQUARE), "above", "white"),
        Scene((Thing("red", "square"), BLUE_SQUARE), "above", "white"),
        Scene((Thing("blue", "circle"), Thing("red", "square")), "above", "white"),
        Scene((RED_CIRCLE, Thing("purple", "square")), "above", "white"),
        Scene((RED_CIRCLE,), None, "white"),
    ],
    ids=str,
)
def test_a_picture_of_another_scene_is_refused(other: Scene) -> None:
    assert fault(world.draw(other, random.Random(1)), SCENE) is not None


def test_the_same_scene_said_the_other_way_round_is_known() -> None:
    turned = Scene((BLUE_SQUARE, RED_CIRCLE), "below", "white")
    assert fault(world.draw(SCENE, random.Random(2)), turned) is None


def test_two_like_things_are_told_apart() -> None:
    twins = Scene((RED_CIRCLE, RED_CIRCLE), "above", "black")
    picture = world.draw(twins, random.Random(3))
    assert fault(picture, twins) is None
    assert fault(picture, Scene((RED_CIRCLE,), None, "black")) is not None


@pytest.mark.parametrize(
    ("box", "color"),
    [((2, 2, 14, 14), "red"), ((58, 78, 70, 88), "green"), ((0, 0, 50, 127), "black")],
    ids=["stray patch on the ground", "patch within the square", "two grounds"],
)
def test_a_blemish_is_refused(box: tuple[int, int, int, int], color: str) -> None:
    picture = world.draw(SCENE, random.Random(4))
    ImageDraw.Draw(picture).rectangle(box, fill=color)
    assert fault(picture, SCENE) is not None


@pytest.mark.parametrize("color", ["white", "red", "gray"])
def test_an_empty_picture_shows_nothing(color: str) -> None:
    assert fault(Image.new("RGB", (128, 128), color), SCENE) is not None


def test_noise_shows_nothing() -> None:
    noise = Image.frombytes("RGB", (128, 128), random.Random(5).randbytes(128 * 128 * 3))
    assert fault(noise, SCENE) is not None
