"""`Session`: a stream that is watched for hours and asked at any moment."""

from __future__ import annotations

import time as clocks
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.core.trace import Trace
from mmfast.frontends.limits import DEFAULT_LIMITS, Limits
from mmfast.models.prompt import check_question
from mmfast.streams import saving
from mmfast.streams.given import read_frames
from mmfast.streams.quotas import Quotas
from mmfast.streams.reply import Reply, Sampler
from mmfast.streams.speaking import Rule
from mmfast.streams.stream import Stream
from mmfast.streams.subscribe import NO, PROBE, YES, Event, Look, Subscription, condition_of
from mmfast.streams.turns import Turns
from mmfast.streams.viewer import Viewer
from mmfast.streams.watching import Watch, together


class Session:
    """A stream: frames go in, questions are answered from what was seen, memory stays bounded.

    Any thread may call any method. Questions go before frames that wait, and an answer that is
    still being written does not hold frames up.

    Made by `VideoStream.open`, which explains the arguments.
    """

    def __init__(
        self,
        viewer: Viewer,
        memory: str | None = None,
        *,
        quotas: Quotas | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.viewer, self.limits = viewer, limits
        self.stream = Stream(viewer, memory, quotas)
        self.subscriptions: list[Subscription] = []
        self.watches: list[Watch] = []
        self.turns, self.closed = Turns(), False

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
                found = subscription.look(self, units[-1].times[-1])
                events += [(subscription, event) for event in found]
            self.stream.counts["events"] += len(events)
        for subscription, event in events:  # outside: a callback may take as long as it likes
            subscription.deliver(event)
        return len(units)

    def watch(self, source: Any, *, background: bool = False, **options: Any) -> Watch:
        """Watch a source: file, directory of frames, camera, address, iterator.

        Args:
            source: See `mmfast.frontends.live.live_frames`.
            background: Return at once and watch in a thread; else return when the source ends.
            **options: `fps`, `latency` (seconds that a frame may wait before it is dropped),
                `realtime` (a file at its own speed), `allow_network`, `each`; see `Watch`.

        Raises:
            MediaError: The source cannot be opened, stalls or dies; what was seen stays. In the
                background it is raised by `Watch.join`.
        """
        self._check_open()
        watch = Watch(self, source, **{"fps": self.viewer.fps, **options})
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
        """Ask about what was seen so far.

        The question is a branch: the stream goes on as if it had not been asked.

        Args:
            question: A question.
            remember: Keep question and answer in the stream, at its end when the answer ends.
            max_new_tokens: Longest answer.
            temperature: 0 takes the likeliest token.
            top_p: See `Sampler`.
            seed: See `Sampler`.

        Returns:
            An iterator of text deltas, about the moment of this call.

        Raises:
            MmfastError: Empty question, a value out of range, or the session is closed.
        """
        started, text, trace = clocks.perf_counter(), check_question(question), Trace()
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise MmfastError(f"max_new_tokens={max_new_tokens!r}; give a whole number from 1")
        sampler = Sampler(self.viewer.blocked, temperature, top_p, seed, self.viewer.penalty)
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
            tokenizer=self.viewer.tokenizer,
            sampler=sampler,
            stops=self.viewer.stops,
            limit=max_new_tokens,
            trace=trace,
            started=started,
            ended=lambda reply: self._ended(reply, text if remember else None, version),
            prompt=prompt,
        )

    def _ended(self, reply: Reply, question: str | None, version: int) -> None:
        """Count an answer, and keep it where that was asked for."""
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
        """Be told when something happens; `mmfast.streams.subscribe` explains the rule.

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
            **rule: `threshold`, `release`, `every`, `pause`; see `Rule`.

        Raises:
            MmfastError: A value out of range.
        """
        condition = condition_of(text)
        question = probe.replace("{condition}", condition)
        look = Look(question, tuple(yes), no, silence, reply, max_new_tokens)
        subscription = Subscription(condition, Rule.of(rule), look, callback)
        with self.turns.question():
            self._check_open()
            look.check(self)
            self.subscriptions.append(subscription)
        return subscription

    def new_source(self) -> None:
        """The times of the next frame may begin anew."""
        with self.turns.question():
            self.stream.timeline = self.stream.timeline.again()

    def stats(self) -> dict[str, Any]:
        """Figures so far, as plain numbers: frames, tokens, memory, drops, time spent."""
        with self.turns.question():
            figures, line = self.stream.stats(), self.stream.timeline
            odd = Counter(repeated=line.repeated, late=line.late, jumps=line.jumps)
            odd.update(resized=self.stream.taken.resized)
        return {**figures, **together(self.watches, odd)}

    def save(self, folder: str | Path) -> int:
        """Save all but subscriptions and sources; `VideoStream.restore` goes on bit for bit.

        What was saved before stays readable whenever the process dies.

        Returns:
            The number of this save.

        Raises:
            MmfastError: The folder cannot be written.
        """
        with self.turns.question():
            self._check_open()
            return saving.save(folder, self.stream.snapshot())

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
