"""Markdown tables of what `mmfast bench --stream NAME` and `--speech NAME` measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mmfast.bench.report.tables import NOT_MEASURED
from mmfast.bench.results import Row

Cells = Sequence[str]
Table = tuple[str, Cells, Callable[[Row], Cells]]  # title, head, cells of a row


def named_tables(
    rows: Sequence[Row], flag: str, tables: Mapping[str, Table], keys: Sequence[str]
) -> list[str]:
    """A table per benchmark of `mmfast bench --FLAG`; of rows with the same `keys` the latest."""
    lines: list[str] = []
    for name, (title, head, cells) in tables.items():
        mine = [row for row in rows if row["bench"] == name]
        found = list({str([row.get(key) for key in keys]): row for row in mine}.values())
        lines += ["", f"**{title}** (`--{flag} {name}`): {_basis(found)}", ""]
        if found:
            lines += markdown(head, [cells(row) for row in found])
    return lines[1:]


def markdown(head: Cells, rows: Sequence[Cells]) -> list[str]:
    """The lines of a table."""
    lines = [f"| {' | '.join(head)} |", "|---|" + "---|" * (len(head) - 1)]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def _basis(rows: Sequence[Row]) -> str:
    if not rows:
        return NOT_MEASURED
    row = rows[-1]
    clock = f", {row['clock']}" if "clock" in row else ""
    threads = f", {row['threads']} threads" if row.get("threads", 1) > 1 else ""
    noise = f", noise {100 * row['noise']:.1f} %" if "noise" in row else ""
    where = f"{row['processor']}{clock}{threads}{noise}"
    return f"{where}, {row['date']}, commit `{row['commit'] or 'none'}`."
