"""Recordings as the model takes them: ids and codes of what it says, log-mel of what it hears.

Sequences of the speech model: ids, what each place owes, and where embeddings of sound go.

The kind of the next token is known from the layout, so a place is scored over text rows or over
audio rows alone. Text that a `<next>` owes comes at once, or late: passes that draft several
tokens run past it (arXiv 2505.03739 drafts so), and training does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.core.speech import Turn
from mmfast.frontends.codecs.embedded.codec import EmbeddedCodec, load_embedded
from mmfast.models.speech.layout import LOOK_AHEAD, MARKS, SpeechLayout
from mmfast.models.speech.tower import FRAMES
from mmfast.ops.audio import HOP, log_mel
from mmfast.tiny.speech.corpus import Corpus
from mmfast.tiny.speech.lessons import Style
from mmfast.tiny.speech.recordings import RATE, WordTime, worsen

COUNTED = 31  # words that the read-out of the ear counts to
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class SpokenText:
    """A text and its sound, group by group."""

    style: Style
    groups: list[list[int]]  # ids of each word and mark
    sounds: list[Ids]  # ids of the codes of each

    @property
    def length(self) -> int:
        """Tokens in all, about."""
        return sum(map(len, self.groups)) + sum(map(len, self.sounds)) + len(self.groups) + 5


@dataclass(frozen=True)
class HeardSpeech:
    """What was heard: sound, words, and what the ear knows after each embedding."""

    mel: NDArray[np.float16]  # [4 A, 80]
    words: list[int]  # ids, without marks
    last: Ids  # [A] id of the word that ended last, 0 before the first
    count: Ids  # [A] words that have ended

    @property
    def length(self) -> int:
        """Tokens in all, about."""
        return len(self.last) + len(self.words) + 3


def said(
    layout: SpeechLayout, words: tuple[WordTime, ...], codes: torch.Tensor, style: Style, hop: int
) -> SpokenText:
    """A recording's groups with their codes: codes `[Q, T]`."""
    ids, total, start = layout.code_ids(codes).numpy(), codes.shape[1], 0
    groups, sounds = [], []
    for i, word in enumerate(words):
        stop = total if i == len(words) - 1 else min(total, max(start, round(word.stop / hop)))
        groups.append(layout.group(word.text))
        sounds.append(ids[start * layout.books : stop * layout.books])
        start = stop
    return SpokenText(style, groups, sounds)


def say_bank(
    layout: SpeechLayout, corpus: Corpus, styles: list[Style], codes: list[torch.Tensor], hop: int
) -> list[SpokenText]:
    """All recordings of what is to be said, with their codes `[Q, T]`."""
    lines = zip(corpus.recordings, codes, styles, strict=True)
    return [said(layout, row.words, each, way, hop) for row, each, way in lines]


def encoded(path: Path, corpus: Corpus, codec: Path, workers: int = 2) -> list[torch.Tensor]:
    """Codes `[Q, T]` of all recordings, by a codec in a folder; `path` keeps them."""
    if not path.exists():
        with get_context("spawn").Pool(workers, _open, (codec,)) as pool:
            sounds = (corpus.samples(i) for i in range(len(corpus)))
            found = list(pool.imap(_encode, sounds, chunksize=32))
        sizes = np.array([each.shape[1] for each in found])
        np.savez(path, codes=np.concatenate(found, 1), sizes=sizes)
    kept = np.load(path)
    whole = torch.from_numpy(kept["codes"].astype(np.int64))
    return list(whole.split(kept["sizes"].tolist(), 1))


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


def _tasks(corpus: Corpus, seed: int) -> Iterator[tuple[NDArray[np.int16], int, int]]:
    return ((corpus.samples(i), seed, i) for i in range(len(corpus)))


def hear_bank(
    layout: SpeechLayout, corpus: Corpus, seed: int, workers: int = 2
) -> list[HeardSpeech]:
    """All recordings of what is to be understood, each through some bad line of its own."""
    with get_context("spawn").Pool(workers) as pool:
        listened = list(pool.imap(_listen, _tasks(corpus, seed), chunksize=32))
    pairs = zip(corpus.recordings, listened, strict=True)
    return [heard(layout, row.words, mel, before) for row, (mel, before) in pairs]


def heard(
    layout: SpeechLayout, words: tuple[WordTime, ...], mel: NDArray[np.float16], before: int
) -> HeardSpeech:
    """One of them; `before` samples of silence lie in front of the words' times."""
    spoken = [word for word in words if word.text not in MARKS]
    ends = np.array([word.stop + before for word in spoken])
    known = (np.arange(len(mel) // FRAMES) + 1) * FRAMES * HOP
    count = np.searchsorted(ends, known, side="right")
    ids = [layout.group(word.text) for word in spoken]
    names = np.array([0, *(each[-1] for each in ids)])
    return HeardSpeech(
        mel, [i for each in ids for i in each], names[count], count.clip(max=COUNTED)
    )


def save_heard(path: Path, bank: list[HeardSpeech]) -> None:
    """Keep a bank, all of it in one file."""
    columns = {
        "mel": np.concatenate([h.mel for h in bank]),
        "words": np.array([i for h in bank for i in h.words]),
        "last": np.concatenate([h.last for h in bank]),
        "count": np.concatenate([h.count for h in bank]),
        "sizes": np.array([(len(h.last), len(h.words)) for h in bank]),
    }
    np.savez(path, **columns)  # type: ignore[arg-type]


def load_heard(path: Path) -> list[HeardSpeech]:
    """What `save_heard` kept."""
    kept = np.load(path)
    mel, words, last, count = (kept[name] for name in ("mel", "words", "last", "count"))
    found, at, word = [], 0, 0
    for slots, many in kept["sizes"].tolist():
        now = slice(at, at + slots)
        sound = mel[at * FRAMES : (at + slots) * FRAMES]
        found.append(HeardSpeech(sound, words[word : word + many].tolist(), last[now], count[now]))
        at, word = at + slots, word + many
    return found


def parts(bank: list[HeardSpeech], held: int) -> tuple[list[HeardSpeech], list[HeardSpeech]]:
    """All but the last `held`, and those."""
    return list(islice(bank, len(bank) - held)), bank[-held:]


assert RATE == 100 * HOP


NONE, TEXT, AUDIO = 0, 1, 2  # what a place owes
PATTERNS = ((11,), (11, 1, 1, 1), (5, 1, 1, 9, 1, 1, 1), (6,), (4,))  # tokens of each pass


@dataclass
class LineBuilder:
    """One of them while it is put together."""

    ids: list[int]
    owes: list[int]  # for each id, how it is scored
    sound: HeardSpeech | None = None
    slots: int = 0  # place of the first embedding of sound

    def add(self, ids: Sequence[int], kind: int = NONE) -> None:
        """Append ids."""
        self.ids += ids
        self.owes += repeat(kind, len(ids))


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences of about one length, padded on the right."""

    ids: Tensor  # [B, L]
    kind: Tensor  # [B, L] what the place owes: the NEXT id, scored over text or audio rows
    mel: Tensor | None  # [B, 4 A, 80]
    at: Tensor | None  # [B, A] places of the embeddings, -1 = padding
    last: Tensor | None  # [B, A]
    count: Tensor | None  # [B, A]


def passes(rng: np.random.Generator) -> Iterator[int]:
    """How many tokens each pass of the backbone gives."""
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
    """Append text and sound by turns; `kind` tells whether the text is owed or given."""
    done = [layout.id("<done>")]
    first, queue = said.groups[: LOOK_AHEAD + 1], said.groups[LOOK_AHEAD + 1 :]
    for group in first:
        line.add(group, kind)
    queue = [*queue, done] if queue else []
    if not queue:
        line.add(done, kind)
    owed: list[list[int]] = []
    left, final = next(runs), len(said.sounds) - 1
    for i, sound in enumerate(said.sounds):
        tokens = [*sound.tolist(), layout.end if i == final else layout.next]
        for at, token in enumerate(tokens):
            line.add([token], AUDIO)
            if at == len(tokens) - 1 and queue:
                owed.append(queue.pop(0))
            left -= 1
            if left == 0:
                for group in owed:
                    line.add(group, kind)
                owed, left = [], next(runs)


def styled(layout: SpeechLayout, said: SpokenText) -> list[int]:
    """Ids of voice, speed and pitch."""
    names = ("voice", "speed", "pitch")
    return [layout.id(f"<{n}{i}>") for n, i in zip(names, said.style, strict=True)]


def speaking(layout: SpeechLayout, said: SpokenText, rng: np.random.Generator) -> LineBuilder:
    """A text that is said."""
    line = LineBuilder([], [])
    line.add([layout.id("<speak>"), *styled(layout, said)])
    spelled = [_spell(layout, g) if rng.random() < 0.04 else g for g in said.groups]
    interleave(line, layout, SpokenText(said.style, spelled, said.sounds), passes(rng))
    return line


def _spell(layout: SpeechLayout, group: list[int]) -> list[int]:
    name = layout.rows[group[0]]
    if len(group) > 1 or len(name) < 3 or not name.endswith("_"):
        return group
    return [layout.index[c] for c in name[:-2]] + [layout.index[name[-2:]]]


def listening(
    layout: SpeechLayout, sound: HeardSpeech, line: LineBuilder | None = None
) -> LineBuilder:
    """Speech that is understood."""
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
    """A conversation: the past as text, the last question heard, its reply said."""
    line = LineBuilder([], [])
    line.add(layout.history([(turn.role, turn.text) for turn in turns[:-2]]))
    line = listening(layout, sound, line)
    line.add([layout.id("<answer>"), *styled(layout, said)])
    interleave(line, layout, said, passes(rng), TEXT)
    return line


def stack(lines: Sequence[LineBuilder]) -> PaddedBatch:
    """Sequences to a batch."""
    length = max(len(line.ids) for line in lines)
    ids = torch.zeros(len(lines), length, dtype=torch.long)
    kind = torch.zeros(len(lines), length, dtype=torch.long)
    for row, line in enumerate(lines):
        ids[row, : len(line.ids)] = torch.tensor(line.ids)
        kind[row, : len(line.owes) - 1] = torch.tensor(line.owes[1:])
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
