"""Lessons of the speech model: what it says, what it hears, and short conversations.

Heard recordings come from more voices and through bad lines. A place of a sequence predicts the
next id over text rows or over audio rows alone. The text that follows a `<next>` comes at once, or
late: passes that draft several tokens run past it (arXiv 2505.03739), and training does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.core.speech import Turn
from mmfast.frontends.codecs.embedded.codec import EmbeddedCodec, load_embedded
from mmfast.models.speech.layout import LOOK_AHEAD, MARKS, SpeechLayout
from mmfast.models.speech.tower import FRAMES
from mmfast.ops.audio import HOP, log_mel
from mmfast.tiny.speech.recordings import Corpus, EspeakVoice, Line, WordTime, build_corpus, worsen
from mmfast.tiny.speech.text import (
    PITCHES,
    VOICE_NAMES,
    Split,
    dialogue,
    heard_lines,
    question,
    sentence,
)

SPEEDS = (140, 165, 195)  # words per minute that the model speaks at
MIDDLE = (0.25, 0.5, 0.25)  # the middle speed and pitch are the most wanted
Style = tuple[int, int, int]  # voice, speed, pitch


class Sizes(NamedTuple):
    """Number of recordings of each kind."""

    say: int
    hear: int
    chat: int


def style(rng: np.random.Generator) -> Style:
    """One of the ways in which the model speaks."""
    drawn = (rng.integers(4), rng.choice(3, p=MIDDLE), rng.choice(3, p=MIDDLE))
    return (int(drawn[0]), int(drawn[1]), int(drawn[2]))


def voice(name: int, speed: int, pitch: int) -> EspeakVoice:
    """The espeak-ng voice of a style."""
    return EspeakVoice(VOICE_NAMES[name], SPEEDS[speed], PITCHES[pitch])


def said_lines(count: int, seed: int, split: Split = "train") -> tuple[list[Line], list[Style]]:
    """Texts to say, one in five of them a question, and their styles."""
    rng = np.random.default_rng([seed, 11])
    texts = [(question if rng.random() < 0.2 else sentence)(rng, split) for _ in range(count)]
    styles = [style(rng) for _ in texts]
    return [(text, voice(*way)) for text, way in zip(texts, styles, strict=True)], styles


def chats(count: int, seed: int) -> tuple[list[list[Turn]], list[Line], list[Line], list[Style]]:
    """Conversations, their last questions and replies as lines, and the styles of the replies."""
    rng = np.random.default_rng([seed, 12])
    turns = [dialogue(rng) for _ in range(count)]
    styles = [style(rng) for _ in turns]
    voices = [line[1] for line in heard_lines(count, seed + 7)]
    asked = [(each[-2].text, who) for each, who in zip(turns, voices, strict=True)]
    replies = [(each[-1].text, voice(*way)) for each, way in zip(turns, styles, strict=True)]
    return turns, asked, replies, styles


def recorded(folder: Path, sizes: Sizes, seed: int) -> dict[str, Corpus]:
    """Make the recordings of all kinds; those in the folder are not made again."""
    _, asked, replies, _ = chats(sizes.chat, seed)
    said, _ = said_lines(sizes.say, seed)
    heard = heard_lines(sizes.hear, seed)
    wanted = {"say": said, "hear": heard, "ask": asked, "reply": replies}
    found: dict[str, Corpus] = {}
    for kind, lines in wanted.items():
        place = folder / kind
        known = Corpus(place) if any(place.glob("*.json")) else None
        if known is None or [r.text for r in known.recordings] != [text for text, _ in lines]:
            known = build_corpus(place, lines)
        found[kind] = known
    return found


COUNTED = 31  # words that the read-out of the encoder counts to
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
    whole = len(mel) // FRAMES * FRAMES
    return mel[:whole].numpy().astype(np.float16), before


def heard(
    layout: SpeechLayout, words: tuple[WordTime, ...], mel: NDArray[np.float16], before: int
) -> HeardSpeech:
    """A recording to understand; `before` samples of silence precede the words' times."""
    spoken = [word for word in words if word.text not in MARKS]
    ends = np.array([word.stop + before for word in spoken])
    known = (np.arange(len(mel) // FRAMES) + 1) * FRAMES * HOP
    count = np.searchsorted(ends, known, side="right")
    ids = [layout.group(word.text) for word in spoken]
    names = np.array([0, *(each[-1] for each in ids)])
    return HeardSpeech(
        mel, [i for each in ids for i in each], names[count], count.clip(max=COUNTED)
    )


def hear_bank(path: Path, layout: SpeechLayout, corpus: Corpus, seed: int) -> list[HeardSpeech]:
    """Recordings to understand, each through a bad line of its own, cached in the file `path`."""
    if not path.exists():
        tasks = ((corpus.samples(i), seed, i) for i in range(len(corpus)))
        with get_context("spawn").Pool(2) as pool:
            found = list(pool.imap(_listen, tasks, chunksize=32))
        torch.save([(torch.from_numpy(mel), before) for mel, before in found], path)
    kept = zip(corpus.recordings, torch.load(path), strict=True)
    return [heard(layout, row.words, mel.numpy(), before) for row, (mel, before) in kept]


NONE, TEXT, AUDIO = 0, 1, 2  # rows that a place predicts
PATTERNS = ((11,), (11, 1, 1, 1), (5, 1, 1, 9, 1, 1, 1), (6,), (4,))  # tokens of each pass


@dataclass
class LineBuilder:
    """A sequence while it is put together."""

    ids: list[int]
    kinds: list[int]  # for each id, the rows that predict it
    sound: HeardSpeech | None = None
    slots: int = 0  # place of the first embedding of sound

    def add(self, ids: Sequence[int], kind: int = NONE) -> None:
        """Append ids."""
        self.ids += ids
        self.kinds += repeat(kind, len(ids))


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences of about one length, padded on the right."""

    ids: Tensor  # [B, L]
    kind: Tensor  # [B, L] rows that predict the NEXT id: none, text or audio
    mel: Tensor | None  # [B, 4 A, 80]
    at: Tensor | None  # [B, A] places of the embeddings, -1 = padding
    last: Tensor | None  # [B, A]
    count: Tensor | None  # [B, A]


def passes(rng: np.random.Generator) -> Iterator[int]:
    """Tokens of each pass of the backbone, at random."""
    draw = rng.random()
    if draw < 0.4:
        return repeat(1)
    if draw < 0.75:
        pattern = PATTERNS[int(rng.integers(len(PATTERNS)))]
        return (n for _ in repeat(0) for n in pattern)
    return (int(rng.integers(1, 13)) for _ in repeat(0))


def interleave(
    line: LineBuilder, layout: SpeechLayout, said: SpokenText, runs: Iterator[int], kind: int = NONE
) -> None:
    """Append text and sound by turns; `kind` says whether the text is predicted or given."""
    done = [layout.id("<done>")]
    first, queue = said.groups[: LOOK_AHEAD + 1], said.groups[LOOK_AHEAD + 1 :]
    for group in first:
        line.add(group, kind)
    queue = [*queue, done] if queue else []
    if not queue:
        line.add(done, kind)
    due: list[list[int]] = []
    left, final = next(runs), len(said.sounds) - 1
    for i, sound in enumerate(said.sounds):
        tokens = [*sound.tolist(), layout.end if i == final else layout.next]
        for at, token in enumerate(tokens):
            line.add([token], AUDIO)
            if at == len(tokens) - 1 and queue:
                due.append(queue.pop(0))
            left -= 1
            if left == 0:
                for group in due:
                    line.add(group, kind)
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


def listening(
    layout: SpeechLayout, sound: HeardSpeech, line: LineBuilder | None = None
) -> LineBuilder:
    """The sequence of speech that is understood."""
    line = line or LineBuilder([], [])
    line.add([layout.id("<listen>")])
    line.sound, line.slots = sound, len(line.ids)
    line.add([0] * len(sound.last))
    line.add([layout.id("<heard>")])
    line.add([*sound.words, layout.id("<done>")], TEXT)
    return line


def chatting(
    layout: SpeechLayout,
    turns: Sequence[Turn],
    sound: HeardSpeech,
    said: SpokenText,
    rng: np.random.Generator,
) -> LineBuilder:
    """The sequence of a conversation: the past as text, a question heard, its reply said."""
    line = LineBuilder([], [])
    line.add(layout.history([(turn.role, turn.text) for turn in turns[:-2]]))
    line = listening(layout, sound, line)
    line.add([layout.id("<answer>"), *styled(layout, said)])
    interleave(line, layout, said, passes(rng), TEXT)
    return line


def stack(lines: Sequence[LineBuilder]) -> PaddedBatch:
    """Pad sequences to a batch."""
    length = max(len(line.ids) for line in lines)
    ids = torch.zeros(len(lines), length, dtype=torch.long)
    kind = torch.zeros(len(lines), length, dtype=torch.long)
    for row, line in enumerate(lines):
        ids[row, : len(line.ids)] = torch.tensor(line.ids)
        kind[row, : len(line.kinds) - 1] = torch.tensor(line.kinds[1:])
    sounds = [line.sound for line in lines]
    if any(sound is None for sound in sounds):
        return PaddedBatch(ids, kind, None, None, None, None)
    slots = max(len(sound.last) for sound in sounds if sound)
    mel = np.full((len(lines), 4 * slots, 80), -11.5, np.float32)
    at, last, count = (np.full((len(lines), slots), -1) for _ in range(3))
    for row, (line, sound) in enumerate(zip(lines, sounds, strict=True)):
        assert sound is not None
        many = len(sound.last)
        mel[row, : 4 * many] = sound.mel
        at[row, :many] = line.slots + np.arange(many)
        last[row, :many], count[row, :many] = sound.last, sound.count
    return PaddedBatch(ids, kind, *(torch.from_numpy(x) for x in (mel, at, last, count)))


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
