"""The `present` suite: what is on the screen of an endless stream now, beside a clip of its end.

A session in bounded memory watches worlds and is asked at moments of them; the embedded model of
clips is asked about the same seconds, as a clip that begins at their cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from mmfast.core.errors import MmfastError
from mmfast.models.loading import embedded_path, load
from mmfast.streams.session import Session
from mmfast.streams.stream import StreamModel
from mmfast.streams.subscription import SpeakRule
from mmfast.tiny.evaluate import interval
from mmfast.tiny.stream.world import NAMES, EndlessScene, World, present_questions
from mmfast.tiny.video.scene import DIRECTIONS, EVAL

STREAMS, CLIPS = "tiny-stream", "tiny-scenes"
MEMORY = "sink:64+window:1152+retrieve:16"
KINDS = (
    "count", "direction", "speed", "colour", "shape", "position", "number", "exists", "probe",
)  # fmt: skip
WAYS = {"push": 1.0, "watch": 4.0}  # frames per second of the source; the model reads one
CLIP = 8  # seconds, and frames, of a clip
EVERY, MOMENTS = 40.0, 12  # seconds from fact to fact; moments of a stream
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PresentQuestion:
    """A question about a moment: in the words of a session, of a clip, and its right answer.

    The text of a probe is the condition of a subscription.
    """

    kind: str
    text: str
    clip: str
    answer: str


def clip_times(world: World, time: int) -> list[float]:
    """Seconds, one apart, of the scene on the screen at a time: at most CLIP of them."""
    place, first = world.place_at(time), time
    while time - first < CLIP - 1 and first > 0 and world.place_at(first - 1) == place:
        first -= 1
    return [float(second) for second in range(first, time + 1)]


def questions_at(world: World, time: int, rng: np.random.Generator) -> list[PresentQuestion]:
    """At most one question of each kind about a moment, and two about what is not there."""
    place, found = world.place_at(time), list[PresentQuestion]()
    for each in present_questions(world, time):
        kind, plain = each.kind.removesuffix(" now"), each.text.replace(" now", "")
        clip = plain.replace("?", " at the end?") if kind == "position" else plain
        found.append(PresentQuestion(kind, each.text, clip, each.answer))
    found += _motion(place, clip_times(world, time))
    if world.at(time).seen.min() >= 0.6:
        there = [(thing.colour, thing.shape) for thing in place.things]
        absent = [name for name in NAMES if name not in there]
        for kind, text in (("exists", "Is there a {} now?"), ("probe", "there is a {}")):
            for names, answer in ((there, "yes"), (absent, "no")):
                name = " ".join(names[int(rng.integers(len(names)))])
                clip = f"Is there a {name}?"
                found.append(PresentQuestion(kind, text.format(name), clip, answer))
    mixed = [found[i] for i in rng.permutation(len(found))]
    chosen = {(each.kind, each.answer == "no"): each for each in mixed}
    return sorted(chosen.values(), key=lambda each: KINDS.index(each.kind))


def _motion(place: EndlessScene, times: Sequence[float]) -> Iterator[PresentQuestion]:
    """Questions about things that have moved on a straight way, along an axis for a direction."""
    straight = []
    for thing in place.things:
        path = np.array([place.centre(thing, time) for time in times])
        move = path[-1] - path[0]
        if np.abs(np.abs(np.diff(path, axis=0)).sum(0) - np.abs(move)).max() > 1e-6:
            continue  # an edge has turned it
        name, main = f"{thing.colour} {thing.shape}", int(np.abs(move).argmax())
        straight.append((name, float(np.hypot(*thing.velocity))))
        if abs(move[main]) >= 10 and abs(move[1 - main]) <= 0.5 * abs(move[main]):
            way = next(way for way, step in DIRECTIONS.items() if step[main] * move[main] > 0)
            asked = f"Which way does the {name} move"
            yield PresentQuestion("direction", f"{asked} now?", f"{asked}?", way)
    for one, two in combinations(straight if len(times) >= CLIP // 2 else (), 2):
        slow, fast = sorted((one, two), key=lambda each: each[1])
        if fast[1] >= 1.6 * slow[1]:
            text = f"Which moves faster, the {one[0]} or the {two[0]}?"
            yield PresentQuestion("speed", text, text, fast[0])


@dataclass
class PresentRun:
    """A session that watches a world and answers at its moments."""

    session: Session
    todo: dict[int, list[PresentQuestion]]  # by second

    def __post_init__(self) -> None:
        self.said: dict[tuple[int, PresentQuestion], str] = {}
        self._waiting: dict[PresentQuestion, Any] = {}

    def frame(self, time: float) -> None:
        """Ask what is due once the frame of a time is in, and subscribe before the next one."""
        now = round(time)
        for question in self.todo.get(now, ()):
            if question.kind == "probe":
                waiting = self._waiting.pop(question)
                yes = waiting.probability >= SpeakRule.threshold
                answer = "yes" if yes else "no"
                waiting.cancel()
            else:
                answer = _read(self.session, question.text)
            self.said[now, question] = answer
        for question in self.todo.get(now + 1, ()):
            if question.kind == "probe":
                told = self.session.subscribe(question.text, lambda event: None, every=0.0)
                self._waiting[question] = told

    def run(self, world: World, way: str) -> dict[tuple[int, PresentQuestion], str]:
        """Watch until the last moment; push frames, or watch an iterator of more of them."""
        seconds = max(self.todo) + 1.0
        shown = world.frames(seconds, WAYS[way])
        if way == "watch":
            self.session.watch(shown, fps=1.0, each=self.frame)
            return self.said
        for frame, time in shown:
            self.session.push(frame, time)
            self.frame(time)
        return self.said


def _read(session: Session, question: str) -> str:
    return session.ask(question, max_new_tokens=12).read().lower()


def run_present(
    n: int = 400, seed: int = 1000, ways: Sequence[str] = tuple(WAYS), report: Report | None = None
) -> dict[str, Any]:
    """Right answers by kind of a session in bounded memory, and of a clip of the same seconds.

    About `n` questions about moments of unseen worlds, for each way in which frames come. In
    `by_kind` are questions, right answers of both, and `relative`, their ratio.
    """
    if n < 1:
        raise MmfastError(f"n={n} asks nothing; give at least 1")
    clips = StreamModel(*load(str(embedded_path(CLIPS)), "cpu", "auto"))
    pair = load(str(embedded_path(STREAMS)), "cpu", "auto")
    watcher = StreamModel(*pair, clips=lambda: clips)
    marks: dict[str, list[tuple[str, bool, bool]]] = {way: [] for way in ways}
    number = 0
    while len(marks[ways[0]]) < n:
        world = World(1000 * seed + number, every=EVERY)
        rng = np.random.default_rng([EVAL, world.seed, 51])
        times = sorted(rng.choice(np.arange(40, 700), MOMENTS, replace=False).tolist())
        todo = {time: questions_at(world, time, rng) for time in times}
        told = dict[tuple[int, PresentQuestion], str]()
        for time, asked in todo.items():
            with Session(clips) as clip:
                for second in clip_times(world, time):
                    clip.push(world.frame(second), second)
                told |= {(time, each): _read(clip, each.clip) for each in asked}
        for way in ways:
            with Session(watcher, MEMORY) as session:
                said = PresentRun(session, todo).run(world, way)
            marks[way] += [
                (each.kind, said[time, each] == each.answer, text == each.answer)
                for (time, each), text in told.items()
            ]
            if report is not None:
                report(way, min(len(marks[way]), n), n)
        number += 1
    rows = [{**present_row(way, mine), "streams": number} for way, mine in marks.items()]
    return {"suite": "present", "n": len(marks[ways[0]]), "seed": seed, "model": STREAMS,
            "rows": rows}  # fmt: skip


def present_row(way: str, marks: Sequence[tuple[str, bool, bool]]) -> dict[str, Any]:
    """Row of results of one way, from marks: kind, right in the session, right about the clip."""
    whole = sum(right for _, right, _ in marks)
    by_kind = {}
    for kind in KINDS:
        mine = [(right, clip) for each, right, clip in marks if each == kind]
        if mine:
            right, clip = (sum(column) for column in zip(*mine, strict=True))
            by_kind[kind] = {
                "n": len(mine),
                "right": right / len(mine),
                "clip": clip / len(mine),
                "relative": right / clip if clip else None,
            }
    return session_row(way, whole, len(marks), by_kind)


def session_row(way: str, right: int, asked: int, by_kind: dict[str, Any]) -> dict[str, Any]:
    """Row of results of sessions with the usual memory."""
    return {
        "reduce": None,
        "memory": MEMORY,
        "way": way,
        "accuracy": right / asked,
        "interval": interval(right, asked),
        "by_kind": by_kind,
    }
