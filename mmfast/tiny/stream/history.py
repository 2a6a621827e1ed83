"""The `history` suite: order, count, duration and time of what an endless stream has shown.

A session in bounded memory watches a world to its end and is asked then; each question is put once
more without its history, for what the model says by itself.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from mmfast.caches.plan import plan_cache
from mmfast.core.errors import MmfastError
from mmfast.models.loading import embedded_path, load
from mmfast.streams.archive.tiers import TierQuotas
from mmfast.streams.memory import budget
from mmfast.streams.session import Session
from mmfast.streams.stream import StreamModel
from mmfast.tiny.stream.needles import Setting
from mmfast.tiny.stream.present import CLIPS, MEMORY, STREAMS, session_row
from mmfast.tiny.stream.world import NAMES, World
from mmfast.tiny.video.scene import EVAL

KINDS = ("order", "count", "duration", "when", "ever")
SHARES = {"order": 12, "count": 9, "duration": 9, "when": 8, "ever": 4}  # of a stream
COMMON = 2  # things of ordinary scenes that are asked about, which come again and again
BATCH = 8  # frames in one call of the encoder
PICTURES = 64_000_000  # bytes of small pictures
Report = Callable[[str, int, int], None]
Truth = str | float | bool


@dataclass(frozen=True)
class HistoryCase:
    """A question about a whole stream and its right answer."""

    kind: str
    text: str
    answer: Truth

    def right(self, said: Truth | None) -> bool:
        """Judge an answer: seconds may be off by 2, a duration by a tenth."""
        if said is None or isinstance(said, str) != isinstance(self.answer, str):
            return False
        if self.kind in ("when", "duration"):
            slack = max(2.0, 0.1 * float(self.answer) if self.kind == "duration" else 0.0)
            return abs(float(said) - float(self.answer)) <= slack
        return said == self.answer


def showings(world: World, seconds: int) -> tuple[dict[str, list[tuple[int, int]]], list[int]]:
    """Runs of seconds in which each thing is on the screen, and all numbers, once each.

    A run goes on through a cut where the thing is on both sides of it.
    """
    seen, numbers = defaultdict[str, list[int]](list), dict[int, None]()
    for second in range(seconds):
        place = world.place_at(second)
        for name in {f"{thing.colour} {thing.shape}" for thing in place.things}:
            seen[name].append(second)
        if place.panel is not None:
            numbers[place.panel.number] = None
    runs = {}
    for name, times in seen.items():
        breaks = [i for i, (a, b) in enumerate(pairwise(times), 1) if b != a + 1]
        edges = [0, *breaks, len(times)]
        runs[name] = [(times[a], times[b - 1] + 1) for a, b in pairwise(edges)]
    return runs, list(numbers)


def cases_of(world: World, seconds: int) -> list[HistoryCase]:
    """Questions about a stream of so many seconds, as SHARES has them."""
    rng = np.random.default_rng([EVAL, world.seed, 52])
    runs, numbers = showings(world, seconds)
    facts = [event.name for event in world.events(seconds - 2)]
    common = sorted((name for name in runs if name not in facts), key=lambda n: -len(runs[n]))
    common = [common[i] for i in rng.permutation(len(common))[:COMMON]]
    never = [name for name in map(" ".join, NAMES) if name not in runs][:2]
    made: dict[str, list[HistoryCase]] = {kind: [] for kind in KINDS}

    def add(kind: str, text: str, answer: Truth) -> None:
        made[kind].append(HistoryCase(kind, text, answer))

    pairs = [*combinations(facts, 2)]
    chosen = [pairs[i] for i in rng.permutation(len(pairs))[: SHARES["order"]]]
    for number, pair in enumerate(chosen):
        one, two = (pair[i] for i in rng.permutation(2))
        word = ("first", "last")[number % 4 == 3]
        early = min(pair, key=lambda name: runs[name][0][0])
        late = max(pair, key=lambda name: runs[name][-1][0])
        add(
            "order",
            f"Which came {word}, the {one} or the {two}?",
            late if number % 4 == 3 else early,
        )
    add("count", "How many numbers have been shown?", float(len(numbers)))
    for name in [*common, *never, *_some(facts, 4, rng)]:
        add("count", f"How many times was the {name} shown?", float(len(runs.get(name, ()))))
    for name in [common[0], *_some(facts, 8, rng)]:
        length = sum(end - start for start, end in runs[name])
        add("duration", f"How long was the {name} on the screen?", float(length))
    for name in [common[0], *_some(facts, 7, rng)]:
        add("when", f"When was the {name} shown?", float(runs[name][0][0]))
    for name in (*never, *_some(facts, 2, rng)):
        add("ever", f"Has there been a {name}?", name in runs)
    return [case for kind in KINDS for case in made[kind][: SHARES[kind]]]


def _some(names: Sequence[str], count: int, rng: np.random.Generator) -> Iterator[str]:
    return (names[i] for i in rng.permutation(len(names))[:count])


def read_alone(case: HistoryCase, text: str) -> Truth | None:
    """Return an answer in words as data, as far as the kind of question has any."""
    words = text.strip().lower()
    if isinstance(case.answer, str):
        return words
    if isinstance(case.answer, bool):
        return words.startswith("yes") if words.startswith(("yes", "no")) else None
    found = re.search(r"\d+", words)
    return float(found[0]) if found else None


def run_history(
    n: int = 42, seed: int = 1000, seconds: float = 1800.0, report: Report | None = None
) -> dict[str, Any]:
    """Right answers by kind about the history of unseen streams, with it and without.

    There are up to 42 questions a stream. Rows have `looked`, moments looked at for a question,
    of `moments`, and `bytes`, those of the pictures that were kept.
    """
    if n < 1:
        raise MmfastError(f"n={n} asks nothing; give at least 1")
    setting = Setting(seconds)
    clips = StreamModel(*load(str(embedded_path(CLIPS)), "cpu", "auto"))
    pair = load(str(embedded_path(STREAMS)), "cpu", "auto")
    watcher = StreamModel(*pair, clips=lambda: clips, batch=BATCH)
    marks: dict[str, list[tuple[str, bool]]] = {"history": [], "the model alone": []}
    figures, streams = list[dict[str, Any]](), 0
    while len(marks["history"]) < n:
        world = setting.world(1000 * seed + streams)
        cases = cases_of(world, setting.frames)[: n - len(marks["history"])]
        quotas = TierQuotas.of(0, None, 0, None)
        with Session(watcher, MEMORY, quotas=quotas, history=PICTURES) as session:
            _watch(session, world, setting.frames, report)
            for case in cases:
                found = session.history(case.text)
                marks["history"].append((case.kind, case.right(_plain(found.value))))
                figures.append({"looked": found.looked, "moments": found.moments,
                                "bytes": session.stats()["history"]["bytes"]})  # fmt: skip
                if report is not None:
                    report("questions", len(marks["history"]), n)
            session.stream.album = None
            for case in cases:
                said = session.ask(case.text, max_new_tokens=12).read()
                marks["the model alone"].append((case.kind, case.right(read_alone(case, said))))
        streams += 1
    rows = [history_row(way, mine, seconds, streams) for way, mine in marks.items()]
    means = {key: float(np.mean([each[key] for each in figures])) for key in figures[0]}
    rows[0] |= means
    return {"suite": "history", "n": len(marks["history"]), "seed": seed, "model": STREAMS,
            "rows": rows}  # fmt: skip


def _watch(session: Session, world: World, frames: int, report: Report | None) -> None:
    bound = budget(plan_cache(MEMORY))
    for first in range(0, frames, BATCH):
        seconds = range(first, min(first + BATCH, frames))
        session.push([world.frame(second) for second in seconds], [float(s) for s in seconds])
        held = session.stream.memory.tokens()
        if bound and held > bound:
            raise MmfastError(f"{MEMORY!r} held {held} tokens; run pytest tests/streams")
        if report is not None:
            report("seconds watched", seconds[-1] + 1, frames)


def _plain(value: str | float | bool | None) -> Truth | None:
    return float(value) if type(value) is int else value


def history_row(
    way: str, marks: Sequence[tuple[str, bool]], seconds: float, streams: int
) -> dict[str, Any]:
    """Row of results of one way to answer, from marks: kind, and whether it was right."""
    whole = sum(right for _, right in marks)
    by_kind = {}
    for kind in KINDS:
        mine = [right for each, right in marks if each == kind]
        if mine:
            by_kind[kind] = {"n": len(mine), "right": sum(mine) / len(mine)}
    return session_row(way, whole, len(marks), by_kind) | {"seconds": seconds, "streams": streams}
