"""Recordings in bulk: texts said by espeak-ng in several processes, kept as int16 in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmfast.core.errors import MediaError
from mmfast.tiny.speech.recordings import EspeakVoice, Speech, WordTime, say
from mmfast.tiny.speech.text import VOICES, Split, heard_voice, question, sentence

SHARD = 500  # recordings in a file
Line = tuple[str, EspeakVoice]  # what is said, and how


@dataclass(frozen=True)
class Recording:
    """A text, how it was said, and where it is in its file."""

    text: str
    voice: EspeakVoice
    shard: int
    start: int
    stop: int
    words: tuple[WordTime, ...]


class Corpus:
    """A folder of recordings; sound is read from the disk when it is asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        files = sorted(self.folder.glob("*.json"))
        if not files:
            raise MediaError(f"{self.folder} holds no recordings; make some with build_corpus")
        self.sound = [np.load(file.with_suffix(".npy"), mmap_mode="r") for file in files]
        self.recordings = [row for i, file in enumerate(files) for row in _read(file, i)]

    def __len__(self) -> int:
        return len(self.recordings)

    def samples(self, index: int) -> NDArray[np.int16]:
        """A recording's samples `[n]`, int16."""
        row = self.recordings[index]
        return np.asarray(self.sound[row.shard][row.start : row.stop])

    def __getitem__(self, index: int) -> Speech:
        pcm = torch.from_numpy(self.samples(index).astype(np.float32) / 32767)
        return Speech(pcm, self.recordings[index].words)

    @property
    def seconds(self) -> float:
        """How long all of it is."""
        return sum(row.stop - row.start for row in self.recordings) / 16000


def lines(count: int, seed: int, split: Split = "train", questions: float = 0.0) -> list[Line]:
    """Texts of the domain in the model's own voices, a share of them questions about clips."""
    rng = np.random.default_rng([seed, 1])
    found = []
    for _ in range(count):
        text = question(rng, split) if rng.random() < questions else sentence(rng, split)
        found.append((text, VOICES[int(rng.integers(len(VOICES)))]))
    return found


def heard_lines(
    count: int, seed: int, split: Split = "train", questions: float = 0.5
) -> list[Line]:
    """The same in the wider range of voices that the model listens to."""
    rng = np.random.default_rng([seed, 2])
    return [(text, heard_voice(rng)) for text, _ in lines(count, seed + 1, split, questions)]


def build_corpus(
    folder: str | Path,
    said: Sequence[Line],
    workers: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Say all lines and keep them in a folder.

    Args:
        folder: Where; made if it is not there, and its former recordings go.
        said: Texts and voices.
        workers: Processes.
        progress: Called with lines done and lines in all.
    """
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    for old in (*home.glob("*.json"), *home.glob("*.npy")):
        old.unlink()
    done = 0
    with get_context("spawn").Pool(workers) as pool:
        spoken = pool.imap(_say, said, chunksize=16)
        for shard, start in enumerate(range(0, len(said), SHARD)):
            part = said[start : start + SHARD]
            _write(home / f"{shard:04d}", part, islice(spoken, len(part)))
            done += len(part)
            if progress is not None:
                progress(done, len(said))
    return Corpus(home)


def _say(line: Line) -> tuple[NDArray[np.int16], tuple[WordTime, ...]]:
    spoken = say(*line)
    return (spoken.pcm.numpy() * 32767).round().astype(np.int16), spoken.words


def _write(
    stem: Path,
    said: Sequence[Line],
    spoken: Iterator[tuple[NDArray[np.int16], tuple[WordTime, ...]]],
) -> None:
    rows: list[dict[str, Any]] = []
    parts, at = [], 0
    for (text, voice), (pcm, words) in zip(said, spoken, strict=True):
        times = [[word.text, word.start, word.stop] for word in words]
        row = {"text": text, "voice": asdict(voice), "start": at, "stop": at + len(pcm)}
        rows.append({**row, "words": times})
        parts.append(pcm)
        at += len(pcm)
    np.save(stem.with_suffix(".npy"), np.concatenate(parts))
    stem.with_suffix(".json").write_text(json.dumps(rows))


def _read(file: Path, shard: int) -> list[Recording]:
    return [
        Recording(
            row["text"],
            EspeakVoice(**row["voice"]),
            shard,
            row["start"],
            row["stop"],
            tuple(WordTime(*word) for word in row["words"]),
        )
        for row in json.loads(file.read_text())
    ]
