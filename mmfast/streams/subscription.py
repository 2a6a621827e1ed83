"""Subscriptions to events of a stream: "tell me when …".

After a frame a question about it is put on a branch of the stream, and the distribution of the
first token of the answer decides whether to speak. Nothing of it stays in the stream.

Two ways to read that distribution:

* A probe that any model can answer, "Is this happening now: …? Answer yes or no.": the
  probability of speaking is p(yes) / (p(yes) + p(no)).
* `silence`, for models trained to write a token of silence after every frame at which nothing is
  to be said, as VideoLLM-online (arXiv 2406.11816) does with its frame interval token: they speak
  as soon as the probability of that token falls under a threshold (0.725 there), which is
  `threshold=0.275` here, since 1 - p(silence) is the probability of speaking.
"""

from __future__ import annotations

import queue
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from torch import Tensor

from mmfast.core.errors import MmfastError, unknown
from mmfast.core.trace import Trace
from mmfast.models.prompt import check_question
from mmfast.streams.reply import Sampler
from mmfast.streams.stream import Stream, StreamModel


@dataclass(frozen=True)
class SpeakRule:
    """The rule that decides when to speak; MmfastError for a value out of range.

    It speaks from the probability `threshold` on, and is ready again at `release`: an event is
    reported once, and a value that trembles around the threshold does not ring all the time.
    `every` is seconds of the stream between two looks, `pause` the least between two events.
    """

    threshold: float = 0.6
    release: float = 0.4
    every: float = 1.0
    pause: float = 5.0

    @classmethod
    def of(cls, knobs: Mapping[str, float]) -> SpeakRule:
        """A rule of knobs by name; without `release` it is two thirds of the threshold."""
        for name in knobs:
            if name not in cls.__dataclass_fields__:
                raise MmfastError(unknown("knob", name, cls.__dataclass_fields__))
        rule = cls(**{"release": 0.0, **knobs})
        return rule if "release" in knobs else replace(rule, release=rule.threshold * 2 / 3)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, Real):
                raise MmfastError(f"{name}={value!r} is no number; give one such as 0.6")
        if not 0 < self.threshold <= 1 or not 0 <= self.release <= self.threshold:
            raise MmfastError(
                f"threshold={self.threshold!r}, release={self.release!r}: give probabilities with "
                "release at most threshold, such as 0.6 and 0.4"
            )
        if not self.every >= 0 or not self.pause >= 0:
            raise MmfastError(f"every={self.every!r}, pause={self.pause!r}: give seconds from 0")


@dataclass(frozen=True)
class Ready:
    """State of a rule: seconds of the last event (`told`) and of the last look; a value.

    `armed`: the probability has been low since the last event.
    """

    armed: bool = True
    told: float | None = None
    looked: float | None = None

    def due(self, rule: SpeakRule, time: float) -> bool:
        """Tell whether it is time for a look."""
        return self.looked is None or time - self.looked >= rule.every

    def step(self, rule: SpeakRule, time: float, probability: float) -> tuple[Ready, bool]:
        """Take the probability of a look; return True to speak now."""
        if probability < rule.threshold:
            return Ready(self.armed or probability <= rule.release, self.told, time), False
        rested = self.told is None or time - self.told >= rule.pause
        if self.armed and rested:
            return Ready(False, time, time), True
        return Ready(self.armed, self.told, time), False


PROBE = "Is this happening now: {condition}? Answer yes or no."
YES, NO = ("yes", "Yes", " yes", " Yes", "YES"), ("no", "No", " no", " No", "NO")
_TELL = re.compile(
    r"^\s*(please\s+)?(tell|notify|alert|warn|inform) me (when|if|as soon as)\s+", re.I
)
_MOST = 256  # events that wait for a reader


@dataclass(frozen=True)
class Event:
    """Something that was waited for, with its seconds on the stream's clock.

    `text` is what the model says about it, "" where nothing was asked.
    """

    time: float
    condition: str
    probability: float
    text: str = ""


@dataclass(frozen=True)
class Look:
    """The question of a subscription and the words of its answer; see `Session.subscribe`."""

    question: str
    yes: Sequence[str] = YES
    no: Sequence[str] | None = NO
    silence: str | None = None
    reply: str | None = None
    max_new_tokens: int = 32

    def about(self, condition: str) -> Look:
        """Put a condition into the probe; MmfastError for a value of another kind."""
        if not isinstance(self.question, str):
            raise MmfastError(f"probe={self.question!r} is no question; give one such as {PROBE!r}")
        for name, words in (("yes", self.yes), ("no", () if self.no is None else self.no)):
            # letters of a text would be taken for words
            if not isinstance(words, list | tuple) or not all(isinstance(w, str) for w in words):
                raise MmfastError(f"{name}={words!r} is no list of words; give one such as ['red']")
        for name in ("silence", "reply"):
            if not isinstance(getattr(self, name), str | None):
                raise MmfastError(f"{name}={getattr(self, name)!r} is no text; give one, or None")
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise MmfastError(f"max_new_tokens={self.max_new_tokens!r}; give a whole number from 1")
        return replace(self, question=self.question.replace("{condition}", condition))

    def check(self, model: StreamModel) -> None:
        """Refuse words that begin with the same token, or hold none (MmfastError)."""
        if self.silence is not None:
            self._firsts(model, [self.silence])
            return
        yes, no = self._words(model)
        if not yes or (self.no is not None and not no):
            raise MmfastError(
                f"{list(self.yes)} and {list(self.no or ())} begin with the same token; give words "
                "that do not"
            )

    def probability(self, model: StreamModel, logits: Tensor) -> float:
        """Of speaking, from the logits `[V]` where an answer begins."""
        shares = Sampler(model.blocked).allowed(logits).softmax(-1)
        if self.silence is not None:
            return 1 - float(shares[self._firsts(model, [self.silence])].sum())
        yes, no = self._words(model)
        if self.no is None:
            return float(shares[yes].sum())
        total = float(shares[[*yes, *no]].sum())
        return float(shares[yes].sum()) / total if total else 0.0

    def _words(self, model: StreamModel) -> tuple[list[int], list[int]]:
        """First tokens of both sets of words, without those that tell nothing."""
        yes = set(self._firsts(model, self.yes))
        no = set(self._firsts(model, self.no)) if self.no is not None else set[int]()
        return sorted(yes - no), sorted(no - yes)

    def _firsts(self, model: StreamModel, words: Sequence[str]) -> list[int]:
        ids = [model.script.wording.text(word)[:1] for word in words]
        found = sorted({each[0] for each in ids if each})
        if not found:
            raise MmfastError(f"{list(words)} hold no token; give words such as {list(YES)}")
        return found


def condition_of(text: str) -> str:
    """Return the condition in a text: "tell me when a car stops." gives "a car stops"."""
    return _TELL.sub("", check_question(text)).strip().rstrip(".?!")


class Subscription(Iterator[Event]):
    """Waits for something; iterate over its events, or give a callback.

    `asked` counts looks, `probability` is that of the last one, and `since` the seconds of the
    stream since which it has been at the threshold, None while it is not; `missed` counts events
    that no reader took in time; `error` is the last exception of the callback, without which the
    stream goes on.
    """

    def __init__(
        self,
        condition: str,
        rule: SpeakRule,
        look: Look,
        callback: Callable[[Event], Any] | None,
        cancelled: Callable[[Subscription], Any],
    ) -> None:
        """Wait from now on; `cancelled` is called when it ends."""
        self.condition, self.rule, self._look, self._callback = condition, rule, look, callback
        self.ready, self.probability = Ready(), 0.0
        self.asked = self.events = self.missed = 0
        self.since: float | None = None
        self.error: Exception | None = None
        self.cancelled, self._on_cancel = False, cancelled
        self._queue: queue.Queue[Event | None] = queue.Queue(_MOST)

    def look(self, stream: Stream, answer: Callable[[str, int], str], time: float) -> list[Event]:
        """Look at a stream that has come to `time`; `answer` gives the text of an event."""
        if self.cancelled or not self.ready.due(self.rule, time):
            return []
        asked, question = stream.answering(self._look.question, Trace())
        _, logits = asked.branch(question)
        self.probability = self._look.probability(asked.model, logits)
        self.asked += 1
        if self.probability < self.rule.threshold:
            self.since = None
        elif self.since is None:
            self.since = time
        self.ready, speak = self.ready.step(self.rule, time, self.probability)
        if not speak:
            return []
        text = ""
        if self._look.reply is not None:
            text = answer(self._look.reply, self._look.max_new_tokens)
        self.events += 1
        return [Event(time, self.condition, self.probability, text)]

    def stats(self) -> dict[str, Any]:
        """Figures so far: looks, events, the last probability, and since when it is true."""
        return {
            "condition": self.condition,
            "asked": self.asked,
            "answered": self.events,
            "probability": self.probability,
            "true_since": self.since,
            "missed": self.missed,
            "error": None if self.error is None else str(self.error),
        }

    def deliver(self, event: Event) -> None:
        """Hand an event to the callback, or to the reader of the iterator."""
        if self._callback is not None:
            try:
                self._callback(event)
            except Exception as error:  # the caller's own; no reason to stop watching
                self.error = error
            return
        while True:
            try:
                return self._queue.put_nowait(event)
            except queue.Full:
                self._drop()

    def _drop(self) -> None:
        with suppress(queue.Empty):
            self._queue.get_nowait()
            self.missed += 1

    def __next__(self) -> Event:
        """The next event; waits for it."""
        event = self._queue.get()
        if event is None:
            self._queue.put(None)
            raise StopIteration
        return event

    def wait(self, timeout: float) -> Event | None:
        """Return the next event within so many seconds of the wall clock, else None."""
        try:
            event = self._queue.get(timeout=timeout)
        except queue.Empty:
            return None
        if event is None:
            self._queue.put(None)
        return event

    def waiting(self) -> list[Event]:
        """Events that are there already."""
        found = []
        while not self._queue.empty():
            event = self._queue.get_nowait()
            if event is None:
                self._queue.put(None)
                break
            found.append(event)
        return found

    def cancel(self) -> None:
        """Stop waiting for events."""
        if not self.cancelled:
            self.cancelled = True
            if self._queue.full():
                self._drop()
            self._queue.put(None)
            self._on_cancel(self)
