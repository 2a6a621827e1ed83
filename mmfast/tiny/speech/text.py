"""The domain of the embedded speech model: sentences, questions and the grammar of both.

A text is for training or for evaluation by its own checksum, so neither is ever seen by the other
whatever the seeds; texts of one or two words and fixed phrases are for training alone.
"""

from __future__ import annotations

import re
import zlib
from functools import cache
from typing import Literal

import numpy as np

from mmfast.core.errors import SpecError
from mmfast.tiny.speech.recordings import EspeakVoice
from mmfast.tiny.speech.rules import CARRIERS, DIGITS, RULES, SENTENCES, TEENS, TENS, spoken_wording
from mmfast.tiny.video.questions import WORDINGS, Fact

PHRASES = (
    "hello.",
    "hello, how are you?",
    "hello, how can i help you?",
    "good morning.",
    "good evening.",
    "i am fine, thank you.",
    "thank you.",
    "you are welcome.",
    "goodbye.",
    "see you later.",
    "yes.",
    "no.",
    "okay.",
    "stop.",
    "please wait.",
    "sorry, i did not hear you.",
    "i do not know.",
    "i can not see a video.",
    "that is right.",
    "that is wrong.",
)
# What is said in conversations beside the sentences and phrases of the domain.
LINES = (
    "what is <number> plus <number>?",
    "what is <number> minus <number>?",
    "what is <few> times <few>?",
    "<number> plus <number> is <number>.",
    "<number> minus <number> is <number>.",
    "<few> times <few> is <number>.",
    "what comes after <number>?",
    "what comes before <number>?",
    "<number> comes after <number>.",
    "<number> comes before <number>.",
    "count from <number> to <number>.",
    "<number>, <number>, <number>, <number>, <number>.",
    "<number>, <number>, <number>, <number>.",
    "what is the opposite of <quality>?",
    "the opposite of <quality> is <quality>.",
    "what did you say?",
    "say it again, please.",
    "what did i say?",
    "i like <colour>.",
    "<colour> is a nice colour.",
    "what is my favourite colour?",
    "your favourite colour is <colour>.",
    "my favourite shape is the <shape>.",
    "the <shape> is a nice shape.",
    "what is my favourite shape?",
    "your favourite shape is the <shape>.",
    "my name is <name>.",
    "hello <name>.",
    "what is my name?",
    "your name is <name>.",
    "remember the number <number>.",
    "okay, i will remember <number>.",
    "which number did i say?",
    "the number was <number>.",
    "you did not tell me.",
    "you did not say a number.",
    "i did not say anything.",
    "how are you?",
    "okay, i will stop.",
)


Split = Literal["train", "eval"]
MARKS = (",", ".", "?")
SHARE = 8  # one text of so many is for evaluation
GROUP = re.compile(r"[a-z']+|[,.?]")
REFERENCE = re.compile(r"<([a-z ]+)>")

# Two men and two women that the recogniser understands best of the variants of en-us.
VOICE_NAMES = ("en-us", "en-us+m3", "en-us+f2", "en-us+f3")
SPEEDS = (135, 155, 175)  # words per minute
PITCHES = (35, 50, 65)
# More voices are listened to than the model speaks with.
HEARD_NAMES = (
    *VOICE_NAMES,
    *("en-us+m1", "en-us+m2", "en-us+m4", "en-us+m7", "en-us+f1", "en-us+f4", "en-us+f5"),
)
HEARD_SPEEDS, HEARD_PITCHES = (125, 210), (20, 80)  # from, to


def voice(name: int = 0, speed: int = 1, pitch: int = 1) -> EspeakVoice:
    """One of the 4 x 3 x 3 ways in which the model speaks."""
    return EspeakVoice(VOICE_NAMES[name], SPEEDS[speed], PITCHES[pitch])


VOICES = tuple(voice(v, s, p) for v in range(4) for s in range(3) for p in range(3))


def heard_voice(rng: np.random.Generator) -> EspeakVoice:
    """One of the many ways in which the model may be spoken to."""
    name = HEARD_NAMES[int(rng.integers(len(HEARD_NAMES)))]
    rate, pitch = rng.integers(*HEARD_SPEEDS), rng.integers(*HEARD_PITCHES)
    spread, volume = rng.integers(30, 70), rng.integers(50, 110)
    return EspeakVoice(name, int(rate), int(pitch), int(spread), int(volume))


def groups(text: str) -> list[str]:
    """Words and punctuation marks of a text of the domain."""
    return GROUP.findall(text)


def joined(parts: list[str]) -> str:
    """The text of words and marks."""
    return re.sub(r" ([,.?])", r"\1", " ".join(parts))


def number_words(number: int) -> str:
    """0 to 999 in words, such as "two hundred and five".

    Raises:
        SpecError: Another number.
    """
    if not 0 <= number <= 999:
        raise SpecError(f"number={number} is not in 0 to 999, the numbers of the domain")
    hundreds, rest = divmod(number, 100)
    tens, ones = divmod(rest, 10)
    words = [f"{DIGITS[hundreds - 1]} hundred"] if hundreds else []
    if rest and hundreds:
        words.append("and")
    if 10 <= rest < 20:
        words.append(TEENS[rest - 10])
    else:
        words += [TENS[tens - 2]] if tens else []
        words += [DIGITS[ones - 1]] if ones else []
    return " ".join(words) or "zero"


def split_of(text: str) -> Split:
    """Which of the two a text is for."""
    words = [part for part in groups(text) if part not in MARKS]
    if len(words) <= 2 or text in PHRASES:
        return "train"
    return "eval" if zlib.crc32(" ".join(words).encode()) % SHARE == 0 else "train"


def expand(text: str, rng: np.random.Generator) -> str:
    """Fill the rules of a text at random."""
    while found := REFERENCE.search(text):
        choices = RULES[found[1]]
        chosen = choices[int(rng.integers(len(choices)))]
        text = text[: found.start()] + chosen + text[found.end() :]
    return text


def sentence(rng: np.random.Generator, split: Split = "train") -> str:
    """A sentence to say; in training now and then a short answer or a fixed phrase."""
    while True:
        draw = rng.random()
        if split == "train" and draw < 0.06:
            return PHRASES[int(rng.integers(len(PHRASES)))]
        start = "short" if draw < 0.16 else SENTENCES[int(rng.integers(len(SENTENCES)))]
        text = expand(f"<{start}>", rng)
        if split_of(text) == split:
            return text


def question(rng: np.random.Generator, split: Split = "train") -> str:
    """A question about a clip as it is spoken."""
    while True:
        carrier = "<carrier>" if rng.random() < 0.5 else ""
        text = expand(f"{carrier}<clip question>", rng)
        if split_of(text) == split:
            return text


def spoken_variants(typed_question: str) -> list[str]:
    """The ways in which a typed question may be spoken: alone, and behind each carrier."""
    return [carrier + spoken_wording(typed_question) for carrier in CARRIERS]


def asked(fact: Fact, rng: np.random.Generator, split: Split = "train") -> str:
    """A question about a fact of a clip as it is spoken, in some wording."""
    wordings = [fact.ask(i) for i in range(len(WORDINGS[fact.kind]))]
    ways = [way for wording in wordings for way in spoken_variants(wording)]
    fitting = [way for way in ways if split_of(way) == split]
    return (fitting or ways)[int(rng.integers(len(fitting or ways)))]


def spoken_answer(answer: str) -> str:
    """A typed answer such as "42" or "top left", as it is said."""
    return number_words(int(answer)) if answer.isdecimal() else answer.lower()


@cache
def words() -> tuple[str, ...]:
    """Every word of the domain, in alphabetic order."""
    texts = [*PHRASES, *LINES, *(alternative for rule in RULES.values() for alternative in rule)]
    found = {part for text in texts for part in groups(REFERENCE.sub(" ", text))}
    return tuple(sorted(found - set(MARKS)))


WORDS = words()


Tree = dict[str, "Tree"]
PART = re.compile(r"<[a-z ]+>|[a-z']+")
END = ""


def jsgf(dialogue: bool = False) -> str:
    """What is said, in the JSpeech Grammar Format.

    Args:
        dialogue: The lines of conversations too, not sentences and questions alone; slower.
    """
    sentences = [text for name in (*SENTENCES, "short") for text in RULES[name]]
    sentences += [*PHRASES, *(LINES if dialogue else ())]
    lead = "[<lead>] " if dialogue else ""
    top = f"public <utterance> = {lead}<sentence> | [<carrier>] <asked>;"
    texts = {"sentence": tuple(sentences), "asked": RULES["clip question"]}
    table = {**RULES, **texts}
    rules = [f"{_name(name)} = {_body(table[name])};" for name in sorted(_needed(texts))]
    return "\n".join(("#JSGF V1.0;", "grammar speech;", top, *rules)) + "\n"


def _needed(texts: dict[str, tuple[str, ...]]) -> set[str]:
    """Names of the rules that are reached."""
    table, found = {**RULES, **texts}, set[str]()
    todo = [*texts, "carrier", "lead"]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [part[1:-1] for text in table[name] for part in _parts(text) if part[0] == "<"]
    return found


def _parts(text: str) -> list[str]:
    """Words and rules; a thing with or without its size is one rule, so beginnings are shared."""
    text = text.replace("<thing>", "<sized>") if text not in RULES["sized"] else text
    return PART.findall(text)


def _name(rule: str) -> str:
    return f"<{rule.replace(' ', '_')}>"


def _body(texts: tuple[str, ...]) -> str:
    """Alternatives as a tree whose branches part where the texts do."""
    tree: Tree = {}
    for text in texts:
        at = tree
        for part in _parts(text):
            at = at.setdefault(part, {})
        if at is not tree:
            at[END] = {}
    return _written(tree)


def _written(tree: Tree) -> str:
    options = []
    for part, behind in tree.items():
        if part == END:
            continue
        name = _name(part[1:-1]) if part[0] == "<" else part
        rest = _written(behind)
        if rest:
            rest = f" [{rest}]" if END in behind else f" ({rest})"
        options.append(name + rest)
    return " | ".join(options)
