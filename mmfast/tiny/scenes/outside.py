"""Material outside the world: questions and pictures, and the one answer that both get."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmfast.tiny.scenes import figures, looks, nouns, wordings
from mmfast.tiny.scenes.questions import FORMS, KEPT, plural
from mmfast.tiny.scenes.sayings import saying, sayings
from mmfast.tiny.video.questions import parse_grammar
from mmfast.tiny.video.scene import COLOURS, DIRECTIONS, FRAMES, SHAPES, Bytes, Floats

REFUSAL = "I only know moving shapes, numbers and colours."

# The last rule of each pair is kept back from training.
_RULES = parse_grammar("""
asked =
    Who wrote {thing}? | What is the capital of {place}? | How old is the {person}?
    | What is the {person} doing? | Is there a {thing} in the picture?
    | How many {thing}s are there?
    | What colour is the {thing}? | What is the {person} wearing? | Where was this filmed?
    | What is the weather like in {place}? | Write a poem about the {thing}.
    | Tell me a joke about a {thing}. | What does the {person} say? | Who is the {person}?
    | Translate this into {tongue}. | What is the price of the {thing}? | Is the {person} happy?
    | Which brand is the {thing}? | What is {sum}? | How do I cook a {thing}? | What time is it?
    | Which language is spoken in {place}? | Who won the match? | Explain the {thing} to me.
    | What is your name? | Who made you? | How far is it to {place}? | Where is the {thing}?
    | What sound does the {thing} make? | Which year was this? | What does the sign say?
    | Why is the {person} laughing? | Does the {thing} look broken? | Hello, how are you?
    | Write a program that sorts a list. | What is the meaning of life? | Read the text aloud.
    | Is it raining in {place}? | Who is the president of {place}? | What material is the {thing}?
    | Welche Farbe hat der Hund? | Schreibe ein Gedicht. | Quelle heure est-il ? | Wie geht es dir?
    | Where does the {person} live? | Is the {thing} left of the {person}? | What is a {thing}?
    | Which way does the {person} look? | When does the {person} arrive? | Describe the {person}.
    | Which {thing} is bigger? | Give me a recipe with {thing}s. | How heavy is the {thing}?
    | Is this {place}? | What will happen next? | Is the {person} holding a {thing}?
    | What happened before the video? | Sing a song. | Give the box of the {thing}.
    | Who lives in {place}? | What colour are the eyes of the {person}? | {noise} {noise} {noise}?
    | What is the {noise}? | {noise} the {thing} {noise} {place}. | Does the {person} like {thing}s?
    | How heavy is the {known}? | Why does the {known} move? | Who drew the {known}?
    | What is the {known} made of? | Is the {known} alive? | What does the {known} want?
    | How much does the {known} cost? | Does the {known} smell? | What is the {known} thinking?
    | Is there a {thing} behind the {known}? | Does the {known} look like a {thing}?
    | What does the {known} eat? | Where can I buy a {known}? | Is the {known} holding a {thing}?
    | Is the {known} left of the {thing}? | Which is faster, the {thing} or the {person}?
    | Which appears first, the {thing} or the {person}? | How many {person}s do you see?
    | How many {thing}s and {thing}s are there? | Is there a {person} in the video?
    | Do you see a {thing}? | Can you see the {person}? | Locate the {thing}.
    | What is the bounding box of the {person}? | When does the {thing} appear?
    | Which way does the {thing} move? | What shape is the {thing}?
    | In which corner is the {thing}?
    | What is the name of the {person}? | What is on the {thing}? | What is under the {thing}?
    | What is the {person} holding? | What is next to the {thing}? | Is the {thing} open?
    | Is it day or night? | Is it indoors or outdoors? | Which season is it? | Which room is this?
    | Which sport is this? | What is the mood of the video? | Is the video in slow motion?
    | Is there any music? | What is the title of the film? | Who is the director?
    | What is your favourite colour? | How are you today? | Can you help me with my homework?
    | What can you do? | Are you a robot? | Good morning! | Thank you very much. | Goodbye.
    | Solve {sum}. | Calculate {sum}. | How much is {sum}? | How many days has a year?
    | Write an essay about {place}. | Write a letter to the {person}. | Tell me a story.
    | Give me three facts about {place}. | What is the best {thing}? | Recommend a book.
    | How do I get to {place}? | What is the currency of {place}? | When did the war end?
    | Who invented the {thing}? | Who discovered {place}? | What is the history of the {thing}?
    | What is the difference between a {thing} and a {thing}? | How does a {thing} work?
    | How do I fix a {thing}? | How old are you? | Where do you live? | What is love?
    | What is the temperature in {place}? | What is the news today? | Set an alarm.
    | Play some music. | Turn on the {thing}. | Call the {person}. | Open the {thing}.
    | How do you say {thing} in {tongue}? | Spell {thing}. | What rhymes with {thing}?
    | What does {noise} mean? | Who is {noise}? | {noise} {noise}. | {noise}?
    | Was macht der Mann? | Was ist das? | Wo bin ich? | Guten Tag. | Que fait la femme ?
    | Bonjour. | Qu'est-ce que c'est ? | Hola, que tal? | Donde esta la casa? | Che ore sono?
kept =
    Who painted the {thing}? | Can you recommend a restaurant in {place}? | Est-ce un chat ?
    | Is the {person} married? | How tall is the {thing}? | What is the population of {place}?
    | Erzähl mir einen Witz. | Which emotion does the {person} show? | What is {sum} minus four?
    | Is there a {thing} behind the {person}? | Summarise the plot of {place}. | What year is it?
    | How much does a {thing} cost? | Whose {thing} is this? | Tell me about the war in {place}.
    | What should I eat today? | Which song is playing? | Does the {person} wear glasses?
thing =
    dog | cat | car | tree | house | table | chair | phone | book | bottle | cup | bicycle | train
    | boat | bird | horse | cow | flower | apple | banana | cake | guitar | laptop | clock | shoe
    | hat | bridge | river | mountain | cloud | window | door | bus | truck | ball | umbrella
    | knife | pizza | sandwich | camera | keyboard | lamp | bed | sofa | elephant | lion | fish
    | rabbit | rose | engine | letter | carpet | spoon | glove | ladder | castle | kettle
    | shirt | coat | bag | box | wall | floor | roof | road | street | sign | wheel | plane | ship
    | sheep | pig | duck | bear | snake | spider | monkey | tiger | mouse | orange | bread | cheese
    | egg | soup | tea | coffee | wine | beer | milk | chocolate | piano | drum | pen
    | paper | computer | television | radio | fridge | oven | stairs | garden | park | beach | sea
kept_thing =
    giraffe | scooter | violin | tractor | lemon | helmet | tower | squirrel | curtain | rocket
person =
    man | woman | child | girl | boy | teacher | doctor | player | driver | king | person | cook
    | singer | baby | nurse | soldier | lawyer | artist | student | friend | mother
    | father | brother | sister | old man | young woman | policeman | clown | judge | waiter
kept_person = dancer | pilot | farmer | queen | lady
place =
    France | Paris | Germany | London | Japan | India | Brazil | Rome | China | Egypt | New York
    | Berlin | Kenya | Canada | Spain | Italy | Moscow | Australia | Mexico | Africa | Texas | Cuba
    | Amsterdam | Chicago | the moon | Mars
kept_place = Norway | Madrid | Peru | Vienna | Hamlet
known =
    circle | square | triangle | star | cross | red circle | blue square | green triangle
    | yellow star | white cross | object | number | red star | green square | blue object
tongue = German | French | Latin | Spanish
sum = two plus two | seven times eight | 12 + 30 | 99 / 3 | the square root of 81 | 5 + 7 | 3 * 4
    | ten minus six | one hundred divided by five | 2 to the power of 10 | 17 - 9
""")
PICTURES = ("noise", "blank", "text", "empty", "shuffled", "stripes")
KEPT_PICTURES = ("stripes", "shuffled")  # never in training
PRACTICE = ("mosaic", "rings", "strokes", "checks", "torn", "tinted", "shaped")  # only in training
FIGURES = "figures"  # the kind of pictures with shapes that are in no training
FOREIGN = {"black": (12, 12, 12), "grey": (125, 125, 125), "brown": (110, 66, 30),
           "pink": (250, 160, 190), "light pink": (255, 192, 203), "orange": (255, 160, 10),
           "cyan": (10, 245, 250)}  # colours that the world has not  # fmt: skip


def question(rng: np.random.Generator, kept: bool = False) -> str:
    """A question outside the world; `kept` takes wordings and words that training never shows."""
    one = partial(wordings.one, rng=rng)
    text = one(_RULES["kept" if kept else "asked"])
    for slot in ("thing", "person", "place"):
        while f"{{{slot}}}" in text:
            words = _RULES[f"kept_{slot}" if kept else slot]
            text = text.replace(f"{{{slot}}}", one(words), 1)
    for slot in ("tongue", "sum", "known"):
        text = text.replace(f"{{{slot}}}", one(_RULES[slot]))
    while "{noise}" in text:
        text = text.replace("{noise}", _nonsense(rng), 1)
    return text


_PAIRS = ("speed", "first", "relation", "compare")
_WORLDLY = ("colour", "colour", "colour", "position", "exists", "direction", "where", "when",
            "moves", "attribute", "attribute", "part", "part", *_PAIRS)  # fmt: skip
_KINDS_OF = ("big", "small", "old", "new", "brown", "black", "pink", "grey", "orange", "other",
             "first", "wooden", *COLOURS)  # fmt: skip


def worldly(rng: np.random.Generator, kept: bool = False, said: bool = False) -> str:
    """A question of the world, but about what is outside it: "Is the sky red?".

    Every third noun is invented, so that no list of words has to know it; `said` puts it as a
    clause behind what people say first.
    """
    one = partial(wordings.one, rng=rng)

    def foreign() -> str:
        known = nouns.KEPT if kept else nouns.COMMON
        noun = nouns.invented(rng) if rng.random() < 0.35 else one(known)
        return f"{one(_KINDS_OF)} {noun}" if rng.random() < 0.25 else noun

    form, name, colour, shape = one(_WORLDLY), foreign(), one([*COLOURS]), one(SHAPES)
    slots: tuple[str, ...] = (name, "")
    if form in _PAIRS:
        other = f"{colour} {shape}" if rng.random() < 0.6 else foreign()
        pair = (name, other) if rng.random() < 0.5 else (other, name)
        slots = (*pair, "", one(("left of", "right of", "above", "below")))
    elif form == "moves":
        slots = (name, one([*DIRECTIONS]))
    elif form == "attribute":
        slots = (f"the {name}", colour if rng.random() < 0.7 else f"a {shape}")
    elif form == "part":
        slots = (plural(name),)
    words = FORMS[form][-KEPT:] if kept else FORMS[form][:-KEPT]
    numbers = sayings(form, kept)
    text = saying(form, numbers[int(rng.integers(len(numbers)))]) if said else one(words)
    return re.sub(r"\ba (?=[aeiou])", "an ", text.format(*slots))


def _nonsense(rng: np.random.Generator) -> str:
    letters = rng.integers(26, size=int(rng.integers(3, 9)))
    return "".join(string.ascii_lowercase[i] for i in letters)


def pictures(kind: str, rng: np.random.Generator) -> Bytes:
    """A clip of a kind of PICTURES on which nothing of the world is to be seen."""
    width, height = looks.CANVASES[int(rng.integers(len(looks.CANVASES)))]
    if kind == "noise":
        cell = int(rng.integers(1, 7))
        size = (FRAMES, -(-height // cell), -(-width // cell), 3 if rng.random() < 0.7 else 1)
        grain = rng.integers(0, 256, size).repeat(cell, 1).repeat(cell, 2)
        moving = rng.random() < 0.5
        frames = grain[:, :height, :width] if moving else grain[:1, :height, :width]
        return _clip(frames.astype(np.float64), height, width)
    if kind == "text":
        return _clip(_page(rng, height, width)[np.newaxis], height, width)
    if kind == "stripes":
        y, x = np.mgrid[:height, :width]
        angle, wave = rng.uniform(0, np.pi), rng.uniform(0.1, 0.8)
        on = (np.sin((np.cos(angle) * x + np.sin(angle) * y) * wave) > 0)[..., None]
        ink, paper = rng.uniform(0, 255, (2, 3))
        return _clip(np.where(on, ink, paper)[np.newaxis], height, width)
    if kind in _PATTERNS:
        return _clip(_PATTERNS[kind](rng, height, width)[np.newaxis], height, width)
    seed = int(rng.integers(2**31))
    if kind in THINGS_OF:
        return looks.draw(THINGS_OF[kind](rng, seed)).frames
    if kind == "torn":  # every row of a scene moved sideways: its colours, but no shapes
        drawn = looks.draw(looks.make_view(7, 0, seed)).frames
        high = int(rng.integers(1, 5))
        shifts = rng.integers(drawn.shape[2], size=-(-drawn.shape[1] // high)).repeat(high)
        rows = np.arange(drawn.shape[1])[:, None]
        columns = (np.arange(drawn.shape[2]) + shifts[: drawn.shape[1], None]) % drawn.shape[2]
        return np.ascontiguousarray(drawn[:, rows, columns])
    if kind == "shuffled":  # cells of a scene in another order: colours, but no shapes
        drawn = looks.draw(looks.make_view(5, 0, seed)).frames[:, :144, :144]
        cells = drawn.reshape(FRAMES, 24, 6, 24, 6, 3).transpose(0, 1, 3, 2, 4, 5)
        mixed = cells.reshape(FRAMES, 576, 6, 6, 3)[:, rng.permutation(576)]
        mixed = mixed.reshape(FRAMES, 24, 24, 6, 6, 3).transpose(0, 1, 3, 2, 4, 5)
        return np.ascontiguousarray(mixed.reshape(FRAMES, 144, 144, 3))
    background = "plain" if kind == "blank" else looks.BACKGROUNDS[int(rng.integers(1, 4))]
    tints = rng.uniform(0, 255, (3, 3)) if rng.random() < 0.7 else rng.uniform(0, 255, (3, 1))
    tints = np.broadcast_to(tints, (3, 3))
    look = looks.SceneLook(background, tints, seed, width, height, 1.0)
    return _clip(looks.backdrop(look)[None, :height, :width], height, width)


def _tinted(rng: np.random.Generator, seed: int) -> looks.SceneView:
    """A thing in a colour that the world has not, mostly before something lighter or darker."""
    view = looks.make_view(8, 0, seed, lone=True)
    ink = np.array([*FOREIGN.values()][int(rng.integers(len(FOREIGN)))], float)
    shade = (*np.clip(ink + rng.uniform(-12, 12, 3), 0, 255).tolist(),)
    greys = [g for g in (0.0, 255.0, *rng.uniform(0, 255, 6)) if np.linalg.norm(ink - g) >= 105]
    tints = view.look.tints.copy()
    if rng.random() < 0.7:
        tints[0] = greys[int(rng.integers(len(greys)))]
    look = replace(view.look, inks=dict.fromkeys(COLOURS, shade), tints=tints)
    return replace(view, look=look, scene=replace(view.scene, panel=None))


def _shaped(rng: np.random.Generator, seed: int, kept: bool) -> looks.SceneView:
    """Things of the world's colours, mostly a single one, but of a shape that it has not."""
    view = looks.make_view(8, 0, seed, lone=bool(rng.random() < 0.75), shades=True)
    known = figures.KEPT if kept else figures.TRAINED
    outlines = {shape: known[int(rng.integers(len(known)))](rng) for shape in SHAPES}
    # Of a smaller figure the corners cannot be told from those of a circle or star.
    things = (*(replace(thing, radius=max(thing.radius, 10.0)) for thing in view.scene.things),)
    scene = replace(view.scene, panel=None, things=things)
    return replace(view, scene=scene, look=replace(view.look, outlines=outlines))


# Kinds of pictures on which things can be told apart, and the view of one such picture.
THINGS_OF: dict[str, Callable[[np.random.Generator, int], looks.SceneView]] = {
    "tinted": _tinted, "shaped": partial(_shaped, kept=False), FIGURES: partial(_shaped, kept=True),
}  # fmt: skip


def _mosaic(rng: np.random.Generator, height: int, width: int) -> Floats:
    """Large tiles of random tints."""
    high, wide = (int(side) for side in rng.integers(8, 40, 2))
    tiles = rng.uniform(0, 255, (-(-height // high), -(-width // wide), 3))
    return np.asarray(tiles.repeat(high, 0).repeat(wide, 1)[:height, :width])


def _rings(rng: np.random.Generator, height: int, width: int) -> Floats:
    """Rings or rays around a point."""
    y, x = np.mgrid[:height, :width] - rng.uniform(0, 1, (2, 1, 1)) * [[[height]], [[width]]]
    rays = rng.random() < 0.3
    wave = np.arctan2(y, x) * int(rng.integers(6, 20)) if rays else np.hypot(x, y)
    on = np.sin(wave * (1 if rays else rng.uniform(0.1, 0.8))) > rng.uniform(-0.5, 0.5)
    ink, paper = rng.uniform(0, 255, (2, 3))
    return np.where(on[..., None], ink, paper)


def _strokes(rng: np.random.Generator, height: int, width: int) -> Floats:
    """Many lines from anywhere to anywhere."""
    paper = Image.new("RGB", (width, height), tuple(rng.integers(0, 256, 3).tolist()))
    pen = ImageDraw.Draw(paper)
    for _ in range(int(rng.integers(20, 120))):
        ends = (rng.uniform(-0.2, 1.2, (2, 2)) * [width, height]).ravel().tolist()
        pen.line(ends, tuple(rng.integers(0, 256, 3).tolist()), int(rng.integers(1, 6)))
    return np.asarray(paper, np.float64)


def _checks(rng: np.random.Generator, height: int, width: int) -> Floats:
    """A chessboard, sometimes leaning."""
    y, x = np.mgrid[:height, :width]
    lean, (high, wide) = rng.uniform(-0.5, 0.5), rng.uniform(3, 24, 2)
    on = (np.floor((y + lean * x) / high) + np.floor((x - lean * y) / wide)) % 2 > 0
    ink, paper = rng.uniform(0, 255, (2, 3))
    return np.where(on[..., None], ink, paper)


_PATTERNS = {"mosaic": _mosaic, "rings": _rings, "strokes": _strokes, "checks": _checks}


def _page(rng: np.random.Generator, height: int, width: int) -> Floats:
    """Lines of small print, dark on light."""
    paper = Image.new("RGB", (width, height), tuple(rng.integers(200, 256, 3).tolist()))
    pen, size = ImageDraw.Draw(paper), int(rng.integers(8, 15))
    font, ink = ImageFont.load_default(size), tuple(rng.integers(0, 90, 3).tolist())
    for line in range(4, height - size, size + 3):
        words = " ".join(_nonsense(rng) for _ in range(int(rng.integers(3, 9))))
        pen.text((int(rng.integers(2, 14)), line), words, font=font, fill=ink)
    return np.asarray(paper, np.float64)


def _clip(frames: Floats, height: int, width: int) -> Bytes:
    full = np.broadcast_to(np.clip(frames, 0, 255), (FRAMES, height, width, 3))
    return np.ascontiguousarray(full.astype(np.uint8))
