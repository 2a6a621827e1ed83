"""Comparisons by speed: of rows in two files, and of answers with all tokens and with a spec."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from mmfast.bench import timing
from mmfast.bench.results import Row
from mmfast.core.errors import MmfastError

# A row is identified by these, by every other text except those of `_NO_NAMES`, and by the numbers
# of `_NUMBERS`. All other numbers are measurements.
_FIRST = ("suite", "bench", "preset", "model", "case", "job", "stage", "method", "reduce", "cache")
_NUMBERS = (
    *("layers", "frames", "batch", "context", "chats", "sessions", "workers", "replicas", "fps"),
    *("every", "d", "budget", "seed", "heads", "kv_heads", "width", "length", "k", "window"),
    *("size", "codebooks", "keep", "copies", "visual", "items", "segments", "steps", "threads"),
)
_NO_NAMES = {"commit", "date", "processor", "clock", "note", "reason", "detail"}
# Two suites count tokens in `n`, where others count runs; in the rest of these `tokens` is a size.
_SIZES = dict.fromkeys(("selection", "kernels"), "n") | dict.fromkeys(
    ("bench", "breakeven", "encoder"), "tokens"
)
# The first of these in a row is compared; True where more is better.
METRICS = (
    *(("median_ms", False), ("step_ms", False), ("compiled_ms", False), ("ms", False)),
    *(("tokens_per_s", True), ("tokens_per_second", True)),
    *(("ms_per_token", False), ("clips_per_s", True), ("first_ms", False)),
    *(("first_audio_ms", False), ("gap_ms", False), ("worst_s", False), ("cpu_s", False)),
    *(("early_ms", False), ("encode_rtf", False), ("rtf", False), ("seconds", False)),
)
DEFAULT_NOISE = 0.05  # of rows without a noise floor


@dataclass(frozen=True)
class Pair:
    """One row of both files."""

    name: str  # label of the row
    metric: str  # field that is compared
    old: float  # its value in the first file
    new: float  # its value in the second file
    slowdown: float  # 0.1 takes a tenth longer, -0.1 a tenth less
    noise: float  # smaller differences are insignificant
    notes: tuple[str, ...] = ()  # processors and versions that differ

    @property
    def verdict(self) -> str:
        """`=` within noise, else `slower` or `faster`."""
        if abs(self.slowdown) <= self.noise:
            return "="
        return "slower" if self.slowdown > 0 else "faster"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON document."""
        document = asdict(self) | {"verdict": self.verdict, "notes": list(self.notes)}
        return {**document, "ratio": self.new / self.old}


@dataclass(frozen=True)
class Comparison:
    """Pairs in the order of the first file, and rows of only one file."""

    pairs: tuple[Pair, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Pair, ...]:
        """Pairs that are slower beyond noise."""
        return tuple(pair for pair in self.pairs if pair.verdict == "slower")

    @property
    def notes(self) -> tuple[str, ...]:
        """Processors and versions that differ, each once."""
        return tuple(dict.fromkeys(note for pair in self.pairs for note in pair.notes))

    def beyond(self, percent: float) -> tuple[Pair, ...]:
        """Return regressions by more than `percent` per cent."""
        return tuple(p for p in self.regressions if 100 * p.slowdown > percent)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON document."""
        rows = [pair.to_dict() for pair in self.pairs]
        alone = {"only_old": list(self.only_old), "only_new": list(self.only_new)}
        regressions = [pair.name for pair in self.regressions]
        return {"rows": rows, "regressions": regressions, **alone, "notes": list(self.notes)}


def compare(old: Sequence[Row], new: Sequence[Row]) -> Comparison:
    """Match rows by identity; of equal ones in a file the latest counts."""
    before, after = _by_identity(old), _by_identity(new)
    if not before or not after:
        which = "first" if not before else "second"
        raise MmfastError(
            f"the {which} file has no row with a speed; give files that --out of mmfast bench wrote"
        )
    pairs = [_pair(key, before[key], after[key]) for key in before if key in after]
    return Comparison(
        tuple(pair for pair in pairs if pair is not None),
        tuple(_label(before[key]) for key in before if key not in after),
        tuple(_label(after[key]) for key in after if key not in before),
    )


def identity(row: Row) -> str:
    """Return names and sizes of a row, without its figures, machine or versions."""
    # Older rows have fewer fields: null and absent are the same.
    return json.dumps(_named(row), sort_keys=True)


def _named(row: Row) -> Row:
    texts = [k for k, v in row.items() if isinstance(v, str) and k not in {*_FIRST, *_NO_NAMES}]
    keys = [*_FIRST, *texts, *_NUMBERS, _SIZES.get(str(row.get("suite")), "suite")]
    found = {key: row[key] for key in dict.fromkeys(keys) if row.get(key) is not None}
    return found | ({"knobs": row["knobs"]} if row.get("knobs") else {})


def _by_identity(rows: Sequence[Row]) -> dict[str, Row]:
    return {identity(row): row for row in rows if _metric(row) is not None}


def _metric(row: Row) -> tuple[str, bool] | None:
    for name, more in METRICS:
        value = row.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return name, more
    return None


def _pair(key: str, old: Row, new: Row) -> Pair | None:
    found = _metric(old)
    if found is None or not isinstance(new.get(found[0]), (int, float)) or new[found[0]] <= 0:
        return None
    name, more = found
    before, after = float(old[name]), float(new[name])
    slowdown = (before / after if more else after / before) - 1.0
    floors = [row["noise"] for row in (old, new) if isinstance(row.get("noise"), (int, float))]
    noise = float(max(floors, default=DEFAULT_NOISE))
    return Pair(_label(new), name, before, after, slowdown, noise, _notes(old, new))


def _notes(old: Row, new: Row) -> tuple[str, ...]:
    pairs = [(key, old.get(key), new.get(key)) for key in ("processor", "clock")]
    before, after = (dict(row.get("versions") or {}) for row in (old, new))
    pairs += [(key, before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])]
    stated = [(k, *("not stated" if v is None else v for v in both)) for k, *both in pairs]
    return tuple(f"{key}: {a} and {b}" for key, a, b in stated if a != b)


def _label(row: Row) -> str:
    named = _named(row)
    left_out = {"suite", "seed", "knobs", "method" if "reduce" in row else ""}
    if "case" in row:  # it holds these
        left_out |= {"method", "d", "budget", "n"}
    words = [
        value if isinstance(value, str) else f"{key} {value}"
        for key, value in named.items()
        if key not in left_out
    ]
    if row.get("suite") == "bench" and row.get("reduce") is None:
        words.insert(1, "stock")
    return ", ".join(words)


ROUNDS, SECONDS = 15, 10.0  # of answers: most rounds, and the time after which no other begins


def compare_answers(
    stock: Any, other: Any, media: Any, question: str, tick: Callable[[int, int], None]
) -> dict[str, Any]:
    """Ask two pipelines in turn about one medium: `mmfast ask --compare`.

    `stock` keeps all tokens. The rows are those of `time_answers`.
    """
    answers, rows = time_answers({"all": stock, "spec": other}, media, question, tick)
    texts = {name: answer.text for name, answer in answers.items()}
    tokens = {"visual_tokens": answers["all"].visual_tokens}
    tokens |= {"kept_tokens": answers["spec"].kept_tokens}
    agree = texts["all"] == texts["spec"]
    return {"question": question, "answers": texts, "agree": agree, **tokens, "rows": rows}


def time_answers(
    pipes: Mapping[str, Any],
    media: Any,
    question: str,
    tick: Callable[[int, int], None] = lambda done, total: None,
    *,
    rounds: int | None = None,
    seconds: float | None = None,
    warm: bool = True,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Ask pipelines in turn about one medium, and compare their times with those of the first.

    Args:
        pipes: Pipelines by name; the first runs twice a round, which gives the noise.
        media: A clip or image.
        question: A question.
        tick: Called with (timed answers, most of them); what it raises ends the work.
        rounds: Most rounds; 15 if absent. There are at least three.
        seconds: Time after which no further round begins; 10 if absent.
        warm: Warm each pipeline up for some seconds; else it answers once before it is timed.

    Returns:
        The answers by name, and a row by stage and further pipeline, its `job`: medians `all_ms`
        of the first and `median_ms` in milliseconds, the median of paired ratios `speedup`, and
        `equal`, a difference within the `noise`. Prefill includes choosing and evicting, and
        decode is the time of one token.
    """
    most = (rounds or ROUNDS) * (len(pipes) + 1)
    answers, samples = dict[str, Any](), list[timing.Sample]()
    for name, pipe in pipes.items():
        tick(0, most)
        answers[name] = pipe(media, question)
    stock = next(iter(pipes.values()))
    for pipe in pipes.values() if warm else ():
        timing.warm_up(partial(pipe, media, question))

    def run(pipe: Any) -> timing.Sample:
        samples.append(_stages(pipe(media, question)))
        tick(len(samples), most)
        return samples[-1]

    jobs = {name: partial(run, pipe) for name, pipe in {**pipes, timing.AGAIN: stock}.items()}
    start, patience = time.perf_counter(), SECONDS if seconds is None else seconds
    with timing.frozen():
        late = lambda: time.perf_counter() - start > patience
        found = timing.interleave(jobs, rounds or ROUNDS, enough=late)
    return answers, [_compared(found, stage, job) for stage in samples[0] for job in [*pipes][1:]]


def _compared(found: Mapping[str, list[timing.Sample]], stage: str, job: str) -> dict[str, Any]:
    times = timing.PairedTimes.of(found, stage)
    row, stock_ms = times.row(job), times.row(times.first)["median_ms"]
    equal = abs(row["speedup"] - 1) <= row["noise"]
    return {"stage": stage, "all_ms": stock_ms, **row, "equal": equal}


def _stages(answer: Any) -> timing.Sample:
    ms: Counter[str] = Counter()
    for row in answer.trace.rows:
        ms[row.stage] += row.ms
    made = sum(row.tokens_out for row in answer.trace.rows if row.stage == "generate")
    found = {"read": ms["read"] + ms["preprocess"], "encode": ms["encode"]}
    found["prefill"] = answer.ttft_ms - sum(found.values()) - ms["plan"]
    found["decode"] = ms["generate"] / max(1, made - 1)
    return found | {"first token": answer.ttft_ms, "answer": answer.ttft_ms + ms["generate"]}
