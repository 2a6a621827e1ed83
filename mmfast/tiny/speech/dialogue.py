"""Exchanges of the embedded voice: questions in many wordings, and their right replies.

A conversation is text: it is heard and said by other parts of the model. Whether an exchange is for
training or for evaluation follows from the checksum of its question, as with sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmfast.core.speech import Turn
from mmfast.tiny.speech.text import (
    RULES,
    Split,
    number_words,
    question,
    sentence,
    split_of,
    words_of,
)
from mmfast.tiny.video.questions import parse_grammar

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september",
    "october", "november", "december",
)  # fmt: skip
OPPOSITES = {
    "left": "right", "up": "down", "top": "bottom", "big": "small", "fast": "slow",
    "first": "last", "day": "night", "yes": "no", "black": "white", "hot": "cold", "old": "young",
    "good": "bad", "open": "closed", "high": "low", "long": "short", "full": "empty",
    "happy": "sad", "hard": "soft", "wet": "dry", "rich": "poor", "early": "late", "near": "far",
    "light": "dark", "loud": "quiet", "clean": "dirty", "true": "false", "in": "out",
    "on": "off", "before": "after", "strong": "weak", "thick": "thin", "north": "south",
    "east": "west", "summer": "winter", "always": "never", "more": "less", "hello": "goodbye",
    "front": "back", "start": "end", "man": "woman", "love": "hate",
}  # fmt: skip
THINGS = {
    "the sky": "blue", "the sea": "blue", "grass": "green", "a leaf": "green", "a frog": "green",
    "snow": "white", "milk": "white", "salt": "white", "the sun": "yellow", "a banana": "yellow",
    "a lemon": "yellow", "blood": "red", "a tomato": "red", "a cherry": "red",
    "a strawberry": "red", "coal": "black", "the night": "black", "an orange": "orange",
    "a carrot": "orange", "chocolate": "brown", "wood": "brown", "a pig": "pink",
    "a cucumber": "green",
}  # fmt: skip
MIXED = {
    ("red", "yellow"): "orange", ("blue", "yellow"): "green", ("red", "blue"): "purple",
    ("red", "white"): "pink", ("black", "white"): "grey",
}  # fmt: skip
AMOUNTS = {
    "days in a week": "seven", "months in a year": "twelve", "hours in a day": "twenty four",
    "minutes in an hour": "sixty", "seconds in a minute": "sixty",
    "sides in a triangle": "three", "sides in a square": "four", "weeks in a year": "fifty two",
}  # fmt: skip
NAMES = (
    "anna", "ben", "david", "emma", "frank", "george", "helen", "jack", "laura", "maria", "peter",
    "susan", "tom", "lisa", "paul", "mary", "john", "james", "sarah", "mark", "lucy", "oliver",
    "sophie", "daniel", "alice", "henry", "sam", "kate", "max", "julia", "robert", "linda",
    "michael", "nina", "alex", "clara", "leo", "mia", "adam", "eva", "noah", "lily",
)  # fmt: skip
ANIMALS = ("dog", "cat", "horse", "bird", "fish", "cow", "mouse", "rabbit", "lion", "bear")

# Wordings of a question: {} is what it is about.
ASKED = parse_grammar("""
plus =
    /4/ what is {} plus {}? | /2/ what's {} plus {}? | /2/ how much is {} plus {}? | {} plus {}?
    | what do {} and {} make? | add {} and {}. | can you add {} and {}? | what is {} and {}?
    | what do you get if you add {} and {}? | what is the sum of {} and {}? | {} and {} make what?
    | tell me {} plus {}. | what does {} plus {} make?
minus =
    /4/ what is {} minus {}? | /2/ what's {} minus {}? | /2/ how much is {} minus {}? | {} minus {}?
    | {} take away {}? | what is {} take away {}? | what is {} less {}? | tell me {} minus {}.
    | what does {} minus {} make? | what is the difference between {} and {}?
minus turned =
    take {} from {}. | take {} away from {}. | subtract {} from {}. | what is {} from {}?
times =
    what is {} times {}? | what's {} times {}? | how much is {} times {}? | multiply {} and {}.
    | {} times {}? | tell me {} times {}.
next number =
    /2/ what comes after {}? | which number comes after {}? | what number comes after {}?
    | what is the number after {}? | what follows {}? | what is the next number after {}?
    | what is one more than {}? | which number follows {}?
number before =
    /2/ what comes before {}? | which number comes before {}? | what number comes before {}?
    | what is the number before {}? | what is one less than {}?
between = what is between {} and {}? | which number is between {} and {}?
bigger = which is bigger, {} or {}? | which number is bigger, {} or {}? | what is more, {} or {}?
smaller = which is smaller, {} or {}? | which number is smaller, {} or {}? | what is less, {} or {}?
opposite =
    /3/ what is the opposite of {}? | what's the opposite of {}? | the opposite of {}?
    | tell me the opposite of {}. | opposite of {}? | say the opposite of {}.
    | do you know the opposite of {}?
count =
    /2/ count from {} to {}. | please count from {} to {}. | can you count from {} to {}?
    | count up from {} to {}. | start at {} and count to {}.
count to = /2/ count to {}. | can you count to {}? | please count to {}. | count up to {}.
count down = count down from {}. | count backwards from {}. | count down from {} to one.
next day =
    /2/ what day comes after {}? | /2/ which day comes after {}? | what day follows {}?
    | what is the day after {}? | what comes after {}? | which day follows {}? | what follows {}?
    | which day is after {}? | what day is after {}?
day before =
    /2/ what day comes before {}? | /2/ which day comes before {}? | what is the day before {}?
    | what comes before {}? | which day is before {}? | what day is before {}?
tomorrow =
    if today is {}, what is tomorrow? | today is {}. what day is tomorrow?
    | if today is {}, what day is tomorrow? | today is {}. what is tomorrow?
    | if today is {}, which day is tomorrow?
yesterday =
    if today is {}, what was yesterday? | today is {}. what day was yesterday?
    | if today is {}, what day was yesterday? | today is {}. what was yesterday?
    | if today is {}, which day was yesterday?
next month =
    what month comes after {}? | which month comes after {}? | what is the month after {}?
    | what month follows {}? | which month is after {}?
month before =
    what month comes before {}? | which month comes before {}? | what is the month before {}?
    | which month is before {}?
week = name the days of the week. | what are the days of the week? | tell me the days of the week.
first day = what is the first day of the week? | which day is the first of the week?
last day = what is the last day of the week? | which day is the last of the week?
first month = what is the first month of the year? | which month is the first of the year?
last month = what is the last month of the year? | which month is the last of the year?
colour of =
    /3/ what colour is {}? | /2/ which colour is {}? | what is the colour of {}?
    | what colour has {}? | tell me the colour of {}. | do you know what colour {} is?
mixed =
    what colour do you get if you mix {} and {}? | what do {} and {} make?
    | what colour do {} and {} make? | which colour do {} and {} make? | mix {} and {}.
sides of = what shape has {} sides? | which shape has {} sides?
again = what did you say? | say it again, please. | say that again. | can you repeat that?
mine = what did i say? | what did i just say? | what was my question?
repeat = repeat after me, {} | say, {} | repeat, {} | please say, {}
""")

# Statements and replies to them; questions about them, and replies to those.
TOLD = parse_grammar("""
colour told =
    /2/ my favourite colour is {}. | i like {}. | i love {}. | the colour that i like is {}.
    | my colour is {}.
colour back = {} is a nice colour.
colour asked =
    /2/ what is my favourite colour? | what's my favourite colour? | which colour do i like?
    | what colour do i like? | what is my colour? | do you remember my favourite colour?
    | do you know my favourite colour? | which colour is my favourite?
    | tell me my favourite colour.
colour reply = your favourite colour is {}.
shape told = /2/ my favourite shape is the {}. | my favourite shape is a {}. | i like the {}.
shape back = the {} is a nice shape.
shape asked =
    /2/ what is my favourite shape? | which shape do i like? | what's my favourite shape?
    | what shape do i like? | do you remember my favourite shape? | which shape is my favourite?
shape reply = your favourite shape is the {}.
name told =
    /3/ my name is {}. | i am {}. | i'm {}. | call me {}. | you can call me {}. | hello, i am {}.
    | hello, my name is {}. | hi, i'm {}. | people call me {}.
name back = hello {}.
name asked =
    /3/ what is my name? | what's my name? | who am i? | do you know my name? | tell me my name.
    | do you remember my name? | can you tell me my name? | what did i say my name was?
name reply = your name is {}.
number told =
    /2/ remember the number {}. | my number is {}. | my lucky number is {}. | remember {}.
    | please remember the number {}. | the number is {}. | my favourite number is {}.
number back = okay, i will remember {}.
number asked =
    /2/ which number did i say? | what number did i say? | what number did i tell you?
    | what was the number? | what is my number? | which number did i tell you?
    | what is my lucky number? | which number was it? | what is the number?
    | do you remember the number? | do you remember my number? | what is my favourite number?
number reply = the number was {}.
age told = i am {} years old. | i'm {} years old. | my age is {}. | i am {}.
age back = {} is a good age.
age asked = how old am i? | what is my age? | do you know how old i am? | do you remember my age?
age reply = you are {} years old.
day told =
    my favourite day is {}. | i like {}. | my birthday is on {}. | the day that i like is {}.
day back = {} is a nice day.
day asked =
    what is my favourite day? | which day do i like? | what day do i like? | when is my birthday?
    | do you remember my favourite day?
day reply = your day is {}.
animal told =
    i have a {}. | my favourite animal is the {}. | i like my {}. | my pet is a {}.
    | my favourite animal is a {}. | i have got a {}.
animal back = a {} is a nice animal.
animal asked =
    which animal do i have? | what animal do i have? | what is my favourite animal?
    | which animal do i like? | what pet do i have? | what is my pet? | what do i have?
animal reply = you have a {}.
""")
SLOTS = ("name", "colour", "number", "shape", "age", "day", "animal")
POLITE = {
    "hello.": "hello, how can i help you?", "hi.": "hello, how can i help you?",
    "good morning.": "good morning.", "good evening.": "good evening.",
    "good afternoon.": "good afternoon.", "good night.": "good night.",
    "how are you?": "i am fine, thank you.", "how do you do?": "i am fine, thank you.",
    "hello, how are you?": "i am fine, thank you.", "thank you.": "you are welcome.",
    "thanks.": "you are welcome.", "thank you very much.": "you are welcome.",
    "stop.": "okay, i will stop.", "goodbye.": "see you later.", "see you later.": "goodbye.",
    "who are you?": "i am a small voice.", "what is your name?": "i am a small voice.",
    "what can you do?": "i can count, add and remember.", "yes.": "okay.", "no.": "okay.",
    "okay.": "okay.", "please wait.": "okay, i will wait.", "can you hear me?": "yes, i hear you.",
    "sorry.": "that is okay.", "bye.": "see you later.", "good.": "thank you.",
    "that is right.": "thank you.", "that is wrong.": "sorry.",
}  # fmt: skip
LEADS = (
    "", "", "", "", "please tell me, ", "tell me, ", "so, ", "okay, ", "one more question, ",
    "can you tell me, ", "and ", "now, ", "hello, ",
)  # fmt: skip
UNTOLD = "you did not tell me."
UNKNOWN = "sorry, i do not know that."
UNSEEN = "i can not see a video."
NOTHING = "i did not say anything."
# Words that people use, and that no question above needs.
COMMON = (
    "about again all also an animal any around ask be because been book boy buy came can car "
    "child city come could did different do does door drink eat every eyes family find food from "
    "game get girl give had hand has have he head her here him his home house how its keep know "
    "live look make many me mean men most mother much must new next not now of only other our "
    "out over page part people place play put read room run same saw school see she should show "
    "some stand story table take than their them then they think this time together too tree try "
    "turn two under until use very walk want was watch water way we were when where why will "
    "with word work world would write your"
)


def _words() -> tuple[str, ...]:
    spoken = [POLITE, OPPOSITES, THINGS, AMOUNTS]
    rules = {
        "fixed": (*(part for table in spoken for pair in table.items() for part in pair),),
        "names": (*DAYS, *MONTHS, *NAMES, *ANIMALS, *LEADS, COMMON, *MIXED.values()),
        "replies": (UNTOLD, UNKNOWN, UNSEEN, NOTHING, "i said, you said, comes between bigger and"),
    }
    asked = {name: tuple(t.replace("{}", " ") for t in each) for name, each in _ALL.items()}
    return tuple(sorted(words_of(RULES) | words_of(asked) | words_of(rules)))


_ALL = {**ASKED, **TOLD}
WORDS = _words()
Memory = dict[str, str]
Exchange = tuple[str, str]


class SmallTalk(NamedTuple):
    """A conversation while it is made up."""

    rng: np.random.Generator
    split: Split
    turns: list[Turn]
    memory: Memory

    def pick(self, choices: Sequence[Any]) -> Any:
        """One of the choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def number(self, low: int, high: int) -> int:
        """An integer, both ends included."""
        return int(self.rng.integers(low, high + 1))

    def ask(self, kind: str, *slots: str) -> str:
        """A wording of a question."""
        return str(self.pick(_ALL[kind]).format(*slots))

    def said(self, role: str) -> str:
        """The last text of a role, "" for none."""
        return next((turn.text for turn in reversed(self.turns) if turn.role == role), "")


def _signed(number: int) -> str:
    return f"minus {number_words(-number)}" if number < 0 else number_words(number)


def _sum(talk: SmallTalk) -> Exchange:
    kind = talk.pick(("plus", "plus", "minus", "minus", "minus turned", "times"))
    if kind == "times":
        a, b = talk.number(0, 10), talk.number(0, 10)
        one, other = number_words(a), number_words(b)
        return talk.ask(kind, one, other), f"{one} times {other} is {number_words(a * b)}."
    a, b = talk.number(0, 20), talk.number(0, 20)
    if kind == "plus":
        one, other = number_words(a), number_words(b)
        return talk.ask(kind, one, other), f"{one} plus {other} is {number_words(a + b)}."
    a, b = (max(a, b), min(a, b)) if talk.number(0, 9) else (a, b)
    one, other = number_words(a), number_words(b)
    slots = (one, other) if kind == "minus" else (other, one)
    return talk.ask(kind, *slots), f"{one} minus {other} is {_signed(a - b)}."


def _neighbour(talk: SmallTalk) -> Exchange:
    number, step = talk.number(1, 99), talk.pick(("after", "before"))
    kind = "next number" if step == "after" else "number before"
    here = number_words(number)
    there = number_words(number + (1 if step == "after" else -1))
    if talk.number(0, 7):
        return talk.ask(kind, here), f"{there} comes {step} {here}."
    ends = number_words(number - 1), number_words(number + 1)
    return talk.ask("between", *ends), f"{here} is between {ends[0]} and {ends[1]}."


def _compare(talk: SmallTalk) -> Exchange:
    a, b = talk.rng.choice(100 if talk.number(0, 1) else 21, 2, replace=False).tolist()
    kind = talk.pick(("bigger", "smaller"))
    one, other = number_words(a), number_words(b)
    return talk.ask(kind, one, other), f"{one if (a > b) == (kind == 'bigger') else other}."


def _opposite(talk: SmallTalk) -> Exchange:
    pair = talk.pick(list(OPPOSITES.items()))
    one, other = pair if talk.number(0, 1) else pair[::-1]
    return talk.ask("opposite", one), f"the opposite of {one} is {other}."


def _count(talk: SmallTalk) -> Exchange:
    kind = talk.pick(("count", "count", "count to", "count down"))
    first = talk.number(0, 40) if kind == "count" else 1
    last = first + talk.number(2, 9)
    row = [number_words(n) for n in range(first, last + 1)]
    if kind == "count down":
        return talk.ask(kind, row[-1]), ", ".join(reversed(row)) + "."
    ends = (row[0], row[-1]) if kind == "count" else (row[-1],)
    return talk.ask(kind, *ends), ", ".join(row) + "."


def _circle(talk: SmallTalk, names: Sequence[str], after: str, before: str) -> Exchange:
    place, way = talk.number(0, len(names) - 1), talk.pick(("after", "before"))
    here, there = names[place], names[(place + (1 if way == "after" else -1)) % len(names)]
    return talk.ask(after if way == "after" else before, here), f"{there} comes {way} {here}."


def _day(talk: SmallTalk) -> Exchange:
    draw = talk.number(0, 9)
    if draw < 5:
        return _circle(talk, DAYS, "next day", "day before")
    if draw < 7:
        place = talk.number(0, 6)
        kind, step = talk.pick((("tomorrow", 1), ("yesterday", -1)))
        verb = "is" if step == 1 else "was"
        return talk.ask(kind, DAYS[place]), f"{kind} {verb} {DAYS[(place + step) % 7]}."
    ends = {"first day": DAYS[0], "last day": DAYS[-1], "first month": MONTHS[0]}
    ends["last month"] = MONTHS[-1]
    if draw < 8:
        kind = talk.pick(tuple(ends))
        unit = "week" if "day" in kind else "year"
        return talk.ask(kind), f"the {kind} of the {unit} is {ends[kind]}."
    if draw < 9:
        return talk.ask("week"), ", ".join(DAYS) + "."
    return _circle(talk, MONTHS, "next month", "month before")


def _amount(talk: SmallTalk) -> Exchange:
    what, many = talk.pick(list(AMOUNTS.items()))
    things, _, whole = what.partition(" in ")
    if talk.number(0, 1):
        asked = talk.pick(("does {1} have", "has {1}"))
        way = "in {1}" if things != "sides" else asked
    else:
        way = "are there in {1}"
    asked = "how many {0} " + (way if way.startswith(("does", "has", "are")) else f"are {way}")
    return asked.format(things, whole) + "?", f"there are {many} {what}."


def _colour(talk: SmallTalk) -> Exchange:
    if talk.number(0, 3):
        thing, colour = talk.pick(list(THINGS.items()))
        return talk.ask("colour of", thing), f"{thing} is {colour}."
    pair, colour = talk.pick(list(MIXED.items()))
    one, other = pair if talk.number(0, 1) else pair[::-1]
    return talk.ask("mixed", one, other), f"{one} and {other} make {colour}."


def _sides(talk: SmallTalk) -> Exchange:
    shape, many = talk.pick((("triangle", "three"), ("square", "four")))
    return talk.ask("sides of", many), f"a {shape} has {many} sides."


def _repeat(talk: SmallTalk) -> Exchange:
    text = sentence(talk.rng, talk.split)
    return talk.ask("repeat", text), text


def _again(talk: SmallTalk) -> Exchange:
    said = talk.said("assistant")
    if said and said[-1] not in ".?":  # it was cut off
        said = said.rstrip(",") + "."
    return talk.ask("again"), f"i said, {said}" if said else NOTHING


def _mine(talk: SmallTalk) -> Exchange:
    said = talk.said("user")
    return talk.ask("mine"), f"you said, {said}" if said else UNTOLD


def _value(talk: SmallTalk, slot: str) -> str:
    names = {"name": NAMES, "day": DAYS, "animal": ANIMALS}
    if slot in ("number", "age"):
        return number_words(talk.number(0 if slot == "number" else 3, 99))
    return str(talk.pick(names.get(slot) or RULES[slot]))


def _tell(talk: SmallTalk) -> Exchange:
    slot = talk.pick(SLOTS)
    talk.memory[slot] = value = _value(talk, slot)
    return talk.ask(f"{slot} told", value), talk.ask(f"{slot} back", value)


def _recall(talk: SmallTalk) -> Exchange:
    known = tuple(talk.memory) if talk.memory and talk.number(0, 9) else ()
    slot = talk.pick(known or SLOTS)
    value = talk.memory.get(slot)
    return talk.ask(f"{slot} asked"), talk.ask(f"{slot} reply", value) if value else UNTOLD


def _clip(talk: SmallTalk) -> Exchange:
    return question(talk.rng, talk.split), UNSEEN


def _polite(talk: SmallTalk) -> Exchange:
    asked, reply = talk.pick(list(POLITE.items()))
    return asked, reply


def jumbled(rng: np.random.Generator, words: Sequence[str] = WORDS) -> str:
    """Words in any order: to say and to hear them, nothing may be guessed from what precedes."""
    many = int(rng.integers(2, 9))
    drawn = [words[int(i)] for i in rng.integers(len(words), size=many)]
    if many > 3 and rng.random() < 0.3:
        drawn[int(rng.integers(1, many - 1))] += ","
    return " ".join(drawn) + ("?" if rng.random() < 0.3 else ".")


def _unknown(talk: SmallTalk) -> Exchange:
    return jumbled(talk.rng), UNKNOWN


SKILLS: dict[Callable[[SmallTalk], Exchange], float] = {
    _sum: 0.2, _neighbour: 0.08, _compare: 0.12, _count: 0.06, _opposite: 0.06, _day: 0.09,
    _amount: 0.02, _colour: 0.06, _sides: 0.01, _repeat: 0.05, _again: 0.03, _mine: 0.02,
    _tell: 0.12, _recall: 0.12, _clip: 0.03, _polite: 0.05, _unknown: 0.03,
}  # fmt: skip
_WEIGHTS = np.array(list(SKILLS.values())) / sum(SKILLS.values())
LEADING = (_sum, _neighbour, _opposite, _count, _day, _amount, _colour, _recall)
CONTENT = (_sum, _neighbour, _compare, _opposite, _count, _day, _colour, _amount)
MOST = 8  # exchanges of a conversation


def exchange(talk: SmallTalk) -> Exchange:
    """A question and its reply, whichever split they belong to."""
    skill = list(SKILLS)[int(talk.rng.choice(len(SKILLS), p=_WEIGHTS))]
    asked, reply = skill(talk)
    return (talk.pick(LEADS) + asked if skill in LEADING else asked), reply


def _cut(text: str, rng: np.random.Generator) -> str:
    words = text.split()
    return " ".join(words[: int(rng.integers(1, len(words)))]) if len(words) > 1 else text


def dialogue(rng: np.random.Generator, split: Split = "train") -> list[Turn]:
    """A conversation of 1 (evaluation: 2) to 8 exchanges, none in both splits; its end is whole."""
    while True:
        many = int(rng.integers(2 if split == "eval" else 1, MOST + 1))
        talk = SmallTalk(rng, split, [], {})
        for i in range(many):
            asked, reply = exchange(talk)
            if i < many - 1 and rng.random() < 0.1:
                reply = _cut(reply, rng)
            talk.turns.extend((Turn("user", asked), Turn("assistant", reply)))
        whole = " ".join(turn.text for turn in talk.turns)
        if (many == 1 and split == "train") or split_of(whole) == split:
            return talk.turns


def spoken_questions(rng: np.random.Generator, split: Split = "train") -> Iterator[str]:
    """Yield questions of people to the voice, one after the other."""
    while True:
        asked, _ = exchange(SmallTalk(rng, split, [], {}))
        if split_of(asked) == split:
            yield asked


def recalled(rng: np.random.Generator, between: int, split: Split = "eval") -> list[Exchange]:
    """Exchanges: a statement, `between` of other things, and a question about the statement."""
    while True:
        talk = SmallTalk(rng, split, [], {})
        slot = talk.pick(SLOTS)
        value = _value(talk, slot)
        told = talk.ask(f"{slot} told", value), talk.ask(f"{slot} back", value)
        other = [talk.pick(CONTENT)(talk) for _ in range(between)]
        asked = talk.ask(f"{slot} asked"), talk.ask(f"{slot} reply", value)
        if split_of(" ".join(text for text, _ in (told, *other))) == split:
            return [told, *other, asked]
