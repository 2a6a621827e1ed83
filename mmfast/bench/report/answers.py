"""Files of `mmfast eval --data`: a page of HTML that needs no other file, and a CSV table."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from mmfast.bench.own_data import read_media
from mmfast.bench.report.charts import trade_svg
from mmfast.bench.results import Row
from mmfast.core.files import whole_file

_STYLE = (
    "body{font:15px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:left;vertical-align:"
    "top}tr{border-bottom:1px solid #ddd}table{border-collapse:collapse}.wrong{color:#b00020}"
    "#differ:checked~table tr.same{display:none}"
)
HEAD = ("reduce, cache", "accuracy", "95 % interval", "difference", "p", "kept", "ttft ms")
_FIELDS = ("line", "media", "question", "expected", "choices", "kind", "reduce", "cache")


def way_name(row: Mapping[str, Any]) -> str:
    """Name of a row of results: its spec and its KV policy."""
    return ", ".join(filter(None, (row["reduce"] or "all tokens", row["cache"])))


def write_csv(path: Path, document: Row, rows: Sequence[Row], folder: Path) -> None:
    """Write a line for each question and way; lists are joined by `|`."""
    with whole_file(path) as draft, draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(keys := (*_FIELDS, "answer", "right", "kept", "ttft_ms"))
        for row in rows:
            cells = (row[key] for key in keys)
            writer.writerow("|".join(cell) if isinstance(cell, list) else cell for cell in cells)


def write_html(path: Path, document: Row, rows: Sequence[Row], folder: Path) -> None:
    """Write table, charts and answers with pictures; `folder` is that of the questions."""
    found, asked = document["rows"], dict[int, list[Row]]()
    for row in rows:
        asked.setdefault(row["line"], []).append(row)
    images = []
    for key, across in _AXES.items():
        points = [(way_name(row), row[key], row["accuracy"], row["interval"]) for row in found]
        images.append(_image("svg+xml", trade_svg(points, across).encode()))
    failed = "".join(f"<li>{escape(each['error'])}" for each in document["failed"])
    title = f"{escape(document['model'])}: {len(asked)} questions"
    parts = [
        "<!DOCTYPE html><html lang=en><meta charset=utf-8>",
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1><table>",
        _line(HEAD, "th"),
        *(_line(map(escape, cells(row))) for row in found),
        "</table><p>difference: to the first row; = where McNemar's exact test gives p of 0.05 or ",
        f"more; its 95 % interval by bootstrap</p>{''.join(images)}<ul>{failed}</ul>",
        "<input type=checkbox id=differ><label for=differ>differing answers only</label><table>",
        _line(("line", "media", "question", "expected", *map(escape, map(way_name, found))), "th"),
        *(_asked(mine, folder) for mine in asked.values()),
    ]
    with whole_file(path) as draft:
        draft.write_text("\n".join([*parts, "</table></html>"]), encoding="utf-8")


_AXES = {"kept": "visual tokens kept", "ttft_ms": "milliseconds to the first token"}


def cells(row: Row) -> list[str]:
    """Figures of a way as texts, for the terminal and for the page."""
    low, high = row["interval"]
    shown = [way_name(row), f"{row['accuracy']:.3f}", f"{low:.3f} to {high:.3f}"]
    shown += ["", ""] if row["p"] is None else [difference(row), f"{row['p']:.3g}"]
    return [*shown, f"{row['kept']:.1f}", f"{row['ttft_ms']:.1f}"]


def difference(row: Row) -> str:
    """Difference to the first row, `=` where p is 0.05 or more, and its interval."""
    low, high = row["difference_interval"]
    shown = "=" if row["p"] >= 0.05 else f"{row['difference']:+.3f}"
    return f"{shown} ({low:+.3f} to {high:+.3f})"


def _asked(mine: Sequence[Row], folder: Path) -> str:
    files = [folder / file for file in mine[0]["media"]]
    shown = []
    for shot in read_media(files, 1):
        picture = Image.fromarray(shot.pixels if shot.kind == "image" else shot.pixels[0])
        picture.thumbnail((120, 120))
        picture.save(out := io.BytesIO(), "JPEG")
        shown.append(_image("jpeg", out.getvalue()))
    texts = (mine[0]["question"], " | ".join(mine[0]["expected"]))
    said = (f"<span class={'right' if r['right'] else 'wrong'}>{escape(r['answer'])}" for r in mine)
    differ = len({row["answer"] for row in mine}) > 1
    line = _line((str(mine[0]["line"]), "".join(shown), *map(escape, texts), *said))
    return line if differ else line.replace("<tr>", "<tr class=same>", 1)


def _image(kind: str, content: bytes) -> str:
    return f'<img alt="" src="data:image/{kind};base64,{base64.b64encode(content).decode()}">'


def _line(cells: Any, tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"
