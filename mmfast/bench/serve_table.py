"""What `mmfast bench --serve NAME` measured, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.bench.named_tables import Cells, Table, named_tables
from mmfast.bench.results import Row


def serve_load(rows: Sequence[Row]) -> list[str]:
    """A table per benchmark of `mmfast bench --serve`; of a job the latest row."""
    mine = [row for row in rows if row["bench"] in _TABLES]
    return named_tables(mine, "serve", _TABLES, _KEYS)


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
_TABLES: dict[str, Table] = {
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
