"""Lessons of the speech model: what it says, and what it hears.

Heard recordings come from more voices and through bad lines, some in other languages, some without
a word. A place of a sequence that is said predicts the next id over audio rows alone. The text that
follows a `<next>` comes at once, or late: passes that draft several tokens run past it where
nothing verifies them (arXiv 2505.03739), and training does the same now and then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.frontends.codecs.embedded.codec import EmbeddedCodec, load_embedded
from mmfast.models.speech.ear import SLOTS
from mmfast.models.speech.layout import LOOK_AHEAD, MARKS, SpeechLayout
from mmfast.ops.audio import HOP, log_mel
from mmfast.tiny.speech.dialogue import dialogue, jumbled, spoken_questions
from mmfast.tiny.speech.recordings import Corpus, EspeakVoice, Line, WordTime, build_corpus, worsen
from mmfast.tiny.speech.text import (
    PITCHES,
    SPEEDS,
    VOICE_NAMES,
    Split,
    heard_voice,
    question,
    sentence,
    split_of,
)
from mmfast.tiny.speech.unheard import clatter, foreign, is_foreign

MIDDLE = (0.25, 0.5, 0.25)  # the middle speed and pitch are the most wanted
Style = tuple[int, int, int]  # voice, speed, pitch


class Sizes(NamedTuple):
    """Number of recordings of each kind."""

    say: int
    hear: int


def style(rng: np.random.Generator) -> Style:
    """One of the ways in which the model speaks."""
    drawn = (rng.integers(4), rng.choice(3, p=MIDDLE), rng.choice(3, p=MIDDLE))
    return (int(drawn[0]), int(drawn[1]), int(drawn[2]))


def voice(name: int, speed: int, pitch: int) -> EspeakVoice:
    """The espeak-ng voice of a style."""
    return EspeakVoice(VOICE_NAMES[name], SPEEDS[speed], PITCHES[pitch])


def said_text(rng: np.random.Generator, split: Split = "train") -> str:
    """A text to say: words in any order, sentences, questions, replies of conversations."""
    while True:
        draw = rng.random()
        if draw < 0.45:
            text = jumbled(rng)
        elif draw < 0.8:
            text = (sentence if draw < 0.7 else question)(rng, split)
        else:
            text = dialogue(rng, split)[-1].text
        if split_of(text) == split:
            return text


def said_lines(count: int, seed: int, split: Split = "train") -> tuple[list[Line], list[Style]]:
    """Texts to say and their styles."""
    rng = np.random.default_rng([seed, 11])
    texts = [said_text(rng, split) for _ in range(count)]
    styles = [style(rng) for _ in texts]
    return [(text, voice(*way)) for text, way in zip(texts, styles, strict=True)], styles


def heard_lines(count: int, seed: int, split: Split = "train") -> list[Line]:
    """Lines to hear, in the wider range of voices; one in fourteen is in another language."""
    rng, found = np.random.default_rng([seed, 13]), list[Line]()
    asked = spoken_questions(rng, split)
    for _ in range(count):
        draw = rng.random()
        if draw < 0.07:
            found.append(foreign(rng))
            continue
        if draw < 0.3:
            text = jumbled(rng)
        elif draw < 0.7:
            text = next(asked)
        else:
            text = (question if draw < 0.82 else sentence)(rng, split)
        found.append((text, heard_voice(rng)))
    return found


def recorded(folder: Path, sizes: Sizes, seed: int) -> dict[str, Corpus]:
    """Make the recordings of all kinds; those in the folder are not made again."""
    said, _ = said_lines(sizes.say, seed)
    wanted = {"say": said, "hear": heard_lines(sizes.hear, seed)}
    found: dict[str, Corpus] = {}
    for kind, lines in wanted.items():
        place = folder / kind
        known = Corpus(place) if any(place.glob("*.json")) else None
        if known is None or [r.text for r in known.recordings] != [text for text, _ in lines]:
            known = build_corpus(place, lines)
        found[kind] = known
    return found


Ids = NDArray[np.int64]


@dataclass(frozen=True)
class SpokenText:
    """A text and its sound, group by group."""

    style: Style
    groups: list[list[int]]  # ids of each word and mark
    sounds: list[Ids]  # ids of the codes of each

    @property
    def length(self) -> int:
        """Approximate number of tokens."""
        return sum(map(len, self.groups)) + sum(map(len, self.sounds)) + len(self.groups) + 5


@dataclass(frozen=True)
class HeardSpeech:
    """Sound that is heard, its words, and the words ended at each embedding."""

    mel: NDArray[np.float16]  # [4 A, 80]
    words: list[int]  # ids, without marks
    last: Ids  # [A] id of the last word that has ended, 0 before the first
    count: Ids  # [A] words that have ended

    @property
    def length(self) -> int:
        """Approximate number of tokens."""
        return len(self.last) + len(self.words) + 3


def say_bank(
    layout: SpeechLayout, corpus: Corpus, styles: list[Style], codes: list[Tensor], hop: int
) -> list[SpokenText]:
    """Recordings to say, the codes `[Q, T]` of each assigned to its words."""
    found = []
    for row, each, way in zip(corpus.recordings, codes, styles, strict=True):
        ids, cuts = layout.code_ids(each).numpy(), [0]
        for word in row.words[:-1]:
            cuts.append(min(each.shape[1], max(cuts[-1], round(word.stop / hop))))
        places = (np.array([*cuts, each.shape[1]]) * layout.books).tolist()
        sounds = [ids[start:stop] for start, stop in pairwise(places)]
        found.append(SpokenText(way, [layout.group(word.text) for word in row.words], sounds))
    return found


def encoded(path: Path, corpus: Corpus, codec: Path, workers: int = 2) -> list[Tensor]:
    """Codes `[Q, T]` of all recordings by the codec in a folder, cached in the file `path`."""
    if not path.exists():
        with get_context("spawn").Pool(workers, _open, (codec,)) as pool:
            sounds = (corpus.samples(i) for i in range(len(corpus)))
            found = list(pool.imap(_encode, sounds, chunksize=32))
        torch.save([torch.from_numpy(each) for each in found], path)
    return [each.long() for each in torch.load(path)]


_codec: dict[str, EmbeddedCodec] = {}


def _open(codec: Path) -> None:
    torch.set_num_threads(1)
    _codec["own"] = load_embedded(codec)


def _encode(pcm: NDArray[np.int16]) -> NDArray[np.int16]:
    sound = torch.from_numpy(pcm.astype(np.float32) / 32767)[None]
    with torch.inference_mode():
        codes: NDArray[np.int16] = _codec["own"].encode(sound)[0].numpy().astype(np.int16)
    return codes


def _listen(task: tuple[NDArray[np.int16], int, int]) -> tuple[NDArray[np.float16], int]:
    pcm, seed, number = task
    torch.set_num_threads(1)
    sound, before = worsen((pcm / 32767).astype(np.float32), np.random.default_rng([seed, number]))
    mel = log_mel(torch.from_numpy(sound), torch.float32)
    whole = len(mel) // SLOTS * SLOTS
    return mel[:whole].numpy().astype(np.float16), before


def heard(
    layout: SpeechLayout, words: Sequence[WordTime], mel: NDArray[np.float16], before: int
) -> HeardSpeech:
    """A recording to understand; `before` samples of silence precede the words' times."""
    spoken = [word for word in words if word.text not in MARKS]
    ends = np.array([word.stop + before for word in spoken])
    known = (np.arange(len(mel) // SLOTS) + 1) * SLOTS * HOP
    count = np.searchsorted(ends, known, side="right")
    ids = [layout.group(word.text) for word in spoken]
    names = np.array([0, *(each[-1] for each in ids)])
    return HeardSpeech(mel, [i for each in ids for i in each], names[count], count)


SILENT = 0.05  # recordings without a word, of those to understand


def hear_bank(path: Path, layout: SpeechLayout, corpus: Corpus, seed: int) -> list[HeardSpeech]:
    """Recordings to understand, each through a bad line of its own, cached in the file `path`.

    Of other languages, and of noise that is mixed in, nothing is to be understood.
    """
    if not path.exists():
        rng = np.random.default_rng([seed, 14])
        noises = [(clatter(rng) * 32767).astype(np.int16) for _ in range(int(SILENT * len(corpus)))]
        sounds = (corpus.samples(i) for i in range(len(corpus)))
        tasks = ((pcm, seed, i) for i, pcm in enumerate(chain(sounds, noises)))
        with get_context("spawn").Pool(2) as pool:
            found = list(pool.imap(_listen, tasks, chunksize=32))
        torch.save([(torch.from_numpy(mel), before) for mel, before in found], path)
    words = [() if is_foreign(row.voice) else row.words for row in corpus.recordings]
    mels = torch.load(path)
    words += [()] * (len(mels) - len(words))
    lessons = [
        heard(layout, each, mel.numpy(), before)
        for each, (mel, before) in zip(words, mels, strict=True)
    ]
    order = np.random.default_rng([seed, 15]).permutation(len(lessons))
    return [lessons[i] for i in order]


NONE, AUDIO = 0, 1  # rows that a place predicts
ALONE = 0.8  # share of texts whose words come at once
PATTERNS = ((11,), (11, 1, 1, 1), (5, 1, 1, 9, 1, 1, 1), (6,), (4,))  # tokens of each pass


@dataclass
class LineBuilder:
    """A sequence while it is put together."""

    ids: list[int]
    kinds: list[int]  # for each id, the rows that predict it

    def add(self, ids: Sequence[int], kind: int = NONE) -> None:
        """Append ids."""
        self.ids += ids
        self.kinds += repeat(kind, len(ids))


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences of about one length, padded on the right."""

    ids: Tensor  # [B, L]
    kind: Tensor  # [B, L] rows that predict the NEXT id: none or audio


def passes(rng: np.random.Generator) -> Iterator[int]:
    """Tokens of each pass of the backbone, at random."""
    draw = rng.random()
    if draw < ALONE:
        return repeat(1)
    if draw < (1 + ALONE) / 2:
        pattern = PATTERNS[int(rng.integers(len(PATTERNS)))]
        return (n for _ in repeat(0) for n in pattern)
    return (int(rng.integers(1, 13)) for _ in repeat(0))


def interleave(
    line: LineBuilder, layout: SpeechLayout, said: SpokenText, runs: Iterator[int]
) -> None:
    """Append text and sound by turns: text runs ahead, and each group is named again when due."""
    done, final = [layout.id("<done>")], len(said.sounds) - 1
    queue = [*said.groups[LOOK_AHEAD + 1 :], done]
    for group in said.groups[: LOOK_AHEAD + 1]:
        line.add(group)
    if len(queue) == 1:
        line.add(queue.pop())
    line.add(said.groups[0])
    due: list[list[int]] = []
    left = next(runs)
    for i, sound in enumerate(said.sounds):
        tokens = [*sound.tolist(), layout.end if i == final else layout.next]
        for at, token in enumerate(tokens):
            line.add([token], AUDIO)
            if at == len(tokens) - 1 and i < final:
                due += [queue.pop(0)] if queue else []
                due.append(said.groups[i + 1])
            left -= 1
            if left == 0:
                for group in due:
                    line.add(group)
                due, left = [], next(runs)


def styled(layout: SpeechLayout, said: SpokenText) -> list[int]:
    """Ids of voice, speed and pitch."""
    names = ("voice", "speed", "pitch")
    return [layout.id(f"<{n}{i}>") for n, i in zip(names, said.style, strict=True)]


def speaking_line(layout: SpeechLayout, said: SpokenText, runs: Iterator[int]) -> LineBuilder:
    """The sequence of a text with its sound, laid out for passes of so many tokens."""
    line = LineBuilder([], [])
    line.add([layout.id("<speak>"), *styled(layout, said)])
    interleave(line, layout, said, runs)
    return line


def speaking(layout: SpeechLayout, said: SpokenText, rng: np.random.Generator) -> LineBuilder:
    """The sequence of a text that is said, a few of its words spelled."""
    spelled = [_spell(layout, g) if rng.random() < 0.04 else g for g in said.groups]
    return speaking_line(layout, SpokenText(said.style, spelled, said.sounds), passes(rng))


def _spell(layout: SpeechLayout, group: list[int]) -> list[int]:
    name = layout.rows[group[0]]
    if len(group) > 1 or len(name) < 3 or not name.endswith("_"):
        return group
    return [layout.index[c] for c in name[:-2]] + [layout.index[name[-2:]]]


def stack(lines: Sequence[LineBuilder]) -> PaddedBatch:
    """Pad sequences to a batch."""
    length = max(len(line.ids) for line in lines)
    ids = torch.zeros(len(lines), length, dtype=torch.long)
    kind = torch.zeros(len(lines), length, dtype=torch.long)
    for row, line in enumerate(lines):
        ids[row, : len(line.ids)] = torch.tensor(line.ids)
        kind[row, : len(line.kinds) - 1] = torch.tensor(line.kinds[1:])
    return PaddedBatch(ids, kind)


def buckets(
    lengths: Sequence[int], tokens: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Indices in batches of about so many tokens, alike in length, in random order."""
    order = np.argsort(np.asarray(lengths) + rng.uniform(0, 6, len(lengths)))
    found: list[list[int]] = [[]]
    for i in order.tolist():
        if found[-1] and lengths[i] * (len(found[-1]) + 1) > tokens:
            found.append([])
        found[-1].append(i)
    return [np.array(found[i]) for i in rng.permutation(len(found))]
