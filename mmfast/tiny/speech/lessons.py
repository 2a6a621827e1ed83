"""Lessons of the speech model: what is said, what is heard, and short conversations.

All are drawn from a seed and said by espeak-ng; sound that the model listens to comes from more
voices than it speaks with, and through bad rooms, wires and microphones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmfast.core.speech import Turn
from mmfast.tiny.speech.corpus import Corpus, Line, build_corpus, heard_lines
from mmfast.tiny.speech.dialogue import dialogue
from mmfast.tiny.speech.recordings import EspeakVoice
from mmfast.tiny.speech.text import PITCHES, VOICE_NAMES, Split, question, sentence

SPEEDS = (140, 165, 195)  # words per minute that the model speaks at
KINDS = ("say", "hear", "ask", "reply")  # folders of recordings
MIDDLE = (0.25, 0.5, 0.25)  # the middle speed and pitch are the most wanted
Style = tuple[int, int, int]  # voice, speed, pitch
Samples = NDArray[np.float32]


@dataclass(frozen=True)
class Sizes:
    """How many recordings of each kind."""

    say: int = 12000
    hear: int = 12000
    chat: int = 6000


def style(rng: np.random.Generator) -> Style:
    """One of the ways in which the model speaks."""
    drawn = (rng.integers(4), rng.choice(3, p=MIDDLE), rng.choice(3, p=MIDDLE))
    return (int(drawn[0]), int(drawn[1]), int(drawn[2]))


def voice(name: int, speed: int, pitch: int) -> EspeakVoice:
    """How espeak-ng says it."""
    return EspeakVoice(VOICE_NAMES[name], SPEEDS[speed], PITCHES[pitch])


def said_lines(count: int, seed: int, split: Split = "train") -> tuple[list[Line], list[Style]]:
    """Texts to say, one in five of them a question, and how."""
    rng = np.random.default_rng([seed, 11])
    texts = [(question if rng.random() < 0.2 else sentence)(rng, split) for _ in range(count)]
    styles = [style(rng) for _ in texts]
    return [(text, voice(*way)) for text, way in zip(texts, styles, strict=True)], styles


def chats(
    count: int, seed: int, split: Split = "train"
) -> tuple[list[list[Turn]], list[Line], list[Line], list[Style]]:
    """Conversations, their last questions and replies as they are said, and how the latter are."""
    rng = np.random.default_rng([seed, 12])
    turns = [dialogue(rng, split) for _ in range(count)]
    styles = [style(rng) for _ in turns]
    voices = [line[1] for line in heard_lines(count, seed + 7, split)]
    asked = [(each[-2].text, who) for each, who in zip(turns, voices, strict=True)]
    replies = [(each[-1].text, voice(*way)) for each, way in zip(turns, styles, strict=True)]
    return turns, asked, replies, styles


def recorded(folder: Path, sizes: Sizes, seed: int, workers: int = 2) -> dict[str, Corpus]:
    """The recordings of all kinds; those that the folder has are not made again."""
    _, asked, replies, _ = chats(sizes.chat, seed)
    said, _ = said_lines(sizes.say, seed)
    wanted: dict[str, list[tuple[str, EspeakVoice]]] = {
        "say": said, "hear": heard_lines(sizes.hear, seed), "ask": asked, "reply": replies
    }  # fmt: skip
    found: dict[str, Corpus] = {}
    for kind, lines in wanted.items():
        place = folder / kind
        known = Corpus(place) if any(place.glob("*.json")) else None
        if known is None or [r.text for r in known.recordings] != [text for text, _ in lines]:
            known = build_corpus(place, lines, workers)
        found[kind] = known
    return found
