"""Scenes, the held-out rule, the drawer and the wordings; nothing here trains or loads a model."""

import random

import pytest

import speech
import world
from world import Scene, Thing


def test_a_tenth_of_the_pairs_is_held_out() -> None:
    pairs = [scene for scene in world.all_scenes() if scene.relation]
    assert 0.07 < len(world.HELD_OUT) / len(pairs) < 0.13
    assert not set(world.HELD_OUT) & set(world.TRAINING_PAIRS)


@pytest.mark.parametrize(
    ("relation", "opposite"), [("above", "below"), ("to the left of", "to the right of")]
)
def test_a_held_out_scene_is_held_out_said_the_other_way_round(
    relation: str, opposite: str
) -> None:
    for scene in world.HELD_OUT:
        if scene.relation == relation:
            turned = Scene(scene.things[::-1], opposite, scene.background)
            assert world.is_held_out(turned)


def test_training_scenes_are_never_held_out() -> None:
    rng = random.Random(0)
    assert not any(world.is_held_out(world.training_scene(rng)) for _ in range(2000))


def test_training_dialogues_never_ask_for_a_held_out_scene() -> None:
    rng = random.Random(1)
    for _ in range(1500):
        for exchange in speech.dialogue_to(speech.exchange(rng), rng).exchanges:
            assert exchange.scene is None or not world.is_held_out(exchange.scene)


def test_a_scene_reads_as_a_phrase() -> None:
    scene = Scene((Thing("orange", "circle"), Thing("blue", "square")), "above", "gray")
    assert str(scene) == "an orange circle above a blue square on a gray background"


def test_drawing_is_repeatable_and_of_the_right_size() -> None:
    scene = world.HELD_OUT[0]
    once, twice = (world.draw(scene, random.Random(3)) for _ in range(2))
    assert once.size == (world.PICTURE_SIZE, world.PICTURE_SIZE)
    assert once.tobytes() == twice.tobytes()
    assert once.tobytes() != world.draw(scene, random.Random(4)).tobytes()


def test_only_replies_with_a_picture_carry_the_image_token() -> None:
    rng = random.Random(2)
    for _ in range(1500):
        exchange = speech.exchange(rng)
        assert exchange.reply.endswith(speech.IMAGE) == (exchange.scene is not None)
        assert exchange.reply.count(speech.IMAGE) <= 1
        if exchange.scene:
            assert exchange.reply == f"Here is {exchange.scene}.{speech.IMAGE}"


def test_every_request_names_what_it_asks_for() -> None:
    """Colours may go unsaid only where the usual one is meant."""
    rng = random.Random(5)
    misspelt = {slip: word for word, slips in speech.MISSPELT.items() for slip in slips}
    for _ in range(1500):
        scene = world.training_scene(rng)
        text = speech.ask_for(scene, rng).request.lower()
        for slip, word in misspelt.items():
            text = text.replace(slip, word)
        for thing in scene.things:
            assert thing.shape in text
            usual = speech.USUAL_COLOR[thing.shape]
            assert thing.color in text or thing.color == usual
        assert scene.background in text or scene.background == "white"


def test_no_small_talk_has_two_replies() -> None:
    requests = [request for known in speech.TALK.values() for request in known]
    requests += list(speech.SURPRISES)
    assert len(requests) == len(set(requests))


def test_history_is_sent_as_a_client_would() -> None:
    scene = world.TRAINING_PAIRS[0]
    first, last = speech.ask_plainly(scene), speech.Exchange("thanks", "You are welcome!")
    dialogue = speech.Dialogue("Be brief.", (first, last))
    assert dialogue.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": first.request},
        {"role": "assistant", "content": f"Here is {scene}."},
        {"role": "user", "content": "thanks"},
    ]
    assert dialogue.messages(with_marks=True)[2]["content"].endswith(speech.IMAGE)
    assert dialogue.kind == "system, after a picture"
