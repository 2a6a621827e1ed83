"""Break-even as Markdown: speed-up by tokens and by answers at once, and where it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmfast.bench.report.named import markdown
from mmfast.bench.report.speed import STAGE_NAMES
from mmfast.bench.report.tables import NOT_MEASURED
from mmfast.bench.results import Row

_GROUP = ("preset", "processor", "dtype", "threads", "bench")
_POINT = (*_GROUP, "stage", "reduce", "tokens", "batch")


def break_even(rows: Sequence[Row]) -> list[str]:
    """A table per shape and per what is varied; of equal rows the latest."""
    if not rows:
        return [f"Break-even: {NOT_MEASURED}."]
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in {tuple(row[key] for key in _POINT): row for row in rows}.values():
        groups.setdefault(tuple(row[key] for key in _GROUP), []).append(row)
    lines: list[str] = []
    for group in groups.values():
        lines += ["", _title(group), "", *_curves(group)]
    return lines[1:]


def _title(rows: Sequence[Row]) -> str:
    one = rows[-1]
    tokens = f"{one['tokens']:,} visual tokens each"
    what = "visual tokens" if one["bench"] == "tokens" else f"answers at once, {tokens}"
    where = one["processor"] + (f", {one['threads']} threads" if one["device"] == "cpu" else "")
    noise = f"noise up to {100 * max(row['noise'] for row in rows):.1f} %"
    return (
        f"**{one['preset']}, by {what}**: {where}, {one['clock']}, {one['dtype']}, {noise}, "
        f"{one['date']}, commit `{one['commit'] or 'none'}`."
    )


def _curves(rows: Sequence[Row]) -> list[str]:
    by = rows[0]["bench"]
    counts = sorted({int(row[by]) for row in rows})
    curves: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        curves.setdefault((row["stage"], row["reduce"]), {})[int(row[by])] = row
    lines = [
        [STAGE_NAMES[stage], f"`{text}`", *(_gain(found.get(n)) for n in counts), _from(found)]
        for (stage, text), found in sorted(curves.items(), key=lambda each: each[0][0] != "llm")
    ]
    return markdown(("", "reduce", *(f"{n:,}" for n in counts), "pays from"), lines)


def _gain(row: Row | None) -> str:
    if row is None:
        return NOT_MEASURED
    return "=" if row["pays"] is None else f"{row['speedup']:.2f}x"


def _from(found: Mapping[int, Row]) -> str:
    """The smallest count from which on every measured one pays."""
    first = None
    for count in sorted(found, reverse=True):
        if found[count]["pays"] is not True:
            break
        first = count
    return "nowhere here" if first is None else f"{first:,}"
