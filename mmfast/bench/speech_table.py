"""What a speech model says, hears and costs, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.bench.named_tables import Cells, Table, markdown, named_tables
from mmfast.bench.results import Row
from mmfast.bench.sections import NOT_MEASURED


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
    return named_tables(rows, "speech", _TABLES, ("job", "mode", "preset", "seed"))


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


_TABLES: dict[str, Table] = {
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
