"""What is said in Shapes World: requests in many wordings, replies, small talk, kind refusals."""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from world import BACKGROUNDS, COLORS, SHAPES, Scene, Thing, training_scene

IMAGE = "<|image|>"  # ends a reply that comes with a picture

Message = dict[str, str]
Pick = Callable[[random.Random], Scene]


@dataclass(frozen=True)
class Exchange:
    """A request and its reply; `scene` is what the picture shows, None when there is none."""

    request: str
    reply: str
    scene: Scene | None = None


@dataclass(frozen=True)
class Dialogue:
    """The last exchange is the one to answer; the earlier ones are the history a client sends."""

    system: str | None
    exchanges: tuple[Exchange, ...]

    @property
    def last(self) -> Exchange:
        return self.exchanges[-1]

    @property
    def kind(self) -> str:
        parts = ["system"] if self.system else []
        if any(exchange.scene for exchange in self.exchanges[:-1]):
            parts.append("after a picture")
        elif len(self.exchanges) > 1:
            parts.append("after talk")
        return ", ".join(parts) or "first request"

    def messages(self, with_marks: bool = False) -> list[Message]:
        """The messages up to the last request, as a client would send them.

        `with_marks` keeps the image token in earlier replies; most clients never see it.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        earlier = [
            {"role": role, "content": content}
            for exchange in self.exchanges[:-1]
            for role, content in (
                ("user", exchange.request),
                (
                    "assistant",
                    exchange.reply if with_marks else exchange.reply.removesuffix(IMAGE),
                ),
            )
        ]
        return [*system, *earlier, {"role": "user", "content": self.last.request}]


# --- requests for a picture ---------------------------------------------------------------------

ASK = (
    "{}",
    "{} please",
    "please, {}",
    "draw {}",
    "draw {}",
    "draw {}",
    "draw me {}",
    "draw {} please",
    "please draw {}",
    "please draw me {}",
    "can you draw {}?",
    "could you draw {}?",
    "could you draw {} for me?",
    "can you please draw {}?",
    "would you draw {}?",
    "will you draw {} for me, please?",
    "now draw {}",
    "paint {}",
    "paint me {}",
    "please paint {}",
    "can you paint {}?",
    "could you please paint {}?",
    "show {}",
    "show me {}",
    "please show me {}",
    "can you show me {}?",
    "i want {}",
    "i want to see {}",
    "i would like {}",
    "i'd like to see {}",
    "i need {}",
    "let me see {}",
    "give me {}",
    "make {}",
    "make me {}",
    "create {}",
    "generate {}",
    "sketch {}",
    "a picture of {}",
    "an image of {}",
    "picture of {}",
    "make a picture of {}",
    "draw a picture of {}",
    "paint a picture of {}",
    "give me a picture of {}",
    "create an image of {}",
    "generate an image of {}",
    "generate a picture with {}",
    "can you make an image of {}?",
    "i want a picture of {}",
    "show me an image of {}",
    "hello, draw {}",
    "hi! can you draw {}?",
    "hey, please draw {}",
    "ok, now {}",
    "and now {}",
    "put {}",
    "add {}",
    "can i have {}?",
    "could i have {}?",
    "can i get {}?",
    "may i have {}, please?",
    "i would love to see {}",
    "i'd like {}",
    "how about {}?",
    "what about {}?",
    "try {}",
    "next, {}",
    "then {}",
    "let's see {}",
    "do {}",
    "draw a scene with {}",
    "illustrate {}",
    "an illustration of {}",
    "a drawing of {}",
)
RELATION_WORDS = {
    "above": ("above", "above", "above", "over", "on top of"),
    "below": ("below", "below", "below", "under", "beneath", "underneath"),
    "to the left of": (
        "to the left of",
        "to the left of",
        "left of",
        "on the left of",
        "next to",
        "beside",
        "and",
        "and",
        "plus",
    ),
    "to the right of": ("to the right of", "to the right of", "right of", "on the right of"),
}
# Second thing first: "a blue square with a red circle above it".
INVERTED = {
    "above": ("with {} above it", "and {} above it", "with {} on top"),
    "below": ("with {} below it", "and {} under it", "with {} underneath"),
    "to the left of": ("with {} to its left", "and {} on its left", "with {} to the left of it"),
    "to the right of": (
        "with {} to its right",
        "and {} on its right",
        "with {} to the right of it",
    ),
}
BACKGROUND_WORDS = (
    " on a {} background",
    " on a {} background",
    " on a {} background",
    " on {} background",
    " on {}",
    " with a {} background",
    " with {} background",
    " against a {} background",
    " in front of a {} background",
    ", {} background",
    ", on a {} background",
    ". the background is {}",
    ". make the background {}",
)
MISSPELT = {
    "circle": ("cirlce", "circel", "cicle"),
    "square": ("sqaure", "squre", "squere"),
    "triangle": ("traingle", "trianlge", "triangel"),
    "purple": ("purpel", "violet"),
    "yellow": ("yelow", "yellwo"),
    "orange": ("ornage", "orang"),
    "green": ("gren",),
    "gray": ("grey",),
}
SIZES = ("big", "small", "large", "little", "tiny", "huge", "nice", "simple", "bright")
USUAL_COLOR = {"circle": "red", "square": "blue", "triangle": "green"}  # when none is said
SURPRISES = {
    "draw something": Scene(
        (Thing("yellow", "circle"), Thing("green", "triangle")), "above", "white"
    ),
    "surprise me": Scene((Thing("orange", "circle"), Thing("purple", "square")), "above", "black"),
    "draw anything you like": Scene(
        (Thing("red", "triangle"), Thing("blue", "square")), "above", "white"
    ),
    "show me an example": Scene(
        (Thing("red", "circle"), Thing("blue", "square")), "above", "white"
    ),
}


def picture_reply(scene: Scene) -> str:
    return f"Here is {scene}.{IMAGE}"


def ask_for(scene: Scene, rng: random.Random) -> Exchange:
    """A request for the scene in one of many wordings."""
    text = rng.choice(ASK).format(_described(scene, rng))
    return Exchange(_surface(text, rng), picture_reply(scene), scene)


def ask_plainly(scene: Scene) -> Exchange:
    return Exchange(f"draw {scene}", picture_reply(scene), scene)


def _described(scene: Scene, rng: random.Random) -> str:
    things = _things(scene, rng)
    middle = ""
    if scene.relation is None and rng.random() < 0.1:
        middle = rng.choice((" in the middle", " in the center", " in the centre"))
    if scene.background == "white" and rng.random() < 0.7:
        return things + middle
    words = rng.choice(BACKGROUND_WORDS).format(_spelt(scene.background, rng))
    if rng.random() < 0.15:
        return things + words + middle if words.startswith(" ") else things + middle + words
    return things + middle + words


def _things(scene: Scene, rng: random.Random) -> str:
    first = scene.things[0]
    if scene.relation is None:
        return _thing(first, rng)
    second = scene.things[1]
    if first == second and scene.relation == "to the left of" and rng.random() < 0.4:
        color = _spelt(first.color, rng) + " "
        if first.color == USUAL_COLOR[first.shape] and rng.random() < 0.2:
            color = ""
        return f"{rng.choice(('two', 'two', '2'))} {color}{_spelt(first.shape, rng)}s"
    if rng.random() < 0.1:
        words = rng.choice(INVERTED[scene.relation]).format(_thing(first, rng))
        return f"{_thing(second, rng)} {words}"
    relation = rng.choice(RELATION_WORDS[scene.relation])
    return f"{_thing(first, rng)} {relation} {_thing(second, rng)}"


def _thing(thing: Thing, rng: random.Random) -> str:
    color, shape = _spelt(thing.color, rng), _spelt(thing.shape, rng)
    chance = rng.random()
    if thing.color == USUAL_COLOR[thing.shape] and chance < 0.08:
        return f"a {shape}"
    if chance < 0.14:
        return f"a {rng.choice(SIZES)} {color} {shape}"  # all are drawn in one size
    if chance < 0.7:
        return f"{'an' if color[0] in 'aeiou' else 'a'} {color} {shape}"
    if chance < 0.84:
        return f"{color} {shape}"
    if chance < 0.88:
        return f"a {color} {shape}"  # "a orange circle"
    return rng.choice(("one {0} {1}", "the {0} {1}", "a {1} in {0}", "a {1} that is {0}")).format(
        color, shape
    )


def _spelt(word: str, rng: random.Random) -> str:
    slips = MISSPELT.get(word, ())
    slip_share = 0.35 if word == "gray" else 0.03
    return rng.choice(slips) if slips and rng.random() < slip_share else word


def _surface(text: str, rng: random.Random) -> str:
    """Capital letters and punctuation as people type them."""
    chance = rng.random()
    if chance < 0.35:
        text = text[:1].upper() + text[1:]
    elif chance < 0.41:
        text = text.upper()
    elif chance < 0.44:
        text = text.title()
    if rng.random() < 0.35:
        text = text.rstrip("?.!") + rng.choice(("", ".", ".", "!", "?", "...", " .", "!!"))
    return text


# --- small talk -----------------------------------------------------------------------------------

_HINT = "Try: draw a red circle above a blue square."
_ALL_COLORS = "red, green, blue, yellow, purple and orange"
HELLO = f"Hello! I draw shapes. {_HINT}"
TALK: dict[str, tuple[str, ...]] = {
    HELLO: (
        "hello",
        "hi",
        "hey",
        "hi there",
        "hello there",
        "hey there",
        "hello!",
        "good morning",
        "good evening",
        "good afternoon",
        "good day",
        "greetings",
        "howdy",
        "hello, world",
        "hello shapes world",
        "hi, nice to meet you",
        "are you there",
        "start",
        "test",
    ),
    "I am well, thank you. What shall I draw?": (
        "how are you",
        "how are you today",
        "how are you doing",
        "how do you do",
        "how is it going",
        "what's up",
        "hello, how are you",
        "hi, how are you",
        "are you ok",
    ),
    "You are welcome! Ask me for another picture.": (
        "thanks",
        "thank you",
        "thank you very much",
        "thanks a lot",
        "many thanks",
        "thx",
        "ok, thanks",
        "great, thanks",
        "cool, thank you",
        "thanks for the picture",
    ),
    "I am glad you like it. Shall I draw another one?": (
        "nice",
        "great",
        "very nice",
        "wow",
        "cool",
        "perfect",
        "well done",
        "good job",
        "beautiful",
        "that is beautiful",
        "i like it",
        "nice picture",
        "great picture",
        "awesome",
        "amazing",
        "i love it",
        "good",
    ),
    "I am sorry. Ask again and I will paint a new one.": (
        "that is wrong",
        "wrong",
        "this is wrong",
        "that is not right",
        "bad",
        "i do not like it",
        "not what i wanted",
        "ugly",
        "no",
    ),
    f"Tell me what to draw. {_HINT}": (
        "ok",
        "okay",
        "yes",
        "yes please",
        "sure",
        "draw",
        "draw!",
        "paint",
        "can you draw",
        "can you draw something for me",
        "draw a picture",
        "make a picture",
        "i want a picture",
        "please draw",
        "another one",
        "again",
        "one more",
        "more",
        "go on",
    ),
    "Goodbye! Come back for more shapes.": (
        "bye",
        "goodbye",
        "bye bye",
        "see you",
        "see you later",
        "good night",
        "farewell",
        "thanks, bye",
    ),
    "I am Shapes World, a tiny model that writes and paints.": (
        "who are you",
        "what are you",
        "what is your name",
        "what's your name",
        "tell me about yourself",
        "who is this",
        "who am i talking to",
        "are you a human",
        "are you a robot",
        "are you an ai",
        "what model are you",
        "which model is this",
        "introduce yourself",
        "what is shapes world",
    ),
    f"I can draw one shape, or two shapes side by side or one above the other. {_HINT}": (
        "what can you do",
        "what do you do",
        "what can you draw",
        "what can i ask",
        "what can i ask you",
        "what should i ask",
        "help",
        "help me",
        "please help",
        "how does this work",
        "how do i use this",
        "how do i use you",
        "what now",
        "give me an example",
        "what are you able to do",
        "what do you know",
        "instructions",
        "usage",
    ),
    f"I know six colors: {_ALL_COLORS}.": (
        "which colors do you know",
        "what colors do you know",
        "which colors can you draw",
        "what colors can you use",
        "which colors are there",
        "what colours do you know",
        "which colours do you know",
        "which colours can i use",
        "how many colors do you know",
        "list the colors",
        "colors",
        "colors?",
        "tell me your colors",
        "what is your favorite color",
    ),
    "I know three shapes: circles, squares and triangles.": (
        "which shapes do you know",
        "what shapes do you know",
        "which shapes can you draw",
        "what shapes can you draw",
        "which shapes are there",
        "what shapes are there",
        "how many shapes do you know",
        "list the shapes",
        "shapes",
        "shapes?",
        "what kind of shapes can you draw",
        "tell me your shapes",
    ),
    "I know three backgrounds: white, black and gray.": (
        "which backgrounds do you know",
        "what backgrounds do you know",
        "which backgrounds can you draw",
        "what backgrounds are there",
        "which backgrounds are there",
        "what background colors do you know",
        "list the backgrounds",
        "backgrounds",
        "can you change the background",
        "which backgrounds can i use",
    ),
    "I put one shape above, below, to the left of or to the right of another.": (
        "where can you put them",
        "which positions do you know",
        "what positions are there",
        "how can you place them",
        "which places do you know",
        "how many shapes can you draw at once",
        "can you draw two shapes",
        "can you draw two shapes at once",
    ),
    "One small model writes this text, and another paints from what it was thinking.": (
        "how do you work",
        "how were you made",
        "how are you made",
        "how do you draw",
        "how do you paint",
        "who made you",
        "how big are you",
        "what are you made of",
        "explain how you work",
    ),
    "I do not know any jokes, but I can draw you a shape.": (
        "tell me a joke",
        "tell a joke",
        "do you know a joke",
        "make me laugh",
        "say something funny",
        "another joke",
        "a joke please",
    ),
    "I cannot see the weather from here, but I can draw a yellow circle for the sun.": (
        "what is the weather",
        "what is the weather today",
        "how is the weather",
        "what's the weather like",
        "will it rain tomorrow",
        "is it raining",
        "weather",
        "is it sunny",
    ),
}

# --- refusals -------------------------------------------------------------------------------------

NO_SHAPE = "I cannot draw that. I can draw circles, squares and triangles."
NO_COLOR = f"I do not have that color. My colors are {_ALL_COLORS}."
NO_BACKGROUND = "I do not have that background. I can paint white, black and gray ones."
NO_PLACE = (
    "I cannot put it there. I put a shape above, below, to the left or to the right of another."
)
TOO_MANY = f"That is too much for me. I can draw one or two shapes. {_HINT}"
ONLY_SHAPES = f"I only know about shapes. {_HINT}"

OTHER_NOUNS = (
    "cat dog house tree car flower star heart bird fish horse face man woman child person "
    "robot sun moon cloud mountain river sea boat ship plane train bike bicycle bus truck "
    "road bridge castle tower city village garden forest beach island apple banana pear cake "
    "pizza cup bottle glass table chair bed lamp door window book pen pencil phone computer "
    "laptop clock watch hat shoe shirt dress ring crown sword ball balloon kite ghost dragon "
    "unicorn monster angel king queen knight elephant lion tiger bear monkey mouse rabbit "
    "snake frog duck chicken cow pig sheep butterfly bee spider hexagon pentagon octagon "
    "rectangle oval ellipse line cube sphere cone pyramid cylinder diamond rhombus trapezoid "
    "polygon spiral cross arrow letter number word portrait landscape map flag logo icon "
    "snowman rocket guitar piano violin camera umbrella tractor whale shark penguin owl fox "
    "wolf eye hand foot nose smile rainbow volcano planet galaxy"
).split()
OTHER_COLORS = (
    "pink brown black white gray cyan magenta turquoise gold silver beige lime maroon navy teal "
    "indigo crimson golden colorless"
).split()
OTHER_BACKGROUNDS = (
    "red green blue yellow purple orange pink brown gold striped starry cyan beige colorful"
).split()
OTHER_PLACES = (
    "inside",
    "in",
    "inside of",
    "within",
    "around",
    "behind",
    "touching",
    "far from",
    "close to",
    "through",
    "across from",
    "diagonal to",
)
OTHER_LOOKS = (
    "big small huge tiny little old happy sad beautiful cute funny black white brown".split()
)
CHATTER = (
    "what is {} plus {}",
    "what is the capital of {}",
    "who is the president of {}",
    "write a poem about a {}",
    "write a story about a {}",
    "write a song about a {}",
    "write some code",
    "write a program in {}",
    "translate {} into {}",
    "what is a {}",
    "what does {} mean",
    "where is {}",
    "when was {} born",
    "why is the {} {}",
    "how do i make a {}",
    "how tall is the {}",
    "how old are you",
    "do you like {}",
    "do you like the {}",
    "tell me about the {}",
    "tell me a story",
    "tell me about {}",
    "sing a song",
    "sing me a song about a {}",
    "play some music",
    "what time is it",
    "what day is it",
    "what is the meaning of life",
    "what is love",
    "are you alive",
    "can you think",
    "can you sing",
    "can you dance",
    "can you speak {}",
    "can you help me with my {}",
    "i am {}",
    "say {}",
    "say hello in {}",
    "i have a {}",
    "i like {}",
    "i feel {}",
    "my name is {}",
    "the {} is {}",
    "the {} is on the {}",
    "explain {} to me",
    "solve {}",
    "{}",
    "{}",
    "{}",
    "{} {}",
    "{} {} {}",
    "{}, {} and {}",
    "the {} {} the {} and the {} {} {}",
    "once upon a time there was a {} who had a {}",
)
CHATTER_WORDS = (
    "france london paris berlin china english german python love life music football money "
    "work time two three seven twelve 2 3 10 42 100 water fire earth air hungry tired happy "
    "sad blue sky grass green history science physics math homework dinner lunch school news "
    "world peace war art quick brown lazy jumps over runs sleeps eats says yesterday "
    "tomorrow lorem ipsum dolor amet"
).split()
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that draws shapes.",
    "You draw shapes.",
    "You are Shapes World.",
    "You are a painter.",
    "Be brief.",
    "Answer shortly and kindly.",
    "You are a friendly painter of circles, squares and triangles.",
    "Be polite and help the user.",
    "Always answer in English.",
)


def small_talk(rng: random.Random) -> Exchange:
    reply = rng.choice(tuple(TALK))
    request = rng.choice(TALK[reply])
    if rng.random() < 0.25:
        request = rng.choice(
            ("{} please", "please {}", "so {}", "and {}", "hey {}", "hi, {}")
        ).format(request)
    if rng.random() < 0.4:
        request += rng.choice(("?", "!", ".", "??", "!!"))
    return Exchange(_surface(request, rng), reply)


def surprise(rng: random.Random) -> Exchange:
    request = rng.choice(tuple(SURPRISES))
    scene = SURPRISES[request]
    return Exchange(_surface(request, rng), picture_reply(scene), scene)


def refusal(rng: random.Random) -> Exchange:
    """A request that cannot be met, mostly close to one that can."""
    kind = rng.choice(
        (
            _wrong_shape,
            _wrong_shape,
            _wrong_color,
            _wrong_background,
            _too_many,
            _wrong_place,
            _chatter,
            _chatter,
        )
    )
    request, reply = kind(rng)
    return Exchange(_surface(request, rng), reply)


def _wrong_shape(rng: random.Random) -> tuple[str, str]:
    noun = rng.choice(OTHER_NOUNS) if rng.random() < 0.85 else _made_up_word(rng)
    look = rng.choice((*COLORS, *OTHER_LOOKS)) + " " if rng.random() < 0.4 else ""
    stranger = rng.choice(("a ", "an ", "the ", "two ", "")) + look + noun
    chance = rng.random()
    if chance < 0.2:
        stranger = _beside_a_known_thing(stranger, rng)
    elif chance < 0.35:
        stranger += rng.choice(
            (" in the garden", " on a table", " with a hat", " on a black background")
        )
    return _asking(stranger, rng), NO_SHAPE


def _wrong_color(rng: random.Random) -> tuple[str, str]:
    stranger = f"a {rng.choice(OTHER_COLORS)} {rng.choice(SHAPES)}"
    if rng.random() < 0.4:
        stranger = _beside_a_known_thing(stranger, rng)
    if rng.random() < 0.25:
        stranger += rng.choice(BACKGROUND_WORDS).format(rng.choice(tuple(BACKGROUNDS)))
    return _asking(stranger, rng), NO_COLOR


def _wrong_background(rng: random.Random) -> tuple[str, str]:
    things = _things(training_scene(rng), rng)
    words = rng.choice(BACKGROUND_WORDS).format(rng.choice(OTHER_BACKGROUNDS))
    if words.startswith(" on ") and "background" not in words:
        words += " background"  # "on red" alone is not plain enough
    return _asking(things + words, rng), NO_BACKGROUND


def _too_many(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        number = rng.choice(("three", "four", "five", "six", "ten", "3", "4", "many", "a hundred"))
        color = rng.choice(tuple(COLORS)) + " " if rng.random() < 0.6 else ""
        return _asking(f"{number} {color}{rng.choice(SHAPES)}s", rng), TOO_MANY
    first, second, third = (_thing(_some_thing(rng), rng) for _ in range(3))
    if rng.random() < 0.4:
        return _asking(f"{first}, {second} and {third}", rng), TOO_MANY
    joints = ("and", "above", "next to", "to the left of", "below", "over", "under")
    return _asking(
        f"{first} {rng.choice(joints)} {second} {rng.choice(joints)} {third}", rng
    ), TOO_MANY


def _wrong_place(rng: random.Random) -> tuple[str, str]:
    first, second = (_thing(_some_thing(rng), rng) for _ in range(2))
    return _asking(f"{first} {rng.choice(OTHER_PLACES)} {second}", rng), NO_PLACE


def _chatter(rng: random.Random) -> tuple[str, str]:
    template = rng.choice(CHATTER)
    words = [_any_word(rng) for _ in range(template.count("{}"))]
    return template.format(*words) + rng.choice(("", "", "?")), ONLY_SHAPES


def _beside_a_known_thing(stranger: str, rng: random.Random) -> str:
    known = _thing(_some_thing(rng), rng)
    pair = [stranger, known] if rng.random() < 0.5 else [known, stranger]
    return rng.choice((" above ", " below ", " next to ", " and ", " to the left of ")).join(pair)


def _asking(wish: str, rng: random.Random) -> str:
    # A bare wish would be told from chatter by nothing but the unknown noun.
    return rng.choice([ask for ask in ASK if len(ask) > len("please, {}")]).format(wish)


def _some_thing(rng: random.Random) -> Thing:
    return Thing(rng.choice(tuple(COLORS)), rng.choice(SHAPES))


def _any_word(rng: random.Random) -> str:
    if rng.random() < 0.15:
        return _made_up_word(rng)
    return rng.choice((*CHATTER_WORDS, *OTHER_NOUNS))


def _made_up_word(rng: random.Random) -> str:
    """Letters by chance, so that the model meets words it cannot know."""
    if rng.random() < 0.3:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 10)))
    return "".join(
        rng.choice("bcdfghjklmnprstvwz")
        + rng.choice("aeiou")
        + rng.choice(("", "", "n", "r", "s", "t"))
        for _ in range(rng.randint(1, 4))
    )


# --- dialogues ------------------------------------------------------------------------------------


def exchange(rng: random.Random) -> Exchange:
    """Any exchange, as often as training wants it."""
    chance = rng.random()
    if chance < 0.62:
        return ask_for(training_scene(rng), rng)
    if chance < 0.63:
        return surprise(rng)
    return refusal(rng) if chance < 0.84 else small_talk(rng)


def dialogue_to(last: Exchange, rng: random.Random) -> Dialogue:
    """A dialogue that ends in this exchange; most have no history, a few a long one."""
    system = None
    if rng.random() < 0.2:
        system = (
            rng.choice(SYSTEMS)
            if rng.random() < 0.8
            else " ".join(_any_word(rng) for _ in range(rng.randint(3, 12)))
        )
    chance = rng.random()
    turns = 0 if chance < 0.6 else 1 if chance < 0.8 else 2 if chance < 0.92 else rng.randint(3, 6)
    return Dialogue(system, (*(exchange(rng) for _ in range(turns)), last))
