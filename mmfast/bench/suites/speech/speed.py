"""Speed of speech models: tokens per second of every mode, and the time to the first sound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from mmfast.bench import timing
from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row, dtype_name
from mmfast.bench.suites.speech.quality import (
    MODES,
    RATE,
    SpokenLine,
    unseen_lines,
    unseen_questions,
    way_of,
)
from mmfast.core.speech import Sound
from mmfast.decoding.accept import Stats
from mmfast.decoding.loop import SingleDecoder
from mmfast.models.speech.layout import SpeechGuide
from mmfast.tiny.speech.recordings import say
from mmfast.tiny.speech.text import groups

ROUNDS, MODES_SEED = 24, 3


class DecodeMode(NamedTuple):
    """A draft head, and what MODES calls the way its drafts are made and verified."""

    name: str
    head: str | None
    mode: str


@dataclass
class DecodeCounts:
    """Counts of one mode over all sentences."""

    tokens: int = 0
    passes: int = 0
    drafts: int = 0
    books: dict[int, list[int]] = field(default_factory=dict)
    said: dict[int, list[int]] = field(default_factory=dict)  # tokens by line

    def add(self, line: int, stats: Stats, said: list[int]) -> None:
        """Count a sentence, once."""
        if line in self.said:
            return
        self.said[line] = said
        self.tokens += stats.tokens
        self.passes += stats.passes
        self.drafts += stats.draft_passes
        for book, (tries, stood) in stats.by_book.items():
            sums = self.books.setdefault(book, [0, 0])
            sums[0] += tries
            sums[1] += stood


@benchmark("speech", "modes")
def modes(tick: Tick) -> list[Row]:
    """Compare the modes of the embedded model on the same sentences, in turn."""
    from mmfast.models.speech.embedded import load_speech

    return mode_rows(load_speech(), unseen_lines(ROUNDS, MODES_SEED), ROUNDS, tick)


def decode_modes(heads: Sequence[str]) -> list[DecodeMode]:
    """Return one token per pass, all modes of the first head, and two modes of the others."""
    found = [DecodeMode("vanilla", None, "vanilla")]
    for head in heads:
        names = [name for name in MODES if name != "vanilla"]
        shown = names if head == heads[0] else ["exact", "turbo"]
        found += [DecodeMode(f"{name} ({head})", head, name) for name in shown]
    return found


def mode_rows(model: Any, lines: Sequence[SpokenLine], rounds: int, tick: Tick) -> list[Row]:
    """Measure decoding alone; a round says one sentence in every mode on one thread."""
    chosen = decode_modes([name for name in ("mctp", "mtp") if name in model.heads])
    counts = {mode.name: DecodeCounts() for mode in chosen}
    turn = dict.fromkeys((*counts, timing.AGAIN), 0)
    modes = {mode.name: mode for mode in chosen} | {timing.AGAIN: chosen[0]}

    def job(name: str) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            number = turn[name] % len(lines)
            turn[name] += 1
            start = time.process_time()
            stats, tokens = decode_line(model, lines[number], modes[name])
            spent = time.process_time() - start
            if name in counts:
                counts[name].add(number, stats, tokens)
            tick(name, sum(turn.values()), rounds * len(modes))
            return {"ms": 1e3 * spent / max(1, stats.tokens)}

        return run

    with timing.one_thread(), timing.frozen():
        for mode in modes.values():  # warm-up
            decode_line(model, lines[0], mode)
        times = timing.PairedTimes.of(
            timing.interleave({name: job(name) for name in modes}, rounds)
        )
    return [_mode_row(model, mode, times, counts) for mode in chosen]


def decode_line(model: Any, line: SpokenLine, mode: DecodeMode) -> tuple[Stats, list[int]]:
    """Decode a sentence; return its counts and its tokens."""
    layout = model.layout
    guide = SpeechGuide(layout, iter([layout.group(part) for part in groups(line.text)]))
    style = layout.style(line.voice.name, line.voice.rate, line.voice.pitch)
    head = None if mode.head is None else model.heads[mode.head]
    options: dict[str, Any] = dict(MODES[mode.mode])
    decoder = SingleDecoder(model.backbone, head, guide, **options)
    decoder.feed([layout.id("<speak>"), *style, *guide.opening()])
    said = [token for step in decoder for token in step.tokens]
    return decoder.stats, said


def _mode_row(
    model: Any, mode: DecodeMode, times: timing.PairedTimes, counts: dict[str, DecodeCounts]
) -> Row:
    mine, vanilla = counts[mode.name], counts[times.first]
    per_pass = mine.tokens / max(1, mine.passes)
    drafts = mine.drafts / max(1, mine.passes)
    share = 0.0 if mode.head is None else module_share(model, mode.head)
    ideal = per_pass / (1 + share * drafts) / (vanilla.tokens / max(1, vanilla.passes))
    speedup, ms = times.speedup(mode.name), median(times.times[mode.name])
    same = [vanilla.said.get(i) == said for i, said in mine.said.items()]
    way = {"job": mode.name, "head": mode.head, **way_of(mode.mode)}
    speed = {"score": speedup, "tokens_per_second": 1e3 / ms, "ms_per_token": ms}
    gain = {"speedup": speedup, "ideal": ideal, "of_ideal": speedup / ideal}
    shares = {"tokens_per_pass": per_pass, "drafts_per_pass": drafts, "module_share": share}
    books = {str(b): stood / max(1, n) for b, (n, stood) in sorted(mine.books.items())}
    found = {"acceptance": books, "identical": sum(same) / max(1, len(same)), "noise": times.noise}
    found |= {"n": len(times.times[mode.name]), "tokens": mine.tokens, "seed": MODES_SEED}
    found |= {"dtype": dtype_name(model.backbone.dtype), **timing.ON_ONE_THREAD}
    return {**way, **speed, **gain, **shares, **found}


def module_share(model: Any, head: str) -> float:
    """Return the weights a draft module reads, relative to a pass of the backbone."""
    entries = model.layout.total - model.layout.texts
    return draft_weights(model.heads[head], entries) / trunk_weights(model.backbone, entries)


def trunk_weights(backbone: Any, entries: int) -> int:
    """Count the weights a pass reads: layers, norm, and `entries` rows of the output head."""
    parts = (*backbone.layers, backbone.final_norm)
    own = sum(int(p.numel()) for part in parts for p in part.parameters())
    return own + entries * int(backbone.width)


def draft_weights(head: Any, entries: int) -> float:
    """Count the weights that one of its modules reads, on average."""
    alone = head.window == 1 and head.trunk.lean  # a position attends to itself: no queries, keys
    unread = ("q_proj", "k_proj") if alone else ()
    own = sum(
        p.numel()
        for name, p in head.named_parameters(remove_duplicate=False)
        if not name.startswith("outputs") and not any(part in name for part in unread)
    )
    return float(own / len(head.layers) + entries * head.trunk.width)


SENTENCES, SOUND_SEED = 20, 5
SOUND_MODES = ("turbo", "exact", "vanilla")


@benchmark("speech", "first-sound")
def first_sound(tick: Tick) -> list[Row]:
    """Measure the embedded model, on the default number of threads."""
    from mmfast.models.speech.embedded import load_speech

    asked = [say(each.text, each.voice).pcm for each in unseen_questions(SENTENCES, SOUND_SEED)]
    return sound_rows(load_speech(), unseen_lines(SENTENCES, SOUND_SEED), asked, tick)


def sound_rows(
    model: Any, lines: Sequence[SpokenLine], asked: Sequence[Any], tick: Tick
) -> list[Row]:
    """Time a `Speaker` and `Chatter` by the wall clock on texts and spoken questions `[n]`."""
    found, done, total = [], 0, len(SOUND_MODES) * (len(lines) + len(asked))
    with timing.frozen():
        for mode in SOUND_MODES:
            how: dict[str, Any] = dict(MODES[mode])
            jobs: dict[str, list[Callable[[], Iterable[Sound]]]] = {
                "say": [partial(model.speak, each.text, **how, **each.options) for each in lines],
                "reply": [partial(model.reply, pcm, RATE, **how) for pcm in asked],
            }
            for job, tries in jobs.items():
                if not tries:
                    continue
                sound_figures(tries[0]())  # warm-up
                figures = []
                for each in tries:
                    figures.append(sound_figures(each()))
                    done += 1
                    tick(f"{job}, {mode}", done, total)
                common = {"job": job, "mode": mode, "rate": model.sample_rate}
                found.append({**common, **_sound_row(figures)})
    return found


def sound_figures(pieces: Iterable[Sound]) -> Row:
    """Measure milliseconds to the first sound, seconds of sound, and passes before the first."""
    start, work = time.perf_counter(), time.process_time()
    first, early, passes, samples, rate, chunk, gaps, ahead = 0.0, 0.0, 0, 0, RATE, 0, 0.0, 0.0
    for piece in pieces:
        now = time.perf_counter() - start
        if not samples:
            passes += piece.passes
        if len(piece.pcm):
            if not samples:
                first, chunk, ahead = now, len(piece.pcm), now
                early = time.process_time() - work
            gaps += max(0.0, now - ahead)  # the loudspeaker was idle
            ahead = max(ahead, now) + len(piece.pcm) / piece.rate
            samples, rate = samples + len(piece.pcm), piece.rate
    total, worked = time.perf_counter() - start, time.process_time() - work
    seconds = samples / rate
    rtf, cpu_rtf = (each / seconds if seconds else 0.0 for each in (total, worked))
    row = {"first_ms": 1e3 * first, "first_cpu_ms": 1e3 * early, "passes": passes}
    row |= {"chunk_ms": 1e3 * chunk / rate, "gap_ms": 1e3 * gaps, "seconds": seconds}
    return row | {"rtf": rtf, "cpu_rtf": cpu_rtf}


def _sound_row(figures: Sequence[Row]) -> Row:
    columns = {name: [row[name] for row in figures] for name in figures[0]}
    medians = ("first_ms", "rtf", "first_cpu_ms", "cpu_rtf", "chunk_ms")
    shared = {"clock": "wall", "threads": torch.get_num_threads(), "device": "cpu"}
    row = {"score": median(columns["first_ms"])}
    row |= {"first_p95_ms": timing.quantile(columns["first_ms"], 0.95), "n": len(figures)}
    row |= {name: median(columns[name]) for name in medians}
    row |= {"passes_before": median(columns["passes"]), "gap_ms": max(columns["gap_ms"])}
    return row | {"seconds": sum(columns["seconds"]), "seed": SOUND_SEED, **shared}
