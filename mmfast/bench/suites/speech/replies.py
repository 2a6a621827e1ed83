"""Right replies to spoken questions: single ones, follow-ups, and sound that asks nothing.

A reply is right if its words are those of the one right answer. A follow-up asks for what was told
up to five turns before, spoken turn by turn; what the model heard and said is the past.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.core.speech import Turn
from mmfast.frontends.text_normalisation import spoken
from mmfast.tiny.evaluate import interval
from mmfast.tiny.speech.dialogue import CONTENT, SmallTalk, recalled
from mmfast.tiny.speech.recordings import EspeakVoice, say
from mmfast.tiny.speech.text import MARKS, PITCHES, SPEEDS, VOICE_NAMES, split_of
from mmfast.tiny.speech.unheard import clatter, foreign

QUESTIONS, SEED = 200, 1000
_ASKING = 79  # separates these draws from others of the same seed


class AskedTurn(NamedTuple):
    """A turn of a user: its text, its voice, the right reply to it, and its kind."""

    text: str
    voice: EspeakVoice
    reply: str
    kind: str = ""


def _voice(rng: np.random.Generator, number: int) -> EspeakVoice:
    name = VOICE_NAMES[number % len(VOICE_NAMES)]
    return EspeakVoice(name, int(rng.choice(SPEEDS)), int(rng.choice(PITCHES)))


def content_questions(n: int, seed: int) -> list[AskedTurn]:
    """Return unseen questions with content, their kinds and four voices in turn."""
    rng, found = np.random.default_rng([_ASKING, seed]), dict[str, AskedTurn]()
    for turn in count():  # kinds that have few questions are soon used up
        skill = CONTENT[turn % len(CONTENT)]
        text, reply = skill(SmallTalk(rng, "eval", [], {}))
        if split_of(text) == "eval" and text not in found:
            kind = skill.__name__.strip("_")
            found[text] = AskedTurn(text, _voice(rng, len(found)), reply, kind)
        if len(found) == n:
            break
    return list(found.values())


def follow_ups(n: int, seed: int) -> list[list[AskedTurn]]:
    """Return conversations of 2 to 6 turns whose last one asks for what the first one told."""
    found = []
    for number in range(n):
        rng = np.random.default_rng([_ASKING, seed, number])
        turns = recalled(rng, number % 5)
        who = _voice(rng, number)
        found.append([AskedTurn(text, who, reply) for text, reply in turns])
    return found


def same_words(reply: str, wanted: str) -> bool:
    """Test if a reply has the words of another, whatever its marks."""
    one, other = ([w for w in spoken(text) if w not in MARKS] for text in (reply, wanted))
    return one == other


def answered(model: Any, pcm: Tensor, past: Sequence[Turn] = ()) -> tuple[str, str]:
    """Return what a model heard, and the text of its reply."""
    heard, said = "", ""
    for sound in model.reply(pcm, 16000, list(past)):
        heard, said = heard or (sound.heard or ""), said + sound.text
    return heard.strip(), said.strip()


def reply_rows(model: Any, n: int, seed: int, tick: Tick) -> list[Row]:
    """Measure replies to `n` questions, to `n // 2` follow-ups, and to `n // 2` other sounds."""
    rows = [_single(model, n, seed, tick), _following(model, max(1, n // 2), seed, tick)]
    return [*rows, _unasked(model, max(1, n // 2), seed, tick)]


@benchmark("speech", "replies")
def replies(tick: Tick) -> list[Row]:
    """Answer 200 spoken questions, 100 follow-ups and 100 sounds that ask nothing."""
    from mmfast.models.speech.embedded import load_speech

    rows = reply_rows(load_speech(), QUESTIONS, SEED, tick)
    shared = {"seed": SEED, "device": "cpu"}
    return [{"job": row["mode"], "kinds": _kinds(row), **row, **shared} for row in rows]


def _kinds(row: Row) -> str:
    return ", ".join(f"{kind} {share:.0%}" for kind, share in row["by_kind"].items())


def _single(model: Any, n: int, seed: int, tick: Tick) -> Row:
    marks: dict[str, list[bool]] = defaultdict(list)
    exact = 0
    for i, each in enumerate(content_questions(n, seed)):
        heard, reply = answered(model, say(each.text, each.voice).pcm)
        exact += same_words(heard, each.text)
        marks[each.kind].append(same_words(reply, each.reply))
        tick("replies", i + 1, n)
    return {**_row("questions", marks), "exact": exact / n}


def _following(model: Any, n: int, seed: int, tick: Tick) -> Row:
    marks: dict[str, list[bool]] = defaultdict(list)
    for i, turns in enumerate(follow_ups(n, seed)):
        past = list[Turn]()
        for each in turns:
            heard, reply = answered(model, say(each.text, each.voice).pcm, past)
            past += [Turn("user", heard), Turn("assistant", reply)]
        marks[f"{len(turns) - 1} turns later"].append(same_words(reply, turns[-1].reply))
        tick("follow-ups", i + 1, n)
    return _row("follow-ups", marks)


def _unasked(model: Any, n: int, seed: int, tick: Tick) -> Row:
    marks: dict[str, list[bool]] = defaultdict(list)
    rng = np.random.default_rng([_ASKING, seed, n, 1])
    for i in range(n):
        kind = ("silence", "noise", "language")[i % 3]
        if kind == "language":
            pcm = say(*foreign(rng)).pcm
        elif kind == "noise":
            pcm = torch.from_numpy(clatter(rng))
        else:
            loud = 10.0 ** float(rng.uniform(-6, -3))
            pcm = torch.from_numpy(rng.normal(0, loud, 32000).astype(np.float32))
        heard, reply = answered(model, pcm)
        marks[kind].append(not heard and not reply)
        tick("other sounds", i + 1, n)
    row = _row("other sounds", marks)
    return {**row, "invented": row["questions"] - row["right"]}


def _row(mode: str, marks: dict[str, list[bool]]) -> Row:
    every = [mark for each in marks.values() for mark in each]
    right = sum(every)
    kinds = {kind: round(sum(each) / len(each), 4) for kind, each in sorted(marks.items())}
    share = right / len(every)
    found = {"task": "replies", "mode": mode, "score": share, "accuracy": share, "right": right}
    return {
        **found,
        "interval": interval(right, len(every)),
        "by_kind": kinds,
        "questions": len(every),
    }
