"""What watching a stream costs and saves, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.bench.report.named import Cells, Table, markdown, named_tables
from mmfast.bench.report.tables import NOT_MEASURED
from mmfast.bench.results import Row


def stream_cost(rows: Sequence[Row]) -> list[str]:
    """A table per benchmark of `mmfast bench --stream`; of a job the latest row."""
    return named_tables(rows, "stream", _TABLES, ("job", "preset", "knobs", "fps"))


def _timed(row: Row) -> Cells:
    what = f"`{row['job']}`" if row["method"] else row["job"]
    saved = f"{100 * row['saved']:.1f} %" if row["method"] else ""
    return (row["preset"], row["note"], what, f"{row['median_ms']:.0f}", saved)


def _quality(row: Row) -> Cells:
    knobs = ", ".join(f"{key}={value}" for key, value in row["knobs"].items())
    worst = (f"{row[key]:.4f}" for key in ("cosine", "cosine_worst_frame", "cosine_worst_token"))
    return (knobs, f"{row['fps']:g}", f"{100 * row['computed']:.0f} %", *worst)


def _reader(row: Row) -> Cells:
    wall, cpu = f"{row['speedup']:.2f}x", f"{row['cpu_speedup']:.2f}x"
    return (row["job"], f"{row['median_ms']:.0f}", wall, f"{row['cpu_median_ms']:.0f}", cpu)


def _bounded(row: Row) -> Cells:
    return (
        f"`{row['memory']}`, `{row['reduce']}`",
        f"{row['n']:,}",
        f"{row['held_mb']:.1f} ({100 * row['held_growth']:+.2f} %)",
        f"{row['resident_mb']:.0f} ({100 * row['growth']:+.2f} %)",
        f"{row['early_ms']:.1f}",
        f"{row['late_ms']:.1f} ({100 * row['slowdown']:+.1f} %)",
    )


_TABLES: dict[str, Table] = {
    "frame-cache": (
        "Encoder that recomputes a quarter of the patches",
        ("shape", "what", "", "ms a call", "saved"),
        _timed,
    ),
    "frame-cache-quality": (
        "Its features against the stock tower's, cosine, embedded clips",
        ("knobs", "frames/s", "patches computed", "mean", "worst frame", "worst token"),
        _quality,
    ),
    "prefill": (
        "Prefill of frames as they come",
        ("shape", "what", "", "ms", "saved"),
        _timed,
    ),
    "reader": (
        "Reading 60 s of 720p, GOP 250, at 1 frame/s, identical frames",
        ("reader", "ms", "faster", "processor ms", "less work"),
        _reader,
    ),
    "bounded": (
        "An endless stream; growth since frame 2,000, time per frame against frames 1,000 to 2,000",
        ("memory", "frames", "session MB", "process MB", "ms a frame, then", "ms a frame, last"),
        _bounded,
    ),
}


def stream_recall(rows: Sequence[Row]) -> list[str]:
    """A table a length of stream, the latest row of each memory."""
    if not rows:
        return [NOT_MEASURED]
    lines: list[str] = []
    for seconds in sorted({row["seconds"] for row in rows}):
        found = [row for row in rows if row["seconds"] == seconds]
        lines += ["", *_length(found)] if lines else _length(found)
    return lines


def _length(rows: Sequence[Row]) -> list[str]:
    latest = {(row["memory"] or "", row["reduce"] or ""): row for row in rows}
    bands = list(dict.fromkeys(band for row in latest.values() for band in row["by_age"]))
    head = ("memory", *bands, "all past the window", "of unbounded")
    last = rows[-1]
    lines = [
        f"Streams of {last['seconds'] / 60:.0f} minutes at {last['fps']:g} frame/s, window "
        f"{last['window']} frames; age of the fact in windows. Right answers in per cent, in "
        "brackets the 95 % interval.",
        "",
        f"| {' | '.join(head)} |",
        "|---|" + "---|" * (len(head) - 1),
    ]
    for (memory, reduce), row in latest.items():
        name = f"`{memory}`" if memory else "unbounded"
        name += f", `{reduce}`" if reduce else ""
        share = row["relative"]
        ages = [*(row["by_age"].get(band) for band in bands), row["past"]]
        cells = [_cell(age) for age in ages]
        last_cell = "" if share is None or not memory else f"{100 * share:.1f} %"
        lines.append(f"| {' | '.join([name, *cells, last_cell])} |")
    note = (
        f"{last['n']} questions about {last['streams']} unseen streams, seed {last['seed']}, model "
        f"`{last['model']}`, {last['date']}, commit `{last['commit'] or 'none'}`."
    )
    return [*lines, "", note]


def _cell(age: Row | None) -> str:
    if age is None:
        return NOT_MEASURED
    low, high = age["interval"]
    return f"{100 * age['accuracy']:.1f} ({100 * low:.0f} to {100 * high:.0f}, n {age['n']})"


def speech_words(rows: Sequence[Row]) -> list[str]:
    """Word errors of every mode, and what spoken questions are answered; of each the latest."""
    latest = {(row["task"], row["mode"]): row for row in rows}
    said = [row for (task, _), row in latest.items() if task == "speaking"]
    heard = [row for (task, _), row in latest.items() if task == "listening"]
    if not latest:
        return [NOT_MEASURED]
    lines = []
    if said:
        voices = list(said[0]["by_voice"])
        head = (
            "said by",
            "word errors, %",
            *(f"`{v}`" for v in voices),
            "tokens per pass",
            "codes",
        )
        lines += [*markdown(head, [_said(row, voices) for row in said]), ""]
    if heard:
        head = ("questions about clips", "right, %", "of typed, %", "word errors, %")
        lines += [*markdown(head, [_heard(row) for row in heard]), ""]
    last = rows[-1]
    return [
        *lines,
        f"{last['n']} unseen sentences and {last['n']} unseen questions, seed {last['seed']}, "
        f"model `{last['model']}`, in brackets 95 % intervals, {last['date']}, commit "
        f"`{last['commit'] or 'none'}`.",
    ]


def _said(row: Row, voices: Sequence[str]) -> Cells:
    name = {"recordings": "espeak-ng itself", "codec": "the codec alone"}.get(row["mode"], "")
    many = f"{row['tokens_per_pass']:.2f}" if "tokens_per_pass" in row else ""
    alike = "" if row.get("identical") is None else f"{100 * row['identical']:.0f} % as vanilla"
    each = [f"{100 * row['by_voice'][v]:.1f}" if v in row["by_voice"] else "" for v in voices]
    return (name or f"`{row['mode']}`", _interval(row["wer"], row), *each, many, alike)


def _heard(row: Row) -> Cells:
    relative, errors = row.get("relative"), row.get("wer")
    shares = ("" if value is None else f"{100 * value:.1f}" for value in (relative, errors))
    return (row["mode"], _interval(row["accuracy"], row), *shares)


def _interval(value: float, row: Row) -> str:
    low, high = row["interval"]
    return f"{100 * value:.1f} ({100 * low:.0f} to {100 * high:.0f})"


def speech_cost(rows: Sequence[Row]) -> list[str]:
    """A table per benchmark of `mmfast bench --speech`; of a job the latest row."""
    return named_tables(rows, "speech", _SPEECH_TABLES, ("job", "mode", "preset", "seed"))


def _codec(row: Row) -> Cells:
    if "pesq" not in row:
        return (row["job"], _interval(row["wer"], row), *[""] * 5)
    sound = (f"{row['pesq']:.2f}", f"{row['stoi']:.3f}", f"{row['mel_db']:.1f} dB")
    pace = f"{row['encode_rtf']:.3f} and {row['decode_rtf']:.3f}"
    bits = f"{row['bits_per_second']} bit/s"
    return (f"{row['job']}, {bits}", _interval(row["wer"], row), *sound, pace, f"{row['n']}")


def _mode(row: Row) -> Cells:
    books = ", ".join(f"{100 * share:.0f} %" for share in row["acceptance"].values())
    return (
        row["job"],
        f"{row['tokens_per_second']:.0f}",
        f"{row['speedup']:.2f}x",
        f"{row['ideal']:.2f}x",
        f"{row['tokens_per_pass']:.2f}",
        f"{row['drafts_per_pass']:.2f}",
        books,
        f"{100 * row['identical']:.0f} %",
    )


def _shape(row: Row) -> Cells:
    module = f"{100 * row['module_cost']:.1f} %" if row["module_cost"] else ""
    return (
        f"{row['preset']}, {row['dtype']}",
        f"`{row['job']}`",
        f"{row['ms_per_token']:.0f}",
        f"{row['main_ms']:.0f}",
        module,
        f"{row['speedup']:.2f}x",
        f"{row['ideal']:.2f}x",
        f"{row['of_ideal']:.2f}",
        f"{row['wide_ms'] / row['pass_ms']:.2f}",
        f"{row['ideal_here']:.2f}x",
        f"{row['of_ideal_here']:.2f}",
    )


def _drafts(row: Row) -> Cells:
    books = ", ".join(f"{100 * share:.0f} %" for share in row["acceptance"])
    alike = "" if row["identical"] is None else f"{100 * row['identical']:.0f} %"
    passes = f"{row['passes_per_frame']:.2f}"
    return (row["job"], row["mode"], str(row["codebooks"]), passes, books, alike, str(row["n"]))


def _depth(row: Row) -> Cells:
    faster = f"{row['score']:.2f}x"
    passes = str(row["passes_per_frame"])
    return (row["job"], str(row["codebooks"]), passes, f"{row['median_ms']:.0f}", faster)


def _first(row: Row) -> Cells:
    return (
        row["job"],
        f"`{row['mode']}`",
        f"{row['first_ms']:.0f} ({row['first_p95_ms']:.0f})",
        f"{row['first_cpu_ms']:.0f}",
        f"{row['chunk_ms']:.0f}",
        f"{row['passes_before']:.0f}",
        f"{row['rtf']:.2f} ({row['cpu_rtf']:.2f})",
        f"{row['gap_ms']:.0f}",
    )


def _soak(row: Row) -> Cells:
    return (
        f"{row['seconds'] / 60:.0f}",
        f"{row['turns']:,}",
        f"{row['interrupted']:,}",
        f"{row['checks']:,}",
        str(row["faults"]),
        f"{row['rss_mb']:.0f} ({row['growth_mb']:+.1f})",
    )


_SPEECH_TABLES: dict[str, Table] = {
    "codec": (
        "The embedded codec; medians, real-time factors of both ways",
        ("sound", "word errors, %", "PESQ", "STOI", "log-mel", "encode, decode", "sentences"),
        _codec,
    ),
    "modes": (
        "Audio tokens per second; ideal is by the weights read, acceptance per codebook",
        (
            *("mode (head)", "tokens/s", "faster", "ideal", "tokens per pass", "drafts per pass"),
            *("accepted", "as vanilla"),
        ),
        _mode,
    ),
    "shape": (
        "Drafting on the shape of a 7-billion model, random weights; ideal by the weights read",
        (
            "shape",
            "mode",
            "ms a token",
            "ms a pass",
            "module",
            "faster",
            "ideal",
            "of ideal",
            "11 tokens at once, in passes",
            "ideal with that",
            "of that",
        ),
        _shape,
    ),
    "depth-drafts": (
        "Codes of a frame drafted at once and checked in depth passes; a small trained model",
        (
            "drafter",
            "choice",
            "codebooks",
            "passes a frame",
            "accepted",
            "as code by code",
            "frames",
        ),
        _drafts,
    ),
    "depth-shape": (
        "The same on the depth decoder of CSM, random weights",
        ("way", "codes", "passes", "ms a frame", "faster than code by code"),
        _depth,
    ),
    "first-sound": (
        "From the end of a spoken question, or from a text, to sound; median and 95th percentile",
        (
            *("what", "mode", "first sound, ms", "processor ms", "its length, ms", "passes"),
            *("real time (processor)", "gaps, ms"),
        ),
        _first,
    ),
    "soak": (
        "Conversation with random interruptions: text heard against sound played",
        ("minutes", "turns", "interrupted", "checks", "faults", "MB (growth)"),
        _soak,
    ),
}


def serve_load(rows: Sequence[Row]) -> list[str]:
    """A table per benchmark of `mmfast bench --serve`; of a job the latest row."""
    mine = [row for row in rows if row["bench"] in _SERVE_TABLES]
    return named_tables(mine, "serve", _SERVE_TABLES, _KEYS)


def _load(row: Row) -> Cells:
    if "lost" in row:
        ends = f"{row['answered']} answered, {row['busy']} told to come back, {row['lost']} lost"
        return (f"{row['job']}: {ends}", "", "", "")
    gap = f"{row['gap_chunks']:.2f} ({row['cpu_gap_chunks']:.2f})" if "gap_ms" in row else ""
    speed = f"{row['speedup']:.2f}x ({row['cpu_speedup']:.2f}x)"
    return (row["job"], f"{row['tokens_per_s']:.0f}", speed, gap)


def _fairness(row: Row) -> Cells:
    if "places" in row:
        places = ", ".join(map(str, row["places"]))
        return (f"{row['job']}: who asked last is answered as {places} of {row['of']}", "", "", "")
    wall, cpu = f"{row['gap_ms']:.0f}", f"{row['cpu_gap_ms']:.0f}"
    return (row["job"], wall, cpu, f"{row['gap_chunks']:.2f} ({row['cpu_gap_chunks']:.2f})")


_BUSY = 2.0  # work a core: beyond it the clock says more of others than of the server


def _bombs(row: Row) -> Cells:
    sent = f"{row['sent_bytes']:,}" if row["sent_bytes"] else "without end"
    clock = f"{row['ms']:.0f}" + (" after its time" if row["allowed_ms"] else "")
    clock += f" (load {row['load']:.0f})" if row["load"] > _BUSY else ""
    where = " ".join(f"`{word}`" if "/" in word else word for word in row["job"].split())
    return (where, sent, f"{row['status']}", clock, f"{row['cpu_ms']}", f"{row['mb']:.0f}")


def _start(row: Row) -> Cells:
    return (row["job"], f"{row['answer_s']:.1f}", f"{row['worst_s']:.1f}", f"{row['cpu_s']:.1f}")


def _realtime(row: Row) -> Cells:
    name = "first_audio" if row["job"] == "reply" else "barge_in"
    what = "end of a question to first sound" if row["job"] == "reply" else "barge-in to silence"
    return (what, f"{row['sessions']}", f"{row[f'{name}_ms']:.0f}", f"{row[f'{name}_p95_ms']:.0f}")


def _faults(row: Row) -> Cells:
    counts = [f"{row[name]}" for name in ("replicas", "streams", "lost", "wrongly_lost")]
    clock = (f"{row['seconds_to_answer']:.1f}", f"{row['seconds_to_recover']:.1f}")
    return (row["engine"], row["role"], *counts, *clock)


def _batch(row: Row) -> Cells:
    return (
        row["job"],
        f"{row['clips_per_s']:.1f}",
        f"{row['speedup']:.2f}x",
        f"{row['start_s']:.0f}",
    )


_KEYS = ("bench", "job", "sessions", "engine", "role")
_SERVE_TABLES: dict[str, Table] = {
    "load": (
        "Chats about an image, 32 tokens each; in brackets by processor time",
        ("chats", "tokens/s", "faster", "longest gap in chunks of prefill"),
        _load,
    ),
    "fairness": (
        "Longest gap in a running answer when a prompt comes; in brackets by processor time",
        ("beside it", "ms", "processor ms", "in chunks of prefill"),
        _fairness,
    ),
    "start": (
        "Seconds from `mmfast serve` to the first answer",
        ("question", "median", "worst", "processor time"),
        _start,
    ),
    "realtime": (
        "Milliseconds on the Realtime socket",
        ("from and to", "sessions", "median", "p95"),
        _realtime,
    ),
    "faults": (
        "A worker of each role killed under load: its streams end, the rest complete",
        (
            *("engine", "killed", "replicas", "streams", "lost on it", "lost elsewhere"),
            *("s to an answer", "s to all workers"),
        ),
        _faults,
    ),
    "batch": (
        "Clips a second of `mmfast batch`",
        ("engine", "clips/s", "faster", "s to the first"),
        _batch,
    ),
    "bombs": (
        "What is sent to do harm: answer, time, memory of the server and all its processes",
        ("what", "bytes sent", "status", "ms", "processor ms", "MB more"),
        _bombs,
    ),
}
