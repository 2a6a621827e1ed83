"""`Session`: a stream that is watched for hours and asked at any moment."""

from __future__ import annotations

import threading
import time as clocks
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mmfast.core.errors import MediaError, MmfastError
from mmfast.core.trace import Trace
from mmfast.frontends.image import picture
from mmfast.frontends.live.source import live_frames
from mmfast.frontends.source import DEFAULT_LIMITS, Limits
from mmfast.models.prompt import check_question
from mmfast.streams import snapshots
from mmfast.streams.archive.tiers import TierQuotas
from mmfast.streams.feed import Feed
from mmfast.streams.frontend import Frame
from mmfast.streams.reply import Reply, Sampler
from mmfast.streams.stream import Clock, Stream, StreamModel
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
    ) -> None:
        self.model, self.limits = model, limits
        self.stream = Stream(model, memory, quotas)
        self.subscriptions: list[Subscription] = []
        self.watches: list[Watch] = []
        self.turns, self.closed = TurnLock(), False

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
            self._check_open()
            units = self.stream.take(read, times)
            for subscription in list(self.subscriptions) if units else []:
                found = subscription.look(self.stream, self._answer, units[-1].times[-1])
                events += [(subscription, event) for event in found]
            self.stream.counts["events"] += len(events)
        for subscription, event in events:  # outside: a callback may take as long as it likes
            subscription.deliver(event)
        return len(units)

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
        self._check_open()
        watch = Watch(self, source, **{"fps": self.model.fps, **options})
        self.watches.append(watch)
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
    ) -> Reply:
        """Ask about what was seen so far; iterate over the text deltas of the answer.

        The question is a branch: the stream goes on as if it had not been asked.

        Args:
            question: A question.
            remember: Keep question and answer in the stream, at its end when the answer ends.
            max_new_tokens: Longest answer.
            temperature: 0 takes the likeliest token.
            top_p: See `Sampler`.
            seed: See `Sampler`.

        Raises:
            MmfastError: Empty question, a value out of range, or the session is closed.
        """
        started, text, trace = clocks.perf_counter(), check_question(question), Trace()
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise MmfastError(f"max_new_tokens={max_new_tokens!r}; give a whole number from 1")
        sampler = Sampler(self.model.blocked, temperature, top_p, seed, self.model.penalty)
        with self.turns.question():
            self._check_open()
            if remember:  # what waits for its partner belongs before the question
                self.stream.flush()
            prompt = self.stream.words(text)
            branch, logits = self.stream.branch(text, trace)
            self.stream.counts["questions"] += 1
            version = self.stream.version
        return Reply(
            branch,
            logits,
            tokenizer=self.model.tokenizer,
            sampler=sampler,
            stops=self.model.stops,
            limit=max_new_tokens,
            trace=trace,
            started=started,
            ended=lambda reply: self._ended(reply, text if remember else None, version),
            prompt=prompt,
        )

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
        question = probe.replace("{condition}", condition)
        look = Look(question, tuple(yes), no, silence, reply, max_new_tokens)
        subscription = Subscription(condition, SpeakRule.of(rule), look, callback)
        with self.turns.question():
            self._check_open()
            look.check(self.model)
            self.subscriptions.append(subscription)
        return subscription

    def _answer(self, question: str, max_new_tokens: int) -> str:
        return self.ask(question, max_new_tokens=max_new_tokens).read()

    def new_source(self) -> None:
        """Let the times of the next frame start again from any value."""
        with self.turns.question():
            self.stream.timeline = self.stream.timeline.again()

    def stats(self) -> dict[str, Any]:
        """Figures so far, as plain numbers: frames, tokens, memory, drops, time spent."""
        with self.turns.question():
            figures, line = self.stream.stats(), self.stream.timeline
            odd = Counter(repeated=line.repeated, late=line.late, jumps=line.jumps)
            odd.update(resized=self.stream.seen.resized)
        return {**figures, **_source_figures(self.watches, odd)}

    def save(self, folder: str | Path) -> int:
        """Save all but subscriptions and sources; `VideoStream.restore` goes on bit for bit.

        What was saved before stays readable whenever the process dies. Returns the number of this
        save; MmfastError where the folder cannot be written.
        """
        with self.turns.question():
            self._check_open()
            return snapshots.save(folder, self.stream.snapshot())

    def close(self) -> None:
        """Stop watching and remove what the disk tier holds; answers being written may end."""
        self.closed = True
        for watch in self.watches:
            watch.stop()
        for subscription in self.subscriptions:
            subscription.cancel()
        with self.turns.question():
            self.stream.close()

    def _check_open(self) -> None:
        if self.closed:
            raise MmfastError("this session is closed; open another one")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Watch:
    """Frames of one source on their way into a session.

    `fps` frames are taken per second, None takes all. A frame waits `latency` seconds at most:
    older ones are dropped, and counted, while the model is busy; None drops nothing, and the source
    waits. `realtime` lets a file's frames arrive at their times, as a camera's do. `each` is called
    after every frame with its seconds, in the thread that watches. `options` are `allow_network`,
    `rate`, `timeout` of `mmfast.frontends.live.source.live_frames`, which explains the source too.

    `feed` knows `lag` and `dropped`; `error` is the exception that ended it, if any.
    """

    def __init__(
        self,
        session: Session,
        source: Any,
        *,
        fps: float | None,
        latency: float | None = None,
        realtime: bool = False,
        clock: Clock | None = None,
        each: Callable[[float], Any] | None = None,
        **options: Any,
    ) -> None:
        self._session, self._each = session, each
        self.live = live_frames(source, fps=fps, limits=session.limits, **options)
        self.feed = Feed(self.live, latency=latency, clock=clock, realtime=realtime)
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> None:
        """Watch in a thread."""
        self._thread = threading.Thread(target=self._quietly, name="mmfast-watch", daemon=True)
        self._thread.start()

    def _quietly(self) -> None:
        try:
            self.run()
        except Exception as error:  # raised by `join`, shown in the session's figures
            self.error = error

    def run(self) -> None:
        """Push frames until `stop`, or the source ends; MediaError where it stalls or dies."""
        self._session.new_source()
        try:
            for frame, seconds in self.feed:
                if self._stopped or self._session.closed:
                    return
                self._session.push(frame, seconds)
                if self._each is not None:
                    self._each(self._session.stream.timeline.last or 0.0)
        except MmfastError as error:
            if self._stopped or self._session.closed:
                return  # it was woken to end
            self.error = error
            raise
        finally:
            self.feed.close()

    @property
    def running(self) -> bool:
        """Its thread is still watching."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the source and return True; MediaError where it stalled or died."""
        if self._thread is not None:
            self._thread.join(timeout)
        if self.error is not None:
            raise self.error
        return not self.running

    def stop(self) -> None:
        """End it; frames that wait are not read."""
        self._stopped = True
        self.feed.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def stats(self) -> dict[str, Any]:
        """Figures of the feed, and what the source did wrong."""
        events = {name: count for name, count in self.live.events.items() if count}
        error = None if self.error is None else str(self.error)
        return {"source": self.live.name, **self.feed.stats(), "events": events, "error": error}


def _source_figures(watches: Sequence[Watch], odd: Counter[str]) -> dict[str, Any]:
    """Figures of all sources of a session; `odd` counts irregular times that it has put right."""
    feeds = [watch.stats() for watch in watches]
    for feed in feeds:
        odd.update(feed["events"])
    return {
        "dropped": sum(feed["dropped"] for feed in feeds),
        "lag": max((feed["lag"] for feed in feeds), default=0.0),
        "source_events": dict(odd),
        "errors": [feed["error"] for feed in feeds if feed["error"]],
    }
