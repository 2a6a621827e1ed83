"""`Session`: a stream that is watched for hours and asked at any moment."""

from __future__ import annotations

import math
import threading
import time as clocks
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mmfast.attach import check_detached
from mmfast.core.errors import MediaError, MmfastError
from mmfast.core.trace import Trace
from mmfast.frontends.image import picture
from mmfast.frontends.source import DEFAULT_LIMITS, Limits
from mmfast.models.prompt import check_question
from mmfast.streams import snapshots
from mmfast.streams.archive.tiers import TierQuotas
from mmfast.streams.drafts import plan_stream
from mmfast.streams.feed import Sources, Watch
from mmfast.streams.frontend import Frame
from mmfast.streams.history import (
    NUMBERS,
    HistoryAnswer,
    HistoryQuestion,
    HistorySearch,
    history_question,
    tell,
)
from mmfast.streams.reply import Reply, Sampler, ToldReply, recalled_frames
from mmfast.streams.stream import Stream, StreamModel
from mmfast.streams.subscription import (
    NO,
    PROBE,
    YES,
    Event,
    Look,
    SpeakRule,
    Subscription,
    condition_of,
)

_POLL = 0.1  # seconds between two looks whether the sources still run


class TurnLock:
    """Lock that lets waiting questions in before frames; its holder may take it again.

    Frames come all the time, so a plain lock might never let a question through.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._calm = threading.Condition()
        self._urgent = 0  # questions that wait or run

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Hold it, after all questions that wait."""
        with self._calm:
            # Where this thread holds the lock already, no question can run before it is done.
            if not self._lock._is_owned():  # type: ignore[attr-defined]
                self._calm.wait_for(lambda: not self._urgent)
        with self._lock:
            yield

    @contextmanager
    def question(self) -> Iterator[None]:
        """Hold it as soon as the frame that is being read is done."""
        with self._calm:
            self._urgent += 1
        try:
            with self._lock:
                yield
        finally:
            with self._calm:
                self._urgent -= 1
                self._calm.notify_all()


def read_frames(frame: Any, time: Any, limits: Limits) -> tuple[list[Frame], list[Any]]:
    """One frame or several, as RGB `[H, W, 3]` uint8, and a time or None for each.

    A list, a tuple or an array of four axes is several frames; `time` is then a sequence of
    seconds, or None. MediaError: a frame cannot be read, or there are not as many times as frames.
    """
    several = isinstance(frame, list | tuple) or getattr(frame, "ndim", 0) == 4
    frames = list(frame) if several else [frame]
    many = isinstance(time, Sequence | np.ndarray) and not isinstance(time, str)
    times = list(time) if many else [time] * len(frames)
    if len(times) != len(frames) or (several and time is not None and not many):
        given = f"{len(times)} times" if many else f"time={time!r}"
        raise MediaError(f"{len(frames)} frames came with {given}; give one time for each, or None")
    return [picture(each, "the frame", limits) for each in frames], times


def _clip_of(model: StreamModel, pictures: list[Any], times: list[float]) -> Session:
    """Return a session that has seen nothing but these pictures."""
    clip = Session(model)
    clip.push(pictures, times)
    return clip


def _probability(clip: Session, thing: str) -> float:
    """Return the probability of yes to whether a thing is there."""
    look = Look(PROBE.replace("{condition}", f"there is a {thing}"))
    return look.probability(clip.model, clip.stream.branch(look.question)[1])


def _answer_of(clip: Session, question: str) -> str:
    return clip.ask(question, max_new_tokens=12).read().lower()


def _sampler(
    model: StreamModel,
    make: Callable[[StreamModel], Sampler] | None,
    how: tuple[float, float, int | None],
) -> Sampler:
    """Return what chooses the tokens of an answer: the given one, or one of these options."""
    return Sampler(model.blocked, *how, model.penalty) if make is None else make(model)


class Session:
    """A stream: frames go in, questions are answered from what was seen, memory stays bounded.

    Any thread may call any method. Questions go before frames that wait, and an answer that is
    still being written does not hold frames up.

    Made by `VideoStream.open`, which explains the arguments.
    """

    def __init__(
        self,
        model: StreamModel,
        memory: str | None = None,
        *,
        quotas: TierQuotas | None = None,
        limits: Limits = DEFAULT_LIMITS,
        history: int | None = 0,
    ) -> None:
        self.model, self.limits = model, limits
        self.stream = Stream(model, memory, quotas, history)
        self.subscriptions: list[Subscription] = []
        self.sources = Sources()
        self.turns, self.closed = TurnLock(), False

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a session belongs to its process: save() it and restore() it in the other one, or "
            "open another session there"
        )

    def push(self, frame: Any, time: Any = None) -> int:
        """Take the next frame, or the next few.

        Args:
            frame: Anything `read_image` takes; or several, as a list or an array of four axes.
            time: Seconds on the source's clock, ascending; a list of them with several frames.
                None counts on by 1 / fps. A frame that repeats a time, or comes less than a
                second late, is left out and counted; a source that jumps back further goes on
                where the stream is.

        Returns:
            Units written: frames, or temporal patches of two frames.

        Raises:
            MediaError: The frame cannot be read or its time is no number; the session goes on.
            MmfastError: The session is closed, or the frame does not fit into its memory.
        """
        read, times = read_frames(frame, time, self.limits)
        events: list[tuple[Subscription, Event]] = []
        with self.turns.frame():
            self._check_stock()
            units = self.stream.take(read, times)
            for subscription in list(self.subscriptions) if units else []:
                found = subscription.look(self.stream, self._answer, units[-1].times[-1])
                events += [(subscription, event) for event in found]
            self.stream.counts["events"] += len(events)
        for subscription, event in events:  # outside: a callback may take as long as it likes
            subscription.deliver(event)
        return len(units)

    def glance(self, frame: Any, time: float) -> None:
        """Keep a frame between two of the stream for questions about motion alone."""
        with self.turns.frame():
            self.stream.glance(frame, time + self.stream.timeline.offset)

    def watch(self, source: Any, *, background: bool = False, **options: Any) -> Watch:
        """Watch a source: file, directory of frames, camera, address, iterator.

        Args:
            source: See `mmfast.frontends.live.source.live_frames`.
            background: Return at once and watch in a thread; else return when the source ends.
            **options: `fps`, `latency` (seconds that a frame may wait before it is dropped),
                `realtime` (a file at its own speed), `allow_network`, `each`; see `Watch`.

        Raises:
            MediaError: The source cannot be opened, stalls or dies; what was seen stays. In the
                background it is raised by `Watch.join`.
        """
        self._check_stock()
        watch = Watch(self, source, **{"fps": self.model.fps, **options})
        self.sources.add(watch)
        if background:
            watch.start()
        else:
            watch.run()
        return watch

    def ask(
        self,
        question: str,
        *,
        remember: bool = False,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        decode: str | None = None,
        sampler: Callable[[StreamModel], Sampler] | None = None,
    ) -> Reply:
        """Ask about what was seen so far; iterate over the text deltas of the answer.

        The question is a branch: the stream goes on as if it had not been asked. The embedded
        model of streams has its answers about order, count, duration and time from `history`.

        Args:
            question: A question.
            remember: Keep question and answer in the stream, at its end when the answer ends.
            max_new_tokens: Longest answer.
            temperature: 0 takes the likeliest token.
            top_p: See `Sampler`.
            seed: See `Sampler`.
            sampler: Makes what chooses tokens of the model that answers, instead of these three.
            decode: `recycle` or `lookup`, drafts that change no answer; None: the pipeline's.

        Raises:
            MmfastError: Empty question, a value out of range, no frame yet, or a closed session.
        """
        started, text, trace = clocks.perf_counter(), check_question(question), Trace()
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise MmfastError(f"max_new_tokens={max_new_tokens!r}; give a whole number from 1")
        drafts = plan_stream(decode, self.model.decode)
        if self.stream.recent is not None and not self.stream.recent.whole:
            past = HistoryQuestion.of(text) if self.stream.album is not None else None
            if past is not None:
                return self._told(past, text if remember else None, started)
        with self.turns.question():
            self._check_seen()
            if remember:  # what waits for its partner belongs before the question
                self.stream.flush()
            stream, wording = self.stream.answering(text, trace)
            model, prompt = stream.model, stream.words(wording)
            chosen = _sampler(model, sampler, (temperature, top_p, seed))
            begun = stream.branch(wording, trace)
            self.stream.counts["questions"] += 1
            version = self.stream.version if stream is self.stream else -1  # -1: is written anew
        return Reply(
            *begun,
            tokenizer=model.tokenizer,
            sampler=chosen,
            stops=model.stops,
            limit=max_new_tokens,
            trace=trace,
            started=started,
            ended=lambda reply: self._ended(reply, text if remember else None, version),
            prompt=prompt,
            drafter=None if drafts is None else model.drafting.drafter(drafts, prompt),
        )

    def _told(self, past: HistoryQuestion, kept: str | None, started: float) -> ToldReply:
        told, ended = self._history(past), partial(self._ended, question=kept, version=-1)
        return ToldReply(told.text, trace=told.trace, started=started, ended=ended)

    def history(self, question: str) -> HistoryAnswer:
        """Answer about order, count, duration or time of what the stream has shown since it began.

        Small pictures are kept of all that was seen, in as many bytes as `open(history=)` allows.
        Those of the moments that retrieval finds for the things in the question are put to the
        model as clips, which it is asked about; see `mmfast.streams.history`.

        Args:
            question: Such as "Which came first, the red circle or the blue square?", "How many
                numbers have been shown?", "How many times was the red circle shown?", "How long
                was the red circle on the screen?", "When was the green star shown?", "Has there
                been a green star?".

        Raises:
            MmfastError: The question has none of these forms, or the session keeps no history.
        """
        return self._history(history_question(question))

    def _history(self, question: HistoryQuestion) -> HistoryAnswer:
        trace, live = Trace(), list[float]()
        recalled: dict[str, dict[float, int]] | None = None
        with self.turns.question():
            self._check_seen()
            stream, album = self.stream, self.stream.album
            if album is None:
                raise MmfastError("this session keeps no history; open(history='64MB') does")
            moments, whole = album.moments(), album.whole
            if not moments:
                raise MmfastError(
                    "nothing of the stream is in its history yet; push frames, or give history= "
                    "more bytes, such as '64MB'"
                )
            if stream.memory.archive is not None:
                times = [each.time for each in stream.memory.blocks if each.kind == "frame"]
                live, recalled = [time for time in times if time is not None], {}
                for thing in {*question.things} - {NUMBERS}:
                    branch, _ = stream.branch(f"Where is the {thing}?", trace)
                    found = recalled_frames(branch)
                    recalled[thing] = {f.time: f.layers for f in found if f.time is not None}
            stream.counts["questions"] += 1
        model = self.model if self.model.clips is None else self.model.clips()
        search = HistorySearch(
            moments, recalled, live, partial(_clip_of, model), _probability, _answer_of
        )
        return tell(question, search, whole, trace)

    def _ended(self, reply: Reply, question: str | None, version: int) -> None:
        with self.turns.question():
            self.stream.spent["answer_ms"] += reply.ms or 0.0
            if question is not None and not self.closed:
                self.stream.remember(reply, question, version)

    def subscribe(
        self,
        text: str,
        callback: Callable[[Event], Any] | None = None,
        *,
        reply: str | None = None,
        probe: str = PROBE,
        yes: Sequence[str] = YES,
        no: Sequence[str] | None = NO,
        silence: str | None = None,
        max_new_tokens: int = 32,
        **rule: float,
    ) -> Subscription:
        """Report an event when a condition is met; `mmfast.streams.subscription` explains the rule.

        Args:
            text: "tell me when a car stops".
            callback: Called with every `Event`, in the thread that pushes; without one iterate
                over what this returns.
            reply: Question whose answer becomes the event's text; None asks nothing more.
            probe: Question that is put after a frame; `{condition}` stands for the text.
            yes: Words that mean it has happened.
            no: Words that mean it has not; None takes the probability of `yes` as it is, for a
                probe such as "What colour is the {condition} now?" with `yes=["red"]`.
            silence: Word that a trained model writes where nothing is to be said.
            max_new_tokens: Of the reply.
            **rule: `threshold`, `release`, `every`, `pause`; see `SpeakRule`.

        Raises:
            MmfastError: A value out of range.
        """
        condition = condition_of(text)
        if callback is not None and not callable(callback):
            raise MmfastError(
                f"callback {callback!r} cannot be called; give a function of an Event, or none and "
                "iterate over the subscription"
            )
        look = Look(probe, yes, no, silence, reply, max_new_tokens).about(condition)
        subscription = Subscription(condition, SpeakRule.of(rule), look, callback, self._cancelled)
        with self.turns.question():
            self._check_stock()
            look.check(self.model)
            self.subscriptions.append(subscription)
        return subscription

    def wait_until(
        self, text: str, *, timeout: float | None = None, **options: Any
    ) -> Event | None:
        """Wait until a condition holds, or the answer to a question becomes yes.

        Frames must come from elsewhere meanwhile: from `watch(..., background=True)` or another
        thread. It is looked at from the next frame on.

        Args:
            text: "a car stops", or a question that is put as it is: "Is the door open?".
            timeout: Seconds of the wall clock; None waits as long as a source is being watched.
            **options: Those of `subscribe`; without `every` each new frame is looked at.

        Returns:
            The event, or None where the time is up or all sources have ended before.

        Raises:
            MmfastError: A value out of range, or nothing is being watched and there is no timeout.
        """
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
            raise MmfastError(f"timeout={timeout!r} is no delay; give seconds from 0, or None")
        watched = bool(self.sources.running)
        if timeout is None and not watched:
            raise MmfastError(
                f"wait_until({text!r}) would wait for ever: nothing is being watched; call "
                "watch(source, background=True) before, or give timeout="
            )
        asks = check_question(text).strip().endswith("?")
        asked = {"probe": condition_of(text) + "?"} if asks else {}
        end = math.inf if timeout is None else clocks.monotonic() + timeout
        subscription = self.subscribe(text, **{"every": 0.0, **asked, **options})
        try:
            while (left := end - clocks.monotonic()) > 0 and not subscription.cancelled:
                event = subscription.wait(min(left, _POLL))
                if event is not None:
                    return event
                if watched and not self.sources.running:
                    break
            return next(iter(subscription.waiting()), None)
        finally:
            subscription.cancel()

    def _cancelled(self, subscription: Subscription) -> None:
        with suppress(ValueError):  # where it is told before it was added
            self.subscriptions.remove(subscription)

    def _answer(self, question: str, max_new_tokens: int) -> str:
        return self.ask(question, max_new_tokens=max_new_tokens).read()

    def new_source(self) -> None:
        """Let the times of the next frame start again from any value."""
        with self.turns.question():
            self.stream.timeline = self.stream.timeline.again()
            if self.stream.recent is not None:
                self.stream.recent.cut()

    def stats(self) -> dict[str, Any]:
        """Figures so far, as plain numbers: frames, tokens, memory, drops, time spent."""
        with self.turns.question():
            figures, line = self.stream.stats(), self.stream.timeline
            odd = Counter(repeated=line.repeated, late=line.late, jumps=line.jumps)
            odd.update(resized=self.stream.seen.resized)
        waiting = [each.stats() for each in list(self.subscriptions)]
        return {**figures, **self.sources.stats(odd), "subscriptions": waiting}

    def save(self, folder: str | Path) -> int:
        """Save all but subscriptions and sources; `VideoStream.restore` goes on bit for bit.

        What was saved before stays readable whenever the process dies. Returns the number of this
        save; MmfastError where the folder cannot be written.
        """
        self.model.signature()  # all weights are read, once: frames need not wait for that
        with self.turns.question():
            self._check_open()
            return snapshots.save(folder, self.stream.snapshot())

    def close(self) -> None:
        """Stop watching and remove what the disk tier holds; answers being written may end."""
        self.closed = True
        for watch in list(self.sources.running):
            watch.stop()
        for subscription in list(self.subscriptions):
            subscription.cancel()
        with self.turns.question():
            self.stream.close()

    def _check_open(self) -> None:
        if self.closed:
            raise MmfastError("this session is closed; open another one")

    def _check_stock(self) -> None:
        self._check_open()
        check_detached(self.model.model, wait=False)

    def _check_seen(self) -> None:
        """Refuse a question to a stream without a frame, which would be answered by a guess."""
        self._check_stock()
        if self.stream.timeline.last is None:
            raise MmfastError("nothing was seen yet; push a frame or watch a source before you ask")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
