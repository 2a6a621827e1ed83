"""Short conversations whose replies depend on what was said before."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mmfast.core.speech import Turn
from mmfast.tiny.speech import text as domain
from mmfast.tiny.speech.rules import COLOURS, NAMES, OPPOSITES, SHAPES

Memory = dict[str, str]
Exchange = tuple[str, str]


class _State(NamedTuple):
    """What a speaker of the next exchange knows."""

    rng: np.random.Generator
    split: domain.Split
    turns: list[Turn]
    memory: Memory

    def pick(self, choices: tuple[str, ...]) -> str:
        return choices[int(self.rng.integers(len(choices)))]

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))


def _sum(state: _State) -> Exchange:
    a, b = state.number(0, 10), state.number(0, 10)
    way = state.number(0, 5)
    if way == 0:
        a, b = state.number(2, 6), state.number(2, 6)
        sign, result = "times", a * b
    elif way <= 2:
        a += b
        sign, result = "minus", a - b
    else:
        sign, result = "plus", a + b
    asked = f"{domain.number_words(a)} {sign} {domain.number_words(b)}"
    return f"what is {asked}?", f"{asked} is {domain.number_words(result)}."


def _neighbour(state: _State) -> Exchange:
    number, step = state.number(1, 99), state.pick(("after", "before"))
    there = domain.number_words(number + (1 if step == "after" else -1))
    here = domain.number_words(number)
    return f"what comes {step} {here}?", f"{there} comes {step} {here}."


def _count(state: _State) -> Exchange:
    start, many = state.number(0, 40), state.number(4, 5)
    row = [domain.number_words(start + i) for i in range(many)]
    return f"count from {row[0]} to {row[-1]}.", ", ".join(row) + "."


def _opposite(state: _State) -> Exchange:
    pair = list(OPPOSITES.items())[state.number(0, len(OPPOSITES) - 1)]
    one, other = pair if state.rng.random() < 0.5 else pair[::-1]
    return f"what is the opposite of {one}?", f"the opposite of {one} is {other}."


def _repeat(state: _State) -> Exchange:
    text = domain.sentence(state.rng, state.split)
    return state.pick(("repeat after me, ", "say, ")) + text, text


def _again(state: _State) -> Exchange:
    ask = state.pick(("what did you say?", "say it again, please."))
    said = next((turn.text for turn in reversed(state.turns) if turn.role == "assistant"), "")
    if not said:
        return ask, "i did not say anything."
    if said[-1] not in ".?":  # it was cut off
        said = said.rstrip(",") + "."
    return ask, (f"i said, {said}" if ask.startswith("what") else said)


def _mine(state: _State) -> Exchange:
    said = next((turn.text for turn in reversed(state.turns) if turn.role == "user"), "")
    return "what did i say?", f"you said, {said}" if said else "you did not tell me."


def _tell(state: _State) -> Exchange:
    """The user says something that can be asked for later."""
    what = state.pick(("colour", "shape", "name", "number"))
    if what == "colour":
        value = state.memory[what] = state.pick(COLOURS)
        return f"my favourite colour is {value}.", f"{value} is a nice colour."
    if what == "shape":
        value = state.memory[what] = state.pick(SHAPES)
        return f"my favourite shape is the {value}.", f"the {value} is a nice shape."
    if what == "name":
        value = state.memory[what] = state.pick(NAMES)
        return f"my name is {value}.", f"hello {value}."
    value = state.memory[what] = domain.number_words(state.number(0, 99))
    return f"remember the number {value}.", f"okay, i will remember {value}."


def _recall(state: _State) -> Exchange:
    """The user asks for what was said before, or never was."""
    known = tuple(state.memory) if state.memory and state.rng.random() < 0.85 else ()
    what = state.pick(known or ("colour", "shape", "name", "number"))
    value = state.memory.get(what)
    if what == "number":
        reply = f"the number was {value}." if value else "you did not say a number."
        return "which number did i say?", reply
    if what == "name":
        return "what is my name?", f"your name is {value}." if value else "you did not tell me."
    ask = f"what is my favourite {what}?"
    article = "the " if what == "shape" else ""
    reply = f"your favourite {what} is {article}{value}." if value else "you did not tell me."
    return ask, reply


def _clip(state: _State) -> Exchange:
    return domain.question(state.rng, state.split), "i can not see a video."


def _polite(state: _State) -> Exchange:
    pairs = (
        ("hello.", "hello, how can i help you?"),
        ("good morning.", "good morning."),
        ("good evening.", "good evening."),
        ("how are you?", "i am fine, thank you."),
        ("thank you.", "you are welcome."),
        ("stop.", "okay, i will stop."),
        ("goodbye.", "see you later."),
    )
    return pairs[state.number(0, len(pairs) - 1)]


SKILLS: dict[str, tuple[Callable[[_State], Exchange], float]] = {
    "sum": (_sum, 0.17),
    "neighbour": (_neighbour, 0.08),
    "count": (_count, 0.06),
    "opposite": (_opposite, 0.06),
    "repeat": (_repeat, 0.16),
    "again": (_again, 0.1),
    "mine": (_mine, 0.06),
    "tell": (_tell, 0.12),
    "recall": (_recall, 0.1),
    "clip": (_clip, 0.03),
    "polite": (_polite, 0.06),
}


def _cut(text: str, rng: np.random.Generator) -> str:
    """What is heard of a reply that is interrupted."""
    words = text.split()
    return " ".join(words[: int(rng.integers(1, len(words)))]) if len(words) > 1 else text


def dialogue(
    rng: np.random.Generator, split: domain.Split = "train", exchanges: int | None = None
) -> list[Turn]:
    """A conversation, user and assistant in turn; the last reply is whole.

    Args:
        rng: The source of chance.
        split: Training or evaluation; the two share no conversation, sentence or question.
        exchanges: How many questions and replies; 1 to 4 unless told (2 to 4 for evaluation).
    """
    names = list(SKILLS)
    weights = np.array([SKILLS[name][1] for name in names])
    while True:
        many = exchanges or int(rng.integers(2 if split == "eval" else 1, 5))
        state = _State(rng, split, [], {})
        for i in range(many):
            skill = SKILLS[names[int(rng.choice(len(names), p=weights / weights.sum()))]][0]
            asked, reply = skill(state)
            if i < many - 1 and rng.random() < 0.12:
                reply = _cut(reply, rng)
            state.turns.extend((Turn("user", asked), Turn("assistant", reply)))
        if many == 1 and split == "train":
            return state.turns
        if domain.split_of(" ".join(turn.text for turn in state.turns)) == split:
            return state.turns
