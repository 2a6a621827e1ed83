"""Word errors of two voices that speak at once, offline and in a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.bench.registry import Tick
from mmfast.bench.results import Row
from mmfast.models.loading import embedded_path
from mmfast.models.speech.ear import FOLDER
from mmfast.models.speech.overlap import (
    CHUNK,
    CONTEXT,
    FILE,
    RATE,
    OverlapEar,
    load_overlap,
    speaker_texts,
)
from mmfast.tiny.speech.overlap import VoiceMixture, cp_errors, unseen_mixtures

STEP = RATE // 10  # samples that a stream brings at once
BANDS = ((0.0, "apart"), (0.5, "under half"), (1.01, "over half"))  # by overlap, at most
Write = Callable[[Tensor], tuple[Sequence[str], list[float]]]


def overlap_rows(model: Any, path: Any, n: int, seed: int, tick: Tick) -> list[Row]:
    """Measure concatenated minimum-permutation word errors of `n` unseen mixtures.

    Rows are of the ear for one, whose words are one text, and of the ear for two, offline and in a
    stream, where the folder `path` (None: the embedded one) has it; otherwise there are none.
    """
    if not (path is None or isinstance(path, str | Path)):
        return []
    folder = embedded_path("tiny-speech") if path is None else Path(path)
    if not (folder / FOLDER / FILE).is_file():
        return []
    ear, mixtures = load_overlap(path), unseen_mixtures(n, seed)
    ways: dict[str, Write] = {
        "ear for one": lambda pcm: ([model.transcribe(pcm, RATE)], []),
        "ear for two": lambda pcm: (speaker_texts(ear.words(pcm)), []),
        f"ear for two, chunks of {CHUNK:g} s": lambda pcm: streamed(ear, pcm),
    }
    return [overlap_row(mode, write, mixtures, tick) for mode, write in ways.items()]


def streamed(ear: OverlapEar, pcm: Tensor) -> tuple[Sequence[str], list[float]]:
    """Return the texts of a stream, and how long behind its end each word came, in seconds."""
    pushed = 0

    def chunks() -> Iterator[Tensor]:
        nonlocal pushed
        for part in pcm.split(STEP):
            pushed += len(part)
            yield part

    words, waits = [], list[float]()
    for word in ear.stream(chunks()):
        words.append(word)
        waits.append(pushed / RATE - word.at)
    return speaker_texts(words), waits


def overlap_row(mode: str, write: Write, mixtures: Sequence[VoiceMixture], tick: Tick) -> Row:
    """Measure one way of writing mixtures down."""
    errors = words = 0
    bands = {name: [0, 0] for _, name in BANDS}
    waits: list[float] = []
    for i, each in enumerate(mixtures):
        texts, late = write(torch.from_numpy(each.pcm))
        wrong, many = cp_errors(each.words, [text.split() for text in texts])
        errors, words = errors + wrong, words + many
        band = bands[next(name for most, name in BANDS if each.overlap <= most)]
        band[:] = band[0] + wrong, band[1] + many
        waits += late
        tick(mode, i + 1, len(mixtures))
    rate = errors / max(1, words)
    found: Row = {"task": "overlap", "mode": mode, "score": rate, "cpwer": rate, "words": words}
    found |= {"by_overlap": {n: round(w / m, 4) for n, (w, m) in bands.items() if m}}
    if waits:
        found |= {"delay": sum(waits) / len(waits), "chunk": CHUNK, "context": CONTEXT}
    return {**found, "errors": errors, "mixtures": len(mixtures)}
