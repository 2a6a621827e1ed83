"""The domain of the embedded speech model: its grammar, sentences and questions about clips.

A text is for training or for evaluation by its own checksum, so neither is ever seen by the other
whatever the seeds; texts of one or two words and fixed phrases are for training alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from mmfast.core.errors import SpecError
from mmfast.tiny.speech.recordings import EspeakVoice
from mmfast.tiny.stream.world import NOW_WORDINGS, PAST_WORDINGS
from mmfast.tiny.video.questions import WORDINGS, parse_grammar

# A rule and its alternatives: words, punctuation marks and <rules>; /n/ stands for n equal ones.
GRAMMAR = """
digit = one | two | three | four | five | six | seven | eight | nine
teen =
    ten | eleven | twelve | thirteen | fourteen | fifteen | sixteen | seventeen | eighteen
    | nineteen
tens = twenty | thirty | forty | fifty | sixty | seventy | eighty | ninety
below hundred = <digit> | <teen> | <tens> | /2/ <tens> <digit>
number = zero | /8/ <below hundred> | <digit> hundred | /4/ <digit> hundred and <below hundred>
few = two | three | four | five | six
hour = one | two | three | four | five | six | seven | eight | nine | ten | eleven | twelve
minute = ten | fifteen | twenty | twenty five | thirty | forty five | fifty
clock =
    <hour> o'clock | half past <hour> | quarter past <hour> | quarter to <hour> | <hour> <minute>
    | <minute> past <hour>
day part = in the morning | in the afternoon | in the evening | at night
unit = seconds | minutes | hours | percent | metres
colour = red | green | blue | yellow | purple | white | black | orange | pink | brown
seen colour = red | green | blue | yellow | purple | white
shape = circle | square | triangle | star | cross
shapes = circles | squares | triangles | stars | crosses
thing = <colour> <shape>
seen = <seen colour> <shape>
sized = /2/ <thing> | small <thing> | big <thing>
direction = left | right | up | down
side = left | right | top | bottom
corner = top left | top right | bottom left | bottom right
end = start | end
pace = slowly | quickly | fast
ordinal = first | second | third | fourth | fifth | last
name = anna | ben | david | emma | frank | george | helen | jack | laura | maria | peter | susan
moves = moves | goes | is going | is moving
order = before | after
motion =
    the <sized> <moves> <direction>. | the <sized> <moves> <pace> to the <side>.
    | the <thing> <moves> <direction>, then <direction>.
    | the <thing> goes from the <corner> to the <corner>.
    | the <thing> is faster than the <thing>. | the <thing> moves <pace> and the <thing> stops.
    | the <ordinal> <shape> moves <direction> after <number> seconds.
    | first, the <thing> appears. then, the <thing> moves <direction>.
position =
    the <sized> is in the <corner> corner. | the <sized> is at the <side> of the screen.
    | the <thing> is next to the <thing>.
    | the <thing> is at the <corner>, and the <thing> is at the <corner>.
    | there is a <sized> at the <side> of the video. | the <thing> appears <order> the <thing>.
    | the <ordinal> object is a <sized>.
counting =
    there are <few> <colour> <shapes> on the screen.
    | i can see <few> <shapes> and <few> <shapes>. | the number on the screen is <number>.
    | the number is <number>. | <number> plus <number>. | <number>, <number> and <number>.
    | the answer is <number>. | <number> <unit>. | the video has <number> <shapes>.
    | <number> percent of the objects are <colour>.
timing =
    it is <clock>. | it is <clock> <day part>. | the video starts at <clock>.
    | at <clock>, the <thing> moves <direction>. | please wait <number> <unit>.
    | after <number> seconds, the <thing> stops. | see you at <clock>, <name>.
    | the video ends <order> <number> minutes.
talk =
    my favourite colour is <colour>. | i like the <sized>, but not the <thing>.
    | yes, the <thing> is <colour>. | no, it is <colour>, not <colour>.
    | hello <name>, can you see the <thing>? | do you like the <thing> or the <thing>?
    | my name is <name>, and i am <number> years old. | you said <number>, not <number>.
    | sorry, i can not see the <sized>. | <name> has <few> <colour> <shapes>.
lead =  | repeat after me, | say, | you said, | i said,
short =
    <colour>. | <shape>. | <direction>. | <corner>. | <number>. | <thing>. | the <thing>.
    | <clock>.
phrase =
    hello. | hello, how are you? | hello, how can i help you? | good morning. | good evening.
    | i am fine, thank you. | thank you. | you are welcome. | goodbye. | see you later. | yes.
    | no. | okay. | stop. | please wait. | sorry, i did not hear you. | i do not know.
    | i can not see a video. | that is right. | that is wrong.
"""
SENTENCES = ("motion", "position", "counting", "timing", "talk")
CARRIERS = ("", "please tell me, ", "tell me, ", "so, ", "okay, ", "one more question, ")
# Rules that fill the wordings of a question, by its kind.
SLOTS: dict[str, tuple[str, ...]] = {
    "colour": ("<shape>",), "shape": ("<seen colour>",), "count": (), "direction": ("<seen>",),
    "speed": ("<seen>", "<seen>"), "position": ("<seen>", "<end>"), "first": ("<seen>", "<seen>"),
    "number": (), "entry": ("<seen>",), "corner": ("<seen>",),
}  # fmt: skip


def spoken_wording(text: str) -> str:
    """A typed question as the words and marks that are said: the domain has one spelling."""
    return text.lower().replace("color ", "colour ").replace(":", ",")


def _wordings(*tables: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    pairs = ((kind, w) for table in tables for kind, wordings in table.items() for w in wordings)
    return tuple(dict.fromkeys(spoken_wording(w.format(*SLOTS[kind])) for kind, w in pairs))


RULES = parse_grammar(GRAMMAR) | {
    "clip question": _wordings(WORDINGS, NOW_WORDINGS, PAST_WORDINGS),
    "carrier": CARRIERS,
}
PHRASES = RULES["phrase"]


Split = Literal["train", "eval"]
MARKS = (",", ".", "?")
SHARE = 8  # one text of so many is for evaluation
GROUP = re.compile(r"[a-z']+|[,.?]")
REFERENCE = re.compile(r"<([a-z ]+)>")

# Two men and two women that the recogniser understands best of the variants of en-us.
VOICE_NAMES = ("en-us", "en-us+m3", "en-us+f2", "en-us+f3")
SPEEDS = (140, 165, 195)  # words per minute
PITCHES = (35, 50, 65)
# More voices are listened to than the model speaks with.
HEARD_NAMES = (
    *VOICE_NAMES,
    *("en-us+m1", "en-us+m2", "en-us+m4", "en-us+m7", "en-us+f1", "en-us+f4", "en-us+f5"),
)
HEARD_SPEEDS, HEARD_PITCHES = (125, 210), (20, 80)  # from, to


# The 4 x 3 x 3 ways in which the model speaks.
VOICES = tuple(EspeakVoice(n, s, p) for n in VOICE_NAMES for s in SPEEDS for p in PITCHES)


def heard_voice(rng: np.random.Generator) -> EspeakVoice:
    """One of the many ways in which the model may be spoken to."""
    name = HEARD_NAMES[int(rng.integers(len(HEARD_NAMES)))]
    rate, pitch = rng.integers(*HEARD_SPEEDS), rng.integers(*HEARD_PITCHES)
    spread, volume = rng.integers(30, 70), rng.integers(50, 110)
    return EspeakVoice(name, int(rate), int(pitch), int(spread), int(volume))


def groups(text: str) -> list[str]:
    """Words and punctuation marks of a text of the domain."""
    return GROUP.findall(text)


@lru_cache(1000)
def number_words(number: int) -> str:
    """0 to 999 in words, such as "two hundred and five"."""
    from num2words import num2words

    if not 0 <= number <= 999:
        raise SpecError(f"number={number} is not in 0 to 999, the numbers of the domain")
    return str(num2words(number)).replace("-", " ")


def split_of(text: str) -> Split:
    """The split that a text belongs to."""
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
    """A spoken question about a clip."""
    while True:
        carrier = "<carrier>" if rng.random() < 0.5 else ""
        text = expand(f"{carrier}<clip question>", rng)
        if split_of(text) == split:
            return text


def spoken_variants(typed_question: str) -> list[str]:
    """A typed question as it may be spoken: alone, and behind each carrier."""
    return [carrier + spoken_wording(typed_question) for carrier in CARRIERS]


def words_of(rules: Mapping[str, Sequence[str]]) -> set[str]:
    """All words that the alternatives of some rules hold."""
    texts = (alternative for rule in rules.values() for alternative in rule)
    found = {part for text in texts for part in groups(REFERENCE.sub(" ", text))}
    return found - set(MARKS)


Tree = dict[str, "Tree"]
PART = re.compile(r"<[a-z ]+>|[a-z']+")
END = ""


def jsgf() -> str:
    """Sentences and questions of the domain in the JSpeech Grammar Format."""
    sentences = tuple(text for name in (*SENTENCES, "short", "phrase") for text in RULES[name])
    top = "public <utterance> = <sentence> | [<carrier>] <asked>;"
    texts = {"sentence": sentences, "asked": RULES["clip question"]}
    table = {**RULES, **texts}
    rules = [f"{_name(name)} = {_body(table[name])};" for name in sorted(_needed(texts))]
    return "\n".join(("#JSGF V1.0;", "grammar speech;", top, *rules)) + "\n"


def _needed(texts: dict[str, tuple[str, ...]]) -> set[str]:
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
