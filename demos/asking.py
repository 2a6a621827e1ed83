"""One question asked with all tokens and with fewer, side by side."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import mmfast
from mmfast.demos.examples import CLIPS, OWN
from mmfast.demos.shelf import Shelf

ROUNDS, PATIENCE = 5, 1.5  # timed answers of each kind, and seconds after which none is begun
_NOT_OFFERED = ("pixel",)  # drops flat patches before the tower and takes no budget


@dataclass(frozen=True)
class Shown:
    """One way of answering, and what it cost.

    Attributes:
        spec: What reduced; None is nothing.
        text: The answer.
        tokens: Visual tokens left after the last stage.
        of: Visual tokens without any reduction.
        ttft_ms: Milliseconds to the first token, reading the media included; a median.
        rounds: Answers that were timed.
        rows: `(stage, tokens in, tokens out, ms)` of the last one.
        frames: `(picture, caption)` of every frame the model saw.
    """

    spec: str | None
    text: str
    tokens: int
    of: int
    ttft_ms: float
    rounds: int
    rows: tuple[tuple[str, int, int, float], ...]
    frames: tuple[tuple[Any, str], ...]


def chosen(example: str | None, upload: str | None) -> str:
    """The file that is asked about.

    Raises:
        MmfastError: None is chosen.
    """
    if example and example != OWN:
        return str(CLIPS / example)
    if not upload:
        raise mmfast.MmfastError("there is no file yet; pick an example, or upload your own")
    return upload


def spec_of(method: str, percent: float) -> str:
    """The spec string of a method at a share of the visual tokens."""
    return f"{method}:{min(max(percent, 1), 100) / 100:.2f}"


def offered() -> list[Any]:
    """Methods that take a budget and visual tokens."""
    return [m for m in mmfast.methods("reducer") if m.sites[0] not in _NOT_OFFERED]


def answers(
    shelf: Shelf, media: Any, question: str, specs: list[str | None], patience: float = PATIENCE
) -> list[Shown]:
    """Answer in each way, turn by turn, and time it.

    The first answers warm up and count only if there was no time for more.

    Args:
        shelf: Where the models are.
        media: File that is asked about, or its frames.
        question: The question.
        specs: Ways to answer; None keeps all tokens.
        patience: Seconds after which no further round is begun.

    Raises:
        MmfastError: The file, the question or a spec cannot be used.
    """
    kind = mmfast.kind_of(media)
    pipes = [shelf.visual(kind, spec) for spec in specs]
    rounds: list[list[Any]] = []
    begun = time.monotonic()
    while len(rounds) <= ROUNDS and (not rounds or time.monotonic() - begun < patience):
        rounds.append([pipe(media, question) for pipe in pipes])
    timed = rounds[1:] or rounds
    return [
        _shown(pipe, media, spec, [one[i] for one in timed])
        for i, (pipe, spec) in enumerate(zip(pipes, specs, strict=True))
    ]


def _shown(pipe: Any, media: Any, spec: str | None, found: list[Any]) -> Shown:
    last = found[-1]
    return Shown(
        spec,
        last.text,
        last.kept_tokens,
        last.visual_tokens,
        statistics.median(answer.ttft_ms for answer in found),
        len(found),
        tuple((row.label, row.tokens_in, row.tokens_out, row.ms) for row in last.trace.rows),
        tuple(pipe.overlay(media, last.trace, sheets=False)[0]),
    )


def same(first: str, second: str) -> bool:
    """Whether two answers say the same."""
    return " ".join(first.lower().split()) == " ".join(second.lower().split())
