"""The `stream` suite: facts of endless worlds, asked about seconds to hours after they were shown.

Sessions with different memories watch the same streams and answer the same questions; the memory
None, an unbounded cache, is the reference of the bounded ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmfast.caches.plan import plan_cache
from mmfast.core.errors import MmfastError
from mmfast.core.spec import parse
from mmfast.models.loading import embedded_path, load
from mmfast.streams.archive.tiers import TierQuotas
from mmfast.streams.memory import budget, check_plan
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.plan import ReusePlan
from mmfast.streams.reuse.store import ReuseStore
from mmfast.streams.session import Session
from mmfast.streams.stream import StreamModel
from mmfast.tiny.evaluate import interval
from mmfast.tiny.stream.world import (
    CLOSEST,
    FACTS,
    KINDS,
    PAST,
    World,
    WorldQuestion,
    past_questions,
    present_questions,
)
from mmfast.tiny.training import shares
from mmfast.tiny.video.scene import EVAL

BANDS = ("now", "in the window", "1-3x", "3-10x", "10-30x", "over 30x")  # ages in windows
Mark = tuple[str, str, bool]


def row_of(
    memory: str | None, reduce: str | None, marks: Sequence[Mark], spent: Sequence[float]
) -> dict[str, Any]:
    """Row of results of one memory, from its marks and the milliseconds to each first delta."""
    whole, past = [mark for *_, mark in marks], [mark for mark in marks if mark[0] in BANDS[2:]]
    by_age = {band: [mark for each, _, mark in marks if each == band] for band in BANDS}
    by_kind = {kind: [mark for _, each, mark in past if each == kind] for kind in PAST}
    return {
        "reduce": reduce,
        "memory": memory,
        "accuracy": sum(whole) / len(whole),
        "interval": interval(sum(whole), len(whole)),
        "by_kind": shares(((kind, mark) for _, kind, mark in marks), KINDS),
        "by_age": {band: _share(mine) for band, mine in by_age.items() if mine},
        "past": _share([mark for *_, mark in past]) if past else None,
        "past_by_kind": {kind: _share(mine) for kind, mine in by_kind.items() if mine},
        "ttft_ms": sorted(spent)[len(spent) // 2],
    }


def _share(marks: Sequence[bool]) -> dict[str, Any]:
    n, right = len(marks), sum(marks)
    return {"n": n, "accuracy": right / n, "interval": interval(right, n)}


def relative(row: dict[str, Any], whole: dict[str, Any]) -> float | None:
    """Share of the unbounded cache's right answers, about facts older than the window."""
    if not row["past"] or not whole["past"]["accuracy"]:
        return None
    return float(row["past"]["accuracy"] / whole["past"]["accuracy"])


MODEL = "tiny-stream"
WINDOW = 32  # frames that the bounded memories below hold
MEMORIES = ("sink:64+window:1152", "sink:64+window:1152+retrieve:16")
LONGEST = 3600.0  # seconds of a stream; an unbounded cache holds 130,000 tokens then
_EDGES = (1.0, 3.0, 10.0, 30.0)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Needle:
    """A question, the number of the last frame seen before it, and its age band, one of BANDS."""

    question: WorldQuestion
    frame: int
    band: str


@dataclass(frozen=True)
class Setting:
    """Length of the streams in seconds, at least 12, and frames per second."""

    seconds: float = 30.0 * WINDOW
    fps: float = 1.0

    def __post_init__(self) -> None:
        if not CLOSEST <= self.seconds < math.inf or self.fps <= 0:
            raise MmfastError(
                f"a stream of {self.seconds:g} seconds at {self.fps:g} frame/s shows no fact; give "
                f"{CLOSEST:g} seconds or more"
            )

    @property
    def frames(self) -> int:
        """Frames of a stream."""
        return int(self.seconds * self.fps)

    def world(self, seed: int) -> World:
        """A stream with as many facts as fit, at most FACTS."""
        facts = min(FACTS, int(self.seconds // CLOSEST))
        return World(seed, every=self.seconds / max(facts, 1), facts=facts)


def needles(world: World, setting: Setting) -> list[Needle]:
    """Questions about a stream in order of time: on single facts, and at the end on all."""
    rng = np.random.default_rng([EVAL, world.seed, 50])
    fps, found = setting.fps, list[Needle]()
    for event in world.events():
        number = len(found)
        at = _frame(event.place.since + rng.uniform(-0.5, 0.5) * world.every, setting)
        present = present_questions(world, at / fps)
        if present:
            found.append(Needle(present[int(rng.integers(len(present)))], at, "now"))
        at = _frame(event.stop + rng.uniform(0.2, 0.8) * WINDOW / fps, setting)
        texts = {question.text for question in past_questions(world, event.stop)}
        past = [q for q in past_questions(world, at / fps) if q.text in texts]
        mine = [q for q in past if event.name in q.text]
        found.append(_needle(mine[number % len(mine)], at, fps))
    last = setting.frames - 1
    found += [_needle(q, last, fps) for q in past_questions(world, last / fps)]
    return sorted(found, key=lambda needle: needle.frame)


def _frame(time_: float, setting: Setting) -> int:
    """The last frame at or before a time of the stream."""
    return min(max(int(time_ * setting.fps), 0), setting.frames - 1)


def _needle(question: WorldQuestion, frame: int, fps: float) -> Needle:
    windows = question.age * fps / WINDOW
    return Needle(question, frame, BANDS[1 + sum(windows >= edge for edge in _EDGES)])


def run_needles(
    memories: Sequence[str | None] = MEMORIES,
    n: int = 400,
    seed: int = 0,
    model: str | Path | None = None,
    *,
    setting: Setting | None = None,
    reduce: str | None = None,
    unbounded: bool = True,
    progress: Progress | None = None,
    sink: Callable[[dict[str, Any]], object] = lambda document: None,
    known: Callable[[str | None, str | None], dict[str, Any] | None] = lambda reduce, memory: None,
) -> dict[str, Any]:
    """Accuracy of memories (cache specs) by age of the fact, on streams of about 80 questions.

    The embedded stream model is the default; `unbounded` runs a session with an unbounded cache
    first. Progress is called with (memory, questions asked, n), `sink` with a document of each row
    by itself as soon as it is there; one that is `known` by reducer and memory is not asked for.
    The document is like that of `run_eval`; in each row
    `by_age` has n, accuracy, interval of each band, `past` those of all
    facts older than the window, and `relative` that accuracy divided by the unbounded cache's.
    """
    if n < 1:
        raise MmfastError(f"n={n} asks nothing; give at least 1")
    setting = setting or Setting()
    specs: list[str | None] = [None] if unbounded else []
    specs += [spec for spec in memories if spec is not None]
    if not specs:
        raise MmfastError("no memory to ask; give a spec such as 'sink:64+window:1152'")
    parse(reduce)
    for spec in specs:
        check_plan(plan_cache(spec))
    pair = load(str(embedded_path(MODEL) if model is None else model), "cpu", "auto")
    # All memories watch the same frames: those of an hour take 0.1 GB, encoded once.
    reuse = MediaReuse(*pair, ReusePlan("encoder"), ReuseStore(host="2GB"))
    watcher = StreamModel(*pair, fps=setting.fps, reduce=reduce, reuse=reuse)
    name = MODEL if model is None else str(model)
    head, rows = {"suite": "stream", "n": n, "seed": seed, "model": name}, list[dict[str, Any]]()
    for spec in specs:
        if (before := known(reduce, spec)) is not None:
            rows.append(before)
            sink({**head, "rows": [before]})
            continue
        marks, spent, most, streams = _ask(watcher, spec, n, seed, setting, progress)
        row = row_of(spec, reduce, marks, spent)
        rows.append(row)
        row["relative"] = relative(row, rows[0]) if unbounded else None
        row |= {"seconds": setting.seconds, "fps": setting.fps, "window": WINDOW}
        row |= {"streams": streams, "most_tokens": most}
        sink({**head, "rows": [row]})
    return {**head, "rows": rows}


def _ask(
    model: StreamModel,
    spec: str | None,
    n: int,
    seed: int,
    setting: Setting,
    progress: Progress | None,
) -> tuple[list[Mark], list[float], int, int]:
    """Marks and times of a memory, most tokens that it held, and the number of streams watched."""
    marks, spent, most, streams = list[Mark](), list[float](), 0, 0
    while len(marks) < n:
        world = setting.world(1000 * seed + streams)
        for needle, answer, ms, held in watch(model, spec, world, setting, n - len(marks)):
            question = needle.question
            marks.append((needle.band, question.kind, answer == question.answer))
            spent.append(ms)
            most = max(most, held)
            if progress is not None:
                progress(spec or "unbounded", len(marks), n)
        streams += 1
    return marks, spent, most, streams


def watch(
    model: StreamModel, memory: str | None, world: World, setting: Setting, most: int
) -> Iterator[tuple[Needle, str, float, int]]:
    """Answers of a session that watches a world, with the milliseconds to the first delta.

    Behind them the most tokens of the stream that it has held behind any frame until then;
    MmfastError where they are more than the spec lets live.
    """
    todo, bound, held = needles(world, setting)[:most], budget(plan_cache(memory)), 0
    # Hours fit: what retrieval may read again is bounded by its own quota, here by none.
    with Session(model, memory, quotas=TierQuotas.of(0, None, 0, None)) as session:
        for number in range(todo[-1].frame + 1):
            at = number / setting.fps
            session.push(world.frame(at), at)
            held = max(held, session.stream.memory.tokens())
            if bound and held > bound:
                raise MmfastError(f"{memory!r} held {held} tokens; run pytest tests/streams")
            while todo and todo[0].frame == number:
                needle = todo.pop(0)
                start = time.perf_counter()
                deltas = iter(session.ask(needle.question.text, max_new_tokens=8))
                first = next(deltas, "")
                ms = (time.perf_counter() - start) * 1e3
                yield needle, (first + "".join(deltas)).strip().lower(), ms, held
