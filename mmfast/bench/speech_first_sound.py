"""How soon a reply is heard after a spoken question, and how fast speech is made."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.speech_listening import unseen_questions
from mmfast.bench.speech_speaking import MODES, SpokenLine, unseen_lines
from mmfast.bench.timing import frozen, quantile
from mmfast.core.speech import Sound
from mmfast.tiny.speech.recordings import say

N, SEED = 20, 5
WAYS = ("turbo", "exact", "vanilla")  # of MODES


def rows(progress: Tick) -> list[Row]:
    """Rows of the embedded model, on as many threads as torch uses."""
    from mmfast.models.speech.embedded import load_speech

    asked = [say(each.text, each.voice).pcm for each in unseen_questions(N, SEED)]
    return measure(load_speech(), unseen_lines(N, SEED), asked, progress)


def measure(
    model: Any, lines: Sequence[SpokenLine], asked: Sequence[Any], progress: Tick
) -> list[Row]:
    """The same for another `Speaker` and `Chatter`: texts to say, and spoken questions `[n]`.

    The clock starts at the end of the question: all of it is heard, understood and answered from
    then on. It is the wall's, which is what a listener waits by; the processor time beside it is
    what a busy machine leaves alone.
    """
    found, done, total = [], 0, len(WAYS) * (len(lines) + len(asked))
    with frozen():
        for mode in WAYS:
            jobs: dict[str, list[Callable[[], Iterable[Sound]]]] = {
                "say": [_say(model, line, mode) for line in lines],
                "reply": [_reply(model, pcm, mode) for pcm in asked],
            }
            for job, tries in jobs.items():
                if not tries:
                    continue
                timed(tries[0]())  # once before the clock starts
                figures = []
                for each in tries:
                    figures.append(timed(each()))
                    done += 1
                    progress(f"{job}, {mode}", done, total)
                found.append({"job": job, "mode": mode, **_row(figures), "rate": model.sample_rate})
    return found


def timed(pieces: Iterable[Sound]) -> Row:
    """Milliseconds to the first sound and in all, seconds of sound, passes before the first."""
    start, work = time.perf_counter(), time.process_time()
    first, early, passes, samples, rate, chunk, gaps, ahead = 0.0, 0.0, 0, 0, 16000, 0, 0.0, 0.0
    for piece in pieces:
        now = time.perf_counter() - start
        if not samples:
            passes += piece.passes
        if len(piece.pcm):
            if not samples:
                first, chunk, ahead = now, len(piece.pcm), now
                early = time.process_time() - work
            gaps += max(0.0, now - ahead)  # the loudspeaker had nothing to play
            ahead = max(ahead, now) + len(piece.pcm) / piece.rate
            samples, rate = samples + len(piece.pcm), piece.rate
    total, worked = time.perf_counter() - start, time.process_time() - work
    seconds = samples / rate
    return {
        "first_ms": 1e3 * first,
        "rtf": total / seconds if seconds else 0.0,
        "first_cpu_ms": 1e3 * early,
        "cpu_rtf": worked / seconds if seconds else 0.0,
        "passes": passes,
        "chunk_ms": 1e3 * chunk / rate,
        "gap_ms": 1e3 * gaps,
        "seconds": seconds,
    }


def _row(figures: Sequence[Row]) -> Row:
    first = [row["first_ms"] for row in figures]
    return {
        "score": statistics.median(first),
        "first_ms": statistics.median(first),
        "first_p95_ms": quantile(first, 0.95),
        "rtf": statistics.median(row["rtf"] for row in figures),
        "first_cpu_ms": statistics.median(row["first_cpu_ms"] for row in figures),
        "cpu_rtf": statistics.median(row["cpu_rtf"] for row in figures),
        "passes_before": statistics.median(row["passes"] for row in figures),
        "chunk_ms": statistics.median(row["chunk_ms"] for row in figures),
        "gap_ms": max(row["gap_ms"] for row in figures),
        "seconds": sum(row["seconds"] for row in figures),
        "n": len(figures),
        "seed": SEED,
        "clock": "wall",
        "threads": _threads(),
        "device": "cpu",
    }


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _say(model: Any, line: SpokenLine, mode: str) -> Callable[[], Iterable[Sound]]:
    return lambda: model.speak(line.text, **_how(mode), **line.options)


def _reply(model: Any, pcm: Any, mode: str) -> Callable[[], Iterable[Sound]]:
    return lambda: model.reply(pcm, 16000, **_how(mode))


def _how(mode: str) -> dict[str, str]:
    return dict(zip(("mode", "verify"), MODES[mode], strict=True))
