"""The method x family matrix of the README, from what the tests ran.

`pytest -m matrix --matrix-out assets/results/matrix.jsonl` writes the rows: one per method, site,
family and kind of media, with the reason where the pair cannot work.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.bench.results import Row
from mmfast.core.registry import methods

Note = tuple[str, str]  # site, unless it is the method's default; reason


def matrix(rows: Sequence[Row]) -> list[str]:
    """Methods as rows, families as columns; a tick is a pair that ran at all its sites.

    A number beside a tick is a site or kind of media that cannot work, a number alone stands where
    nothing can.
    """
    if not rows:
        return ["Method x family matrix: not run."]
    families = sorted({str(row["family"]) for row in rows})
    notes: dict[Note, int] = {}
    ran = sum(not row["reason"] for row in rows)
    lines = [
        f"{ran} of {len(rows)} cells (method, site, family, kind of media) run.",
        "",
        "| | " + " | ".join(f"`{family}`" for family in families) + " |",
        "|---|" + ":-:|" * len(families),
    ]
    for method in methods("reducer"):
        cells = []
        for family in families:
            mine = [r for r in rows if (r["method"], r["family"]) == (method.name, family)]
            cells.append(_cell(mine, method.sites[0], notes))
        lines.append(f"| `{method.name}` | " + " | ".join(cells) + " |")
    lines.append("")
    for (site, reason), number in notes.items():
        where = f"at `{site}`: " if site else ""
        lines.append(f"<sup>{number}</sup> {where}{reason}.<br>")
    return lines


def _cell(rows: Sequence[Row], default: str, notes: dict[Note, int]) -> str:
    if not rows:
        return "not run"
    found = {
        ("" if row["site"] == default else str(row["site"]), str(row["reason"]))
        for row in rows
        if row["reason"]
    }
    numbers = [notes.setdefault(note, len(notes) + 1) for note in sorted(found)]
    tick = "✓" if any(not row["reason"] for row in rows) else ""
    return tick + (f"<sup>{','.join(map(str, sorted(numbers)))}</sup>" if numbers else "")
