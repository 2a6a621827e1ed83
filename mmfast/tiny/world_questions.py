"""What can be asked about an endless world, and the ways to word it."""

from __future__ import annotations

from dataclasses import dataclass

from mmfast.tiny.questions import Fact
from mmfast.tiny.world import World
from mmfast.tiny.world_scene import present_facts

# Kinds of question about the present, by the kind of what is on screen.
NOW = {name: f"{name} now" for name in ("colour", "shape", "position", "count", "number")}
PAST = ("entry", "corner")
KINDS = (*PAST, *NOW.values())

PAST_WORDINGS = {
    "entry": ("What number is at the {0}?", "Which number is at the {0}?"),
    "corner": ("In which corner is the {0}?", "Where is the {0}?"),
}
NOW_WORDINGS = {
    "colour": ("What colour is the {0} now?", "Which colour does the {0} have now?"),
    "shape": ("What shape is the {0} object now?", "Which shape does the {0} object have now?"),
    "position": ("Where is the {0} now?", "In which corner is the {0} now?"),
    "count": ("How many objects are there now?", "How many shapes can you see now?"),
    "number": ("What number is on the screen now?", "Which number is shown now?"),
}


@dataclass(frozen=True)
class Question:
    """A question that has one right answer at the moment it is asked.

    Attributes:
        kind: One of KINDS.
        text: What is asked.
        answer: The right answer.
        asked: When, in seconds.
        shown: When what it asks about was last on screen; `asked` for the present.
    """

    kind: str
    text: str
    answer: str
    asked: float
    shown: float

    @property
    def age(self) -> float:
        """Seconds since the answer could last be seen."""
        return self.asked - self.shown


def now_text(fact: Fact, wording: int) -> str:
    """A question about the present in one of the wordings of its kind."""
    words = NOW_WORDINGS[fact.kind]
    return words[wording % len(words)].format(*fact.slots)


def past_text(kind: str, name: str, wording: int) -> str:
    """A question about a fact in one of the wordings of its kind."""
    words = PAST_WORDINGS[kind]
    return words[wording % len(words)].format(name)


def present_questions(world: World, time: float) -> list[Question]:
    """All that can be asked about what is on screen at a time."""
    found = present_facts(world.at(time))
    return [
        Question(NOW[fact.kind], now_text(fact, i), fact.answer, time, time)
        for i, fact in enumerate(found)
    ]


def past_questions(world: World, time: float) -> list[Question]:
    """All that can be asked at a time about the facts shown until then, oldest first.

    A fact's name appears at no other moment of a world, so the answers hold for ever after.
    """
    found = []
    for i, event in enumerate(world.events(time)):
        for kind, answer in (("entry", str(event.number)), ("corner", event.corner)):
            shown = min(event.stop, time)
            found.append(Question(kind, past_text(kind, event.name, i), answer, time, shown))
    return found
