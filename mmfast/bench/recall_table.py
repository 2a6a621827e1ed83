"""What memories of a session answer, by age of the fact, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.bench.results import Row
from mmfast.bench.sections import NOT_MEASURED


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
