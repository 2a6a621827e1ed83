"""The one writer of Markdown tables: a table is declared as columns over rows of results.

Columns are written as ``"head: cell | head: cell"``. A cell is a format string over the fields of
a row, such as ``{median_ms:.1f} ms``. It is empty where a field is missing or None; ``[flag]`` in
front of it empties it where that field of the row is missing or false; ``first or second`` takes
the first cell that is not empty. Derived fields (`DERIVED`) may be used like those of the row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmfast.bench.results import Row

NOT_MEASURED = "not measured"
EMPTY = ["Not measured."]  # a table without rows
Rows = Sequence[Row]
Cell = str | Callable[[Row], str]
Columns = Mapping[str, Cell]
DERIVED: dict[str, Callable[[Row], Any]] = {"not_measured": lambda row: NOT_MEASURED}


class _Fields(dict[str, Any]):
    """Derived fields, then those of a row; None counts as missing."""

    def __getitem__(self, key: str) -> Any:
        value = DERIVED[key](self) if key in DERIVED else super().__getitem__(key)
        if value is None:
            raise KeyError(key)
        return value


def fill(cell: Cell, row: Row) -> str:
    """Text of a cell for one row; a percent sign is set apart from its number."""
    if callable(cell):
        return cell(row)
    for choice in cell.split(" or "):
        flag, text = re.fullmatch(r"(?:\[(\w+)\])?(.*)", choice).groups()  # type: ignore[union-attr]
        try:
            if not flag or row.get(flag):
                return re.sub(r"(?<=\d)%", " %", text.format_map(_Fields(row)))
        except KeyError:
            continue
    return ""


def score(row: Row, key: str = "score", digits: int = 1) -> str:
    """A share in per cent, with its 95 % interval in brackets where the row has one."""
    bounds = [f"{100 * bound:.{digits}f}" for bound in row.get("interval") or ()]
    return f"{100 * row[key]:.1f}" + (f" ({' to '.join(bounds)})" if bounds else "")


def pivot(rows: Rows, line: Cell, column: Callable[[Row], Any]) -> list[Row]:
    """Rows gathered into lines: `name`, and under `at` the latest row of each column."""
    found: dict[str, dict[Any, Row]] = {}
    for row in rows:
        found.setdefault(fill(line, row), {})[column(row)] = row
    return [{"name": name, "at": by} for name, by in found.items()]


def at(column: Any, cell: Cell = score) -> Cell:
    """The cell of a pivoted line under a column."""
    return lambda line: fill(cell, line["at"][column]) if column in line["at"] else NOT_MEASURED


def stamp(*rows: Row) -> str:
    """Dates and commits of measurements: all commits up to three, else the first and the last."""
    dates = sorted({row["date"] for row in rows})
    commits = list(dict.fromkeys(f"`{row['commit'] or 'none'}`" for row in rows))
    shown = ", ".join(commits) if len(commits) <= 3 else f"{commits[0]} to {commits[-1]}"
    span = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"{span}, commit{'s' if len(commits) > 1 else ''} {shown}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    cells = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(row)} |" for row in cells),
    ]


def _nothing(rows: Rows) -> str:
    return ""


@dataclass(frozen=True)
class ReportTable:
    """A table declared as data.

    Rows come from the files `SUITE*.jsonl` of the suites in `source` (parted by blanks), of one
    benchmark alone with `bench`; of those that agree in `keys` only the latest counts, () takes
    all. `columns` are `"head: cell | …"`, cells by head, or a function from the rows to cells by
    head. `split` makes a table for each combination of these fields. `lines` has one mapping a
    line, made from the rows of the table; `spare` columns are left out where no line fills them.
    `before` stands above a table without rows only if it is `titled`.
    """

    source: str
    columns: str | Columns | Callable[[Rows], str | Columns]
    bench: str = ""
    keys: Sequence[str] = ()
    split: Sequence[str] = ()
    lines: Callable[[Rows], Rows] = lambda rows: rows
    before: Callable[[Rows], str] = _nothing
    after: Callable[[Rows], str] = _nothing
    spare: bool = False
    titled: bool = False

    def markdown(self, rows: Rows) -> list[str]:
        """Lines of Markdown, "not measured" where there is nothing to show."""
        mine = [row for row in rows if not self.bench or row.get("bench") == self.bench]
        if self.keys:
            mine = list({str([row.get(key) for key in self.keys]): row for row in mine}.values())
        groups: dict[str, list[Row]] = {} if self.split else {"": mine}
        for row in mine if self.split else ():
            groups.setdefault(str([row.get(key) for key in self.split]), []).append(row)
        return [line for group in groups.values() or ([],) for line in self._one(group)][:-1]

    def _one(self, rows: Rows) -> list[str]:
        lines, columns = self.lines(rows), self._columns(rows)
        cells = [[fill(cell, line) for cell in columns.values()] for line in lines]
        used = [n for n in range(len(columns)) if not self.spare or any(row[n] for row in cells)]
        head = [list(columns)[n] for n in used]
        above = self.before(rows) if rows or lines or self.titled else ""
        parts = [[above]] if above else []
        if lines:
            parts.append(markdown(head, [[row[n] for n in used] for row in cells]))
        elif not above:
            parts.append(EMPTY)
        if rows and (below := self.after(rows)):
            parts.append(below.splitlines())
        return [line for part in parts for line in (*part, "")]

    def _columns(self, rows: Rows) -> Columns:
        columns = self.columns(rows) if callable(self.columns) else self.columns
        if isinstance(columns, str):
            pairs = [column.split(": ", 1) for column in columns.split(" | ")]
            found = {head.strip(): cell for head, cell in pairs}
            if len(found) < len(pairs):  # the latter would stand under the name of the former
                raise ValueError(f"two columns of one head: {columns}")
            return found
        return columns
