"""What the embedded speech model talks about, as a grammar.

A rule is a name and its alternatives; an alternative is words, punctuation marks and `<rules>`.
The same rules draw sentences and tell the recogniser of the evaluation what it may hear.
"""

from __future__ import annotations

from collections.abc import Mapping

from mmfast.tiny.stream.world import NOW_WORDINGS, PAST_WORDINGS
from mmfast.tiny.video.questions import WORDINGS

DIGITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = (
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "last")
COLOURS = ("red", "green", "blue", "yellow", "purple", "white", "black", "orange", "pink", "brown")
SHAPES = ("circle", "square", "triangle", "star", "cross")
PLURALS = ("circles", "squares", "triangles", "stars", "crosses")
DIRECTIONS = ("left", "right", "up", "down")
CORNERS = ("top left", "top right", "bottom left", "bottom right")
NAMES = (
    "anna",
    "ben",
    "david",
    "emma",
    "frank",
    "george",
    "helen",
    "jack",
    "laura",
    "maria",
    "peter",
    "susan",
)
OPPOSITES = {"left": "right", "up": "down", "top": "bottom", "big": "small", "fast": "slow"} | {
    "first": "last",
    "day": "night",
    "yes": "no",
    "black": "white",
}
CARRIERS = ("", "please tell me, ", "tell me, ", "so, ", "okay, ", "one more question, ")

_CLIP = {
    "colour": ("<shape>",),
    "shape": ("<seen colour>",),
    "count": (),
    "direction": ("<seen>",),
    "speed": ("<seen>", "<seen>"),
    "position": ("<seen>", "<end>"),
    "first": ("<seen>", "<seen>"),
    "number": (),
    "entry": ("<seen>",),
    "corner": ("<seen>",),
}


def spoken_wording(text: str) -> str:
    """A typed question as the words and marks that are said: the domain has one spelling."""
    return text.lower().replace("color ", "colour ").replace(":", ",")


def _wordings(*tables: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Every way to ask, each once, with rules for what fills it."""
    found: dict[str, None] = {}
    for table in tables:
        for kind, wordings in table.items():
            for wording in wordings:
                found[spoken_wording(wording.format(*_CLIP[kind]))] = None
    return tuple(found)


RULES: dict[str, tuple[str, ...]] = {
    "digit": DIGITS,
    "teen": TEENS,
    "tens": TENS,
    "below hundred": ("<digit>", "<teen>", "<tens>", "<tens> <digit>", "<tens> <digit>"),
    "number": (
        "zero",
        *("<below hundred>",) * 8,
        "<digit> hundred",
        *("<digit> hundred and <below hundred>",) * 4,
    ),
    "few": ("two", "three", "four", "five", "six"),
    "hour": (*DIGITS, "ten", "eleven", "twelve"),
    "minute": ("ten", "fifteen", "twenty", "twenty five", "thirty", "forty five", "fifty"),
    "clock": (
        "<hour> o'clock",
        "half past <hour>",
        "quarter past <hour>",
        "quarter to <hour>",
        "<hour> <minute>",
        "<minute> past <hour>",
    ),
    "day part": ("in the morning", "in the afternoon", "in the evening", "at night"),
    "unit": ("seconds", "minutes", "hours", "percent", "metres"),
    "colour": COLOURS,
    "seen colour": COLOURS[:6],
    "shape": SHAPES,
    "shapes": PLURALS,
    "thing": ("<colour> <shape>",),
    "seen": ("<seen colour> <shape>",),
    "sized": ("<thing>", "<thing>", "small <thing>", "big <thing>"),
    "direction": DIRECTIONS,
    "side": ("left", "right", "top", "bottom"),
    "corner": CORNERS,
    "end": ("start", "end"),
    "pace": ("slowly", "quickly", "fast"),
    "ordinal": ORDINALS,
    "name": NAMES,
    "moves": ("moves", "goes", "is going", "is moving"),
    "order": ("before", "after"),
    "motion": (
        "the <sized> <moves> <direction>.",
        "the <sized> <moves> <pace> to the <side>.",
        "the <thing> <moves> <direction>, then <direction>.",
        "the <thing> goes from the <corner> to the <corner>.",
        "the <thing> is faster than the <thing>.",
        "the <thing> moves <pace> and the <thing> stops.",
        "the <ordinal> <shape> moves <direction> after <number> seconds.",
        "first, the <thing> appears. then, the <thing> moves <direction>.",
    ),
    "position": (
        "the <sized> is in the <corner> corner.",
        "the <sized> is at the <side> of the screen.",
        "the <thing> is next to the <thing>.",
        "the <thing> is at the <corner>, and the <thing> is at the <corner>.",
        "there is a <sized> at the <side> of the video.",
        "the <thing> appears <order> the <thing>.",
        "the <ordinal> object is a <sized>.",
    ),
    "counting": (
        "there are <few> <colour> <shapes> on the screen.",
        "i can see <few> <shapes> and <few> <shapes>.",
        "the number on the screen is <number>.",
        "the number is <number>.",
        "<number> plus <number>.",
        "<number>, <number> and <number>.",
        "the answer is <number>.",
        "<number> <unit>.",
        "the video has <number> <shapes>.",
        "<number> percent of the objects are <colour>.",
    ),
    "timing": (
        "it is <clock>.",
        "it is <clock> <day part>.",
        "the video starts at <clock>.",
        "at <clock>, the <thing> moves <direction>.",
        "please wait <number> <unit>.",
        "after <number> seconds, the <thing> stops.",
        "see you at <clock>, <name>.",
        "the video ends <order> <number> minutes.",
    ),
    "talk": (
        "my favourite colour is <colour>.",
        "i like the <sized>, but not the <thing>.",
        "yes, the <thing> is <colour>.",
        "no, it is <colour>, not <colour>.",
        "hello <name>, can you see the <thing>?",
        "do you like the <thing> or the <thing>?",
        "my name is <name>, and i am <number> years old.",
        "you said <number>, not <number>.",
        "sorry, i can not see the <sized>.",
        "<name> has <few> <colour> <shapes>.",
    ),
    "quality": tuple(dict.fromkeys((*OPPOSITES, *OPPOSITES.values()))),
    "lead": ("", "repeat after me,", "say,", "you said,", "i said,"),
    "clip question": _wordings(WORDINGS, NOW_WORDINGS, PAST_WORDINGS),
    "carrier": CARRIERS,
    "short": (
        "<colour>.",
        "<shape>.",
        "<direction>.",
        "<corner>.",
        "<number>.",
        "<thing>.",
        "the <thing>.",
        "<clock>.",
    ),
}
SENTENCES = ("motion", "position", "counting", "timing", "talk")
