"""Order, count, duration and time of what a stream has shown, put together from its moments.

A question is read by its form, such as "How long was the red circle on the screen?". Which moments
show the thing is found in two steps. The memory of the stream retrieves frames for a question about
the thing, as for any question; the moments whose frames most layers read, and those that are still
in the window, are looked at: some of their pictures are put to the model as a clip, which is asked
whether the thing is there. Where that is so for more than half of what retrieval has found, there
may be more than it finds, and every moment is looked at; so it is without retrieval. The answer is
then arithmetic of times. What no form fits is refused.
"""

from __future__ import annotations

import re
import time as clocks
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.core.trace import Trace
from mmfast.models.prompt import check_question
from mmfast.streams.moments import StreamMoment
from mmfast.streams.recent import APART

NUMBERS = "number"  # the thing that is read, and counted by what it says
_SHOWN = (
    r"(?:been )?(?:shown|seen|visible|there|on (?:the )?screen|in (?:the )?(?:video|picture|view)"
    r"|come|came|appear|appeared)"
)
_BE = r"(?:was|were|is|has|have|did)"
_ONE, _TWO = r"(?:the |an? )?(?P<one>[\w -]+?)", r"(?:the |an? )?(?P<two>[\w -]+?)"
_END = r"(?: so far| until now| up to now| before)?\W*$"
_FORMS = {
    "order": (
        rf"^(?:which|what) (?:of the two )?(?:{_BE} )?(?:object |thing )?{_SHOWN} "
        rf"(?P<end>first|last|earlier|later)[,:]? {_ONE} or {_TWO}{_END}",
    ),
    "count": (
        rf"^how (?:many times|often) {_BE} {_ONE} {_SHOWN}{_END}",
        rf"^how many (?P<many>[\w -]+?) (?:(?:were|have|has) {_SHOWN}|appeared|came){_END}",
    ),
    "duration": (rf"^(?:for )?how (?:long|many seconds) {_BE} {_ONE} {_SHOWN}{_END}",),
    "when": (rf"^(?:when|at (?:which|what) (?:second|time)) {_BE} {_ONE} {_SHOWN}{_END}",),
    "ever": (rf"^(?:was there|has there been|have you seen) {_ONE}{_END}",),
}
_PATTERNS = [(kind, re.compile(form, re.I)) for kind, forms in _FORMS.items() for form in forms]
EXAMPLES = (
    "Which came first, the red circle or the blue square?", "How many numbers have been shown?",
    "How many times was the red circle shown?", "How long was the red circle on the screen?",
    "When was the green star shown?", "Has there been a green star?",
)  # fmt: skip
_DIFFERENT = re.compile(r"^(?:different|distinct) ", re.I)
_VAGUE = {"object", "thing", "shape", "item", "figure", "one", "it"}
LOOK = 3  # pictures of a moment that are looked at for one thing
BEST = 8  # moments that are looked at first, of those that retrieval finds
SURE = 0.5  # probability of yes from which on a moment shows a thing
Yes = Callable[[Any, str], float]  # of a clip and a thing
Read = Callable[[Any, str], str]  # answer of a clip to a question


@dataclass(frozen=True)
class HistoryQuestion:
    """A question by its form: `kind`, the things in it, and `last` where order asks for that."""

    kind: str
    things: tuple[str, ...]
    last: bool = False

    @classmethod
    def of(cls, text: str) -> HistoryQuestion | None:
        """Return the question in a text; None where it fits no form."""
        for kind, pattern in _PATTERNS:
            found = pattern.match(text.strip())
            if found is None:
                continue
            parts = found.groupdict()
            things = [parts[name].lower() for name in ("one", "two") if parts.get(name)]
            if many := parts.get("many"):
                things = [singular(_DIFFERENT.sub("", many.lower()))]
            if _VAGUE & {*things} or (NUMBERS in things and kind != "count"):
                return None  # which of them is not said
            return cls(kind, tuple(things), parts.get("end") in ("last", "later"))
        return None


def singular(name: str) -> str:
    """Return the singular of a regular English plural: "red crosses" gives "red cross"."""
    if re.search(r"(?:ss|sh|ch|x)es$", name):
        return name[:-2]
    return name[:-1] if name.endswith("s") and not name.endswith("ss") else name


@dataclass(frozen=True)
class Span:
    """A time in which a thing was shown, from `start` until before `end`, in seconds."""

    start: float
    end: float


@dataclass
class HistoryAnswer:
    """An answer about the history of a stream.

    `spans` are the times in which each thing was shown, `readings` the numbers that were read, in
    order; `moments` were known and `looked` of them looked at, after retrieval had found `found`.
    `since` is the second from which on anything is known, None for all. `value` is the answer as
    data: a name, a count, seconds, the start of the first span, or a truth; None where the stream
    does not tell. `trace` has a row `recall` and a row `look`.
    """

    question: HistoryQuestion
    text: str = ""
    value: str | float | bool | None = None
    spans: dict[str, list[Span]] = field(default_factory=dict)
    readings: list[str] = field(default_factory=list)
    moments: int = 0
    found: int = 0
    looked: int = 0
    since: float | None = None
    trace: Trace = field(default_factory=Trace)

    def __str__(self) -> str:
        return self.text


@dataclass
class HistorySearch:
    """Moments that show things: what retrieval finds, looked at.

    `recalled` has for each thing the frames that were retrieved, by their seconds, with the number
    of layers that read each; None where nothing retrieves. `live` are seconds of the frames that
    are in the window. `clip` makes what `yes` and `read` ask, from pictures and their seconds.
    """

    moments: Sequence[StreamMoment]
    recalled: dict[str, dict[float, int]] | None
    live: Sequence[float]
    clip: Callable[[list[Any], list[float]], Any]
    yes: Yes
    read: Read

    def __post_init__(self) -> None:
        self.looked: set[int] = set()
        self.found: set[int] = set()

    def showing(self, thing: str) -> list[bool]:
        """Tell of each moment whether it shows a thing, hidden for one moment included."""
        every = set(range(len(self.moments)))
        if self.recalled is None or thing == NUMBERS:
            near = every
        else:
            best = self._best(self.recalled[thing])
            self.found |= best
            near = best | {i for i in every if self._holds(i, self.live)}
            if sum(self._shows(i, thing) for i in best) > len(best) / 2:
                near = every
            else:  # what it shows may have begun before and gone on behind what was found
                near |= {j for i in near if self._shows(i, thing) for j in self._beside(i, thing)}
        seen = [i in near and self._shows(i, thing) for i in range(len(self.moments))]
        hidden = {
            i
            for i in range(1, len(seen) - 1)
            if seen[i - 1] and seen[i + 1] and not self._parted(i) and not self._parted(i + 1)
        }
        return [shows or i in hidden for i, shows in enumerate(seen)]

    def _best(self, recalled: dict[float, int]) -> set[int]:
        """Return the moments whose frames most layers have read."""
        votes = Counter[int]()
        for i, moment in enumerate(self.moments):
            inside = (n for t, n in recalled.items() if moment.start <= t <= moment.times[-1])
            votes[i] = sum(inside)
        return {i for i, count in votes.most_common(BEST) if count}

    def _holds(self, at: int, times: Sequence[float]) -> bool:
        return any(self.moments[at].start <= time <= self.moments[at].times[-1] for time in times)

    def _beside(self, at: int, thing: str) -> set[int]:
        found = set[int]()
        for step in (-1, 1):
            i = at + step
            while 0 <= i < len(self.moments) and self._shows(i, thing):
                found.add(i)
                i += step
        return found

    def _parted(self, at: int) -> bool:
        return self.moments[at].begins

    def _shows(self, at: int, thing: str) -> bool:
        moment, asked = self.moments[at], f"a {thing}"
        self.looked.add(at)
        if asked not in moment.known:
            clip = self.clip(*moment.shot(LOOK))
            moment.learn(asked, self.yes(clip, thing))
            if thing == NUMBERS and moment.known[asked] >= SURE:
                moment.learn("read", self.read(clip, "What number is on the screen?"))
        return bool(moment.known[asked] >= SURE)

    def spans(self, shown: Sequence[bool]) -> list[Span]:
        """Return the times of runs of moments that show a thing; a gap ends one, a cut does not."""
        spans, open_ = list[Span](), False
        for moment, shows in zip(self.moments, shown, strict=True):
            joined = open_ and moment.start - spans[-1].end <= APART
            if shows and joined:
                spans[-1] = Span(spans[-1].start, moment.end)
            elif shows:
                spans.append(Span(moment.start, moment.end))
            open_ = shows
        return spans

    def readings(self, shown: Sequence[bool]) -> list[str]:
        """Return the numbers read in moments that show one, each once, in order."""
        pairs = zip(self.moments, shown, strict=True)
        return list(dict.fromkeys(m.known["read"] for m, s in pairs if s and "read" in m.known))


def tell(
    question: HistoryQuestion, search: HistorySearch, whole: bool, trace: Trace
) -> HistoryAnswer:
    """Answer a question from the moments that show its things; `whole`: none is forgotten."""
    found = HistoryAnswer(question, moments=len(search.moments), trace=trace)
    started = clocks.perf_counter()
    for thing in question.things:
        shown = search.showing(thing)
        found.spans[thing] = search.spans(shown)
        if thing == NUMBERS:
            found.readings = search.readings(shown)
    found.found, found.looked = len(search.found), len(search.looked)
    ms = (clocks.perf_counter() - started) * 1e3
    found.trace.add("look", found.looked, sum(map(len, found.spans.values())), ms)
    if not whole and search.moments:
        found.since = search.moments[0].start
    found.text, found.value = _words(found, search)
    if found.since is not None:
        found.text += f" (since {clock(found.since)})"
    return found


def _words(found: HistoryAnswer, search: HistorySearch) -> tuple[str, Any]:
    question, spans = found.question, [found.spans[thing] for thing in found.question.things]
    missing = [t for t, s in zip(question.things, spans, strict=True) if not s]
    if question.kind == "count":
        count = len(found.readings) if NUMBERS in question.things else len(spans[0])
        return str(count), count
    if question.kind == "ever":
        return ("no", False) if missing else ("yes", True)
    if missing:
        return f"{' and '.join(f'the {name}' for name in missing)} was not shown", None
    if question.kind == "duration":
        seconds = sum(span.end - span.start for span in spans[0])
        return f"{seconds:.0f} seconds", seconds
    if question.kind == "when":
        times = [f"{clock(span.start)} to {clock(span.end)}" for span in spans[0]]
        more = f" and {len(times) - 3} times more" if len(times) > 3 else ""
        return ", ".join(times[:3]) + more, spans[0][0].start
    return _first(found, search)


def _first(found: HistoryAnswer, search: HistorySearch) -> tuple[str, Any]:
    one, two = found.question.things
    at = -1 if found.question.last else 0
    starts = [found.spans[thing][at].start for thing in (one, two)]
    if starts[0] == starts[1]:  # within a moment its clip can tell
        moment = next(m for m in search.moments if m.start == starts[0])
        word = "last" if found.question.last else "first"
        asked = f"Which appears {word}, the {one} or the {two}?"
        said = search.read(search.clip(*moment.shot()), asked)
        return said, said
    earlier = one if starts[0] < starts[1] else two
    later = two if earlier == one else one
    chosen = later if found.question.last else earlier
    return chosen, chosen


def clock(seconds: float) -> str:
    """Return seconds as minutes and seconds, with hours from the first on: "12:34", "1:02:03"."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def history_question(text: str) -> HistoryQuestion:
    """Return a question by its form; MmfastError for one that fits none."""
    found = HistoryQuestion.of(check_question(text))
    if found is None:
        raise MmfastError(
            f"{text!r} is no question about order, count, duration or time of what was shown; ask "
            + " or ".join(f"{example!r}" for example in EXAMPLES)
        )
    return found
