"""Every table by the name of its marker, and the text between markers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mmfast.bench.report import accuracy, catalogue, named, speed
from mmfast.bench.report.table import EMPTY, ReportTable
from mmfast.bench.results import Row, load
from mmfast.core.errors import MmfastError, unknown

TABLES: dict[str, tuple[ReportTable, ...]] = {
    **catalogue.TABLES,
    **accuracy.TABLES,
    **named.TABLES,
    **speed.TABLES,
}
_MARKER = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table:\2 -->)", re.DOTALL)


def write_table(name: str, rows: Sequence[Row]) -> list[str]:
    """Lines of Markdown of a table; a MmfastError names the choices and the nearest."""
    if name not in TABLES:
        raise MmfastError(unknown("table", name, TABLES))
    parts = [table.markdown(rows) for table in TABLES[name]]
    measured = [part for part in parts if part != EMPTY] or [EMPTY]
    return [line for part in measured for line in ("", *part)][1:]


def read_rows(folder: Path, suite: str) -> list[Row]:
    """Rows of all files `SUITE*.jsonl` of a folder by file name; suites are parted by a blank."""
    files = [file for each in suite.split() for file in sorted(folder.glob(f"{each}*.jsonl"))]
    return [row for file in files for row in load(file)]


def render(text: str, folder: Path) -> str:
    """`text` with everything between its table markers written anew from rows in `folder`."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        rows = read_rows(folder, TABLES[name][0].source) if name in TABLES else []
        body = "\n".join(write_table(name, rows))
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return _MARKER.sub(fill, text)
