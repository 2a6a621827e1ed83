"""Recordings as the model takes them: ids and codes of what it says, log-mel of what it hears."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mmfast.frontends.codecs.embedded import EmbeddedCodec, load_embedded
from mmfast.models.speech_layout import MARKS, SpeechLayout
from mmfast.models.speech_tower import FRAMES
from mmfast.ops.log_mel import HOP, log_mel
from mmfast.tiny.espeak import RATE, WordTime
from mmfast.tiny.speech_corpus import Corpus
from mmfast.tiny.speech_lessons import Style
from mmfast.tiny.speech_noise import worsen

COUNTED = 31  # words that the read-out of the ear counts to
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Said:
    """A text and its sound, group by group."""

    style: Style
    groups: list[list[int]]  # ids of each word and mark
    sounds: list[Ids]  # ids of the codes of each

    @property
    def length(self) -> int:
        """Tokens in all, about."""
        return sum(map(len, self.groups)) + sum(map(len, self.sounds)) + len(self.groups) + 5


@dataclass(frozen=True)
class Heard:
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
) -> Said:
    """A recording's groups with their codes: codes `[Q, T]`."""
    ids, total, start = layout.code_ids(codes).numpy(), codes.shape[1], 0
    groups, sounds = [], []
    for i, word in enumerate(words):
        stop = total if i == len(words) - 1 else min(total, max(start, round(word.stop / hop)))
        groups.append(layout.group(word.text))
        sounds.append(ids[start * layout.books : stop * layout.books])
        start = stop
    return Said(style, groups, sounds)


def say_bank(
    layout: SpeechLayout, corpus: Corpus, styles: list[Style], codes: list[torch.Tensor], hop: int
) -> list[Said]:
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


def hear_bank(layout: SpeechLayout, corpus: Corpus, seed: int, workers: int = 2) -> list[Heard]:
    """All recordings of what is to be understood, each through some bad line of its own."""
    with get_context("spawn").Pool(workers) as pool:
        listened = list(pool.imap(_listen, _tasks(corpus, seed), chunksize=32))
    pairs = zip(corpus.recordings, listened, strict=True)
    return [heard(layout, row.words, mel, before) for row, (mel, before) in pairs]


def heard(
    layout: SpeechLayout, words: tuple[WordTime, ...], mel: NDArray[np.float16], before: int
) -> Heard:
    """One of them; `before` samples of silence lie in front of the words' times."""
    spoken = [word for word in words if word.text not in MARKS]
    ends = np.array([word.stop + before for word in spoken])
    known = (np.arange(len(mel) // FRAMES) + 1) * FRAMES * HOP
    count = np.searchsorted(ends, known, side="right")
    ids = [layout.group(word.text) for word in spoken]
    names = np.array([0, *(each[-1] for each in ids)])
    return Heard(mel, [i for each in ids for i in each], names[count], count.clip(max=COUNTED))


def save_heard(path: Path, bank: list[Heard]) -> None:
    """Keep a bank, all of it in one file."""
    columns = {
        "mel": np.concatenate([h.mel for h in bank]),
        "words": np.array([i for h in bank for i in h.words]),
        "last": np.concatenate([h.last for h in bank]),
        "count": np.concatenate([h.count for h in bank]),
        "sizes": np.array([(len(h.last), len(h.words)) for h in bank]),
    }
    np.savez(path, **columns)  # type: ignore[arg-type]


def load_heard(path: Path) -> list[Heard]:
    """What `save_heard` kept."""
    kept = np.load(path)
    mel, words, last, count = (kept[name] for name in ("mel", "words", "last", "count"))
    found, at, word = [], 0, 0
    for slots, many in kept["sizes"].tolist():
        now = slice(at, at + slots)
        sound = mel[at * FRAMES : (at + slots) * FRAMES]
        found.append(Heard(sound, words[word : word + many].tolist(), last[now], count[now]))
        at, word = at + slots, word + many
    return found


def parts(bank: list[Heard], held: int) -> tuple[list[Heard], list[Heard]]:
    """All but the last `held`, and those."""
    return list(islice(bank, len(bank) - held)), bank[-held:]


assert RATE == 100 * HOP
