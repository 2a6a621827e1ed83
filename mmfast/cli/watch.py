"""`mmfast watch`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mmfast.cli import options as options
from mmfast.cli.options import Device, Dtype, Json, Model, Reduce
from mmfast.cli.output import _err, print_json, say_dim, say_note
from mmfast.core.errors import MmfastError


def watch(
    source: options.Source,
    ask: options.Ask = None,
    every: options.Every = None,
    ask_at: options.AskAt = None,
    tell_me_when: options.TellMeWhen = None,
    probe: options.Probe = None,
    yes: options.Yes = None,
    threshold: options.Threshold = 0.6,
    memory: options.StreamMemory = None,
    host_bytes: options.HostBytes = None,
    reduce: Reduce = None,
    frame_cache: options.FrameCacheShare = None,
    gate: options.Gate = None,
    fps: options.Fps = 1.0,
    latency: options.Latency = None,
    realtime: options.Realtime = False,
    allow_network: options.Network = False,
    save: options.Save = None,
    restore: options.Restore = None,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = "auto",
    weights: options.Weights = None,
    decode: options.Decode = None,
    max_new_tokens: options.MaxNewTokens = 64,
    as_json: Json = False,
) -> None:
    """Watch a stream in bounded memory, answer questions on the way; Ctrl-C ends it."""
    from mmfast.caches.plan import plan_cache
    from mmfast.core.sizes import parse_bytes
    from mmfast.models.quiet import quiet
    from mmfast.pipelines import pipeline
    from mmfast.streams.memory import AUTO, check_plan
    from mmfast.streams.snapshots import check_folder

    quiet()
    if save is not None:
        check_folder(save)
    questions = times_of(ask or [], every, ask_at or [])
    _check_looks(bool(tell_me_when), bool(probe or yes), threshold)
    options.check_answer(max_new_tokens)
    check_plan(plan_cache(None if memory == AUTO else memory))  # before any weight is read
    parse_bytes(host_bytes, "--host-bytes ")
    given: dict[str, Any] = {"reduce": reduce, "frame_cache": frame_cache, "gate": gate}
    given |= {"weights": weights, "decode": decode}
    pipe = pipeline("video-stream", model, device=device, dtype=dtype, fps=fps, **given)
    kept: dict[str, Any] = {} if memory is None else {"memory": memory}
    kept |= {} if host_bytes is None else {"host_bytes": host_bytes, "host_blocks": None}
    session = pipe.open(**kept) if restore is None else pipe.restore(restore, **kept)
    session_run = WatchRun(session, questions, max_new_tokens, as_json)
    looks: dict[str, Any] = {"threshold": threshold}
    looks |= {"probe": probe} if probe else {}
    looks |= {"yes": yes, "no": None} if yes else {}
    for condition in tell_me_when or []:
        session.subscribe(condition, session_run.report, **looks)
    way: dict[str, Any] = {"latency": latency, "realtime": realtime}
    way["allow_network"] = allow_network and hosts_of(source)
    session_run.run(camera_or_path(source), save, **way)


def _check_looks(told: bool, asked: bool, threshold: float) -> None:
    """Refuse options of a condition without one, and a threshold that no probability reaches."""
    if (asked or threshold != 0.6) and not told:
        raise MmfastError("--probe, --yes and --threshold need a condition; give --tell-me-when")
    if not 0 <= threshold <= 1:
        raise MmfastError(f"--threshold {threshold} is no probability; give 0 to 1")


@dataclass
class TimedQuestion:
    """A question and when it is asked."""

    text: str  # the question
    at: float | None  # seconds of the stream at which it is due; None is the end
    every: float | None = None  # seconds between two times; None asks once

    @property
    def was_due(self) -> bool:
        """False while the first time to ask lies ahead."""
        return self.at in (None, float("inf")) or (self.every or self.at) != self.at


def times_of(ask: Sequence[str], every: float | None, ask_at: Sequence[str]) -> list[TimedQuestion]:
    """Return the checked questions of the options `--ask`, `--every` and `--ask-at`."""
    from mmfast.models.prompt import check_question

    if every is not None and not 0 < every < float("inf"):
        raise MmfastError(f"--every {every} is no interval; give seconds such as 5")
    if every is not None and not ask:
        raise MmfastError("--every needs a question; give --ask, too")
    found = [TimedQuestion(check_question(text), every, every) for text in ask]
    for given in ask_at:
        seconds, colon, text = given.partition(":")
        try:
            at = float(seconds)
        except ValueError:
            at = -1.0
        if not colon or not 0 <= at < float("inf"):
            raise MmfastError(
                f"--ask-at {given!r} is no time and question; write for example "
                "--ask-at '12.5:What is in the picture?'"
            )
        found.append(TimedQuestion(check_question(text), at))
    return found


def hosts_of(source: str) -> bool | list[str]:
    """Return whom `--allow-network` allows: public hosts, or the private one that was typed."""
    from mmfast.core.errors import MediaError
    from mmfast.frontends.live.inputs import check_address

    try:
        check_address(source, True)
    except MediaError:
        host = urlsplit(source).hostname if "://" in source else None
        return [host] if host else True
    return True


def camera_or_path(source: str) -> str | int:
    """Return a bare number as the number of a camera, else the path."""
    return int(source) if source.isdecimal() and not Path(source).exists() else source


class WatchRun:
    """One run of `mmfast watch`."""

    def __init__(
        self, session: Any, questions: Sequence[TimedQuestion], max_new_tokens: int, as_json: bool
    ) -> None:
        self.session, self.questions = session, list(questions)
        self.max_new_tokens, self.as_json = max_new_tokens, as_json
        self.answers: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._status: Any = None

    def run(self, source: Any, save: Path | None, **options: Any) -> None:
        """Watch to the end or Ctrl-C, ask what is left, save, and print the summary."""
        interrupted, error = False, None
        shown = _err.status("watching") if _err.is_terminal and not self.as_json else nullcontext()
        with self.session, shown as self._status:
            try:
                self.session.watch(source, each=self._frame, **options)
            except KeyboardInterrupt:
                interrupted = True
            except MmfastError as failure:
                if not self.session.sources.opened:  # nothing was seen: there is nothing to sum up
                    raise
                error = failure
            for question in self.questions:
                if question.at is None and not interrupted:
                    self._ask(question)
                elif not interrupted and error is None and not question.was_due:
                    say_note(f"{question.text!r} was not asked: no frame came at {question.at:g} s")
            if save is not None:
                try:
                    self.session.save(save)
                except MmfastError as failure:  # what was seen and answered is told all the same
                    save, error = None, error or failure
            self._finish(str(source), save, interrupted, error)
        if error is not None:
            raise error

    def report(self, event: Any) -> None:
        """Print and keep an event of a subscription."""
        self.events.append(asdict(event))
        self._say(event.time, f"{event.condition} ({event.probability:.0%}) {event.text}".strip())

    def _frame(self, seconds: float) -> None:
        for question in self.questions:
            if question.at is not None and seconds >= question.at:
                self._ask(question)
                step = question.every
                # a gap in the stream is no reason to ask many times at once
                question.at = float("inf") if step is None else (seconds // step + 1) * step
        if self._status is not None:
            self._status.update(line_of(self.session.stats()))

    def _ask(self, question: TimedQuestion) -> None:
        reply = self.session.ask(question.text, max_new_tokens=self.max_new_tokens)
        text, seconds = reply.read(), self.session.stats()["seconds"]
        row: dict[str, Any] = {"time": seconds, "question": question.text, "answer": text}
        row |= {"ttft_ms": round(reply.ttft_ms, 3), "ms": round(reply.ms, 3), **reply.trace.noted}
        self.answers.append(row)
        self._say(seconds, f"{question.text} {text}")

    def _say(self, seconds: float | None, text: str) -> None:
        if not self.as_json:
            print(f"[{seconds or 0.0:8.1f} s] {text}", flush=True)

    def _finish(
        self, source: str, save: Path | None, interrupted: bool, error: MmfastError | None
    ) -> None:
        stats = self.session.stats()
        if not self.as_json:
            return say_dim(line_of(stats))
        document = {"source": source, "answers": self.answers, "events": self.events}
        texts = {"error": error and str(error), "saved": save and str(save)}
        print_json({**document, "interrupted": interrupted, **texts, "stats": stats})


def line_of(stats: dict[str, Any]) -> str:
    """Return the figures of a session on one line."""
    memory = stats["memory"]
    stored = memory.get("archive", {}).get("bytes", {})
    parts = [
        f"{stats['frames']} frames",
        f"{stats['seconds'] or 0.0:.1f} s",
        f"{memory['live_tokens']:,} live tokens",
        f"{(memory['bytes'] + sum(stored.values())) / 1e6:.1f} MB",
        f"lag {stats['lag']:.1f} s",
        f"{stats['dropped']} dropped",
    ]
    if memory["spec"] is not None:
        parts.append(memory["spec"])
    if stats["gated"]:
        parts.append(f"{stats['gated']} skipped")
    return " · ".join(parts)
