"""The page of the leaderboard: one HTML file that needs no other file and no network."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mmfast.bench.leaderboard.grid import STOCK
from mmfast.bench.leaderboard.standing import ABILITIES, COSTS, LOSS
from mmfast.bench.report.table import NOT_MEASURED
from mmfast.bench.results import Row
from mmfast.core.errors import MmfastError
from mmfast.core.files import whole_file

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--front:#b3261e;--dot:#5b7db1}
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:110em;padding:0 1em}
table{border-collapse:collapse;display:block;overflow-x:auto;font-size:13px}
td,th{padding:.25em .6em;text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}
th[data-sort]{cursor:pointer}th[aria-sort=ascending]::after{content:" \\25B2"}
th[aria-sort=descending]::after{content:" \\25BC"}.plots{display:flex;flex-wrap:wrap;gap:1em}
svg{width:30em;max-width:100%;height:auto}svg text{font-size:11px;fill:currentColor}
.axis{stroke:var(--line)}.front{stroke:var(--front);fill:none}circle{fill:var(--dot)}
circle.best{fill:var(--front)}.none{opacity:.55}td.many{white-space:normal;max-width:40em}
"""
_SCRIPT = """
for (const head of document.querySelectorAll("th[data-sort]")) {
  head.tabIndex = 0;
  const sort = () => {
    const up = head.getAttribute("aria-sort") !== "ascending", at = head.cellIndex;
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = head.closest("table").tBodies[0];
    const value = row => {
      const text = row.cells[at].dataset.value ?? row.cells[at].textContent;
      return text === "" || isNaN(text) ? text : Number(text);
    };
    const rank = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0)
      : typeof a === "number" ? -1 : 1;
    const rows = [...body.rows].sort((a, b) => rank(value(a), value(b)) * (up ? 1 : -1));
    body.append(...rows);
  };
  head.onclick = sort;
  head.onkeydown = event => { if (event.key === "Enter") sort(); };
}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_board(document: Row, folder: Path) -> None:
    """Write `leaderboard.json` and `leaderboard.html` into a folder."""
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1)
        for name, whole in (("json", text + "\n"), ("html", html(document))):
            with whole_file(folder / f"leaderboard.{name}") as draft:
                draft.write_text(whole, encoding="utf-8")
    except OSError as error:
        raise MmfastError(
            f"cannot write the leaderboard to {str(folder)!r}: {error.strerror}; give a folder"
        ) from None


def html(document: Row) -> str:
    """Return the page of a document of `standing`."""
    suites = list(dict.fromkeys(row["suite"] for row in document["rows"]))
    parts = [
        "<!DOCTYPE html><html lang=en><head><meta charset=utf-8>",
        f'<meta http-equiv=Content-Security-Policy content="{_POLICY}">',
        '<meta name=viewport content="width=device-width">',
        f"<title>mmfast leaderboard</title><style>{_STYLE}</style></head><body>",
        f"<h1>Leaderboard</h1>{_about(document)}",
        f"<h2>Which method for which job</h2>{_jobs(document)}",
        *(_suite(document, suite) for suite in suites),
        _left_out(document),
        f"<script>{_SCRIPT}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _about(document: Row) -> str:
    models = sorted({row["model"] for row in document["rows"]})
    told = [
        f"Embedded models {', '.join(models)}; {', '.join(document['processor'])}; "
        f"{', '.join(document['date'])}; commit {', '.join(document['commit']) or 'unknown'}; "
        f"{document['seconds'] / 60:.0f} minutes of measurement.",
        "Small models that were trained for this rank methods; they do not predict the loss of a "
        "large one. Intervals are of 95 %. Difference: to all tokens on the same questions, by "
        "McNemar's exact test with Holm's correction within a suite. Rank: among the methods at "
        "this budget, its interval by resampling the questions. Beats, beaten: methods that a "
        "corrected paired test tells apart. Answered, unanswered: accuracy on the questions that "
        "downsampling to no more tokens than that answers, and on the others.",
    ]
    load = document["load"]
    if load is not None and load > 1.0:
        told.append(f"The machine was busy (load {load:.1f} a processor): times are unreliable.")
    return "".join(f"<p>{escape(text)}</p>" for text in told)


def _jobs(document: Row) -> str:
    lines = []
    for job in document["jobs"]:
        figure = f"{_percent(job['accuracy'])} {_between(job['interval'])}"
        if "value" in job:
            value = job["value"]
            form = {"kept_share": f"{100 * value:.1f} % of the tokens", "kv_bytes": _bytes(value)}
            figure = f"{form.get(job['field'], f'{value:.2f}x')}, {figure}"
        shown, more = job["tied"][:6], len(job["tied"]) - 6
        tied = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
        method = job["method"] if job["decided"] else f"any; highest: {job['method']}"
        cells = [job["suite"], job["job"], method, f"{100 * job['budget']:g} %"]
        tied = tied or ("none" if job["of"] > 1 else "the only one measured")
        lines.append(_line([*cells, figure, str(job["n"]), tied]))
    head = ("suite", "job", "method", "budget", "figure", "questions", "not told apart from it")
    note = f"Without loss: the interval of the difference ends above -{100 * LOSS:g} points."
    return f"{_table(head, lines)}<p>{note}</p>" if lines else f"<p>{NOT_MEASURED}</p>"


def _suite(document: Row, suite: str) -> str:
    rows = [row for row in document["rows"] if row["suite"] == suite]
    stock = next(row for row in rows if row["method"] == STOCK)
    known = {(r["method"], r["budget"]): r for r in document["ranks"] if r["suite"] == suite}
    plots = "".join(plot(rows, cost) for cost in COSTS)
    seeds = ", ".join(map(str, stock["seed"]))
    title = f"<h2>{escape(suite)}</h2><p>{stock['n']} questions, seeds {seeds}.</p>"
    lines = [_method(row, known.get((row["method"], row["budget"]))) for row in rows]
    head = ("method", "budget", "rank", "beats", "beaten", *_COLUMNS)
    return f"{title}<div class=plots>{plots}</div>{_table(head, lines, sort=True)}"


def _method(row: Row, rank: Row | None) -> str:
    cells = [_cell(row["method"]), _cell(f"{100 * row['budget']:g} %", row["budget"])]
    if rank is None:
        cells += [_cell("" if row["method"] == STOCK else None)] * 3
    else:
        low, high = rank["rank_interval"]
        cells.append(_cell(f"{rank['rank']:g} ({low:g} to {high:g})", rank["rank"]))
        cells += [_cell(str(rank[key]), rank[key]) for key in ("beats", "beaten_by")]
    return "<tr>" + "".join([*cells, *(column(row) for column in _COLUMNS.values())]) + "</tr>"


def _figure(key: str, form: Callable[[Any], str]) -> Callable[[Row], str]:
    return lambda row: _cell(None if row[key] is None else form(row[key]), row[key])


def _accuracy_of(found: Row | None) -> str:
    if found is None or found["accuracy"] is None:
        return _cell(None)
    text = f"{_percent(found['accuracy'])} {_between(found['interval'])}, n {found['n']}"
    return _cell(text, found["accuracy"])


def _ability_column(name: str) -> Callable[[Row], str]:
    return lambda row: _accuracy_of(row[name])


def _split_column(name: str) -> Callable[[Row], str]:
    return lambda row: _accuracy_of((row["split"] or {}).get(name))


def _difference(row: Row) -> str:
    if row["difference"] is None:
        return _cell("")
    low, high = (100 * bound for bound in row["difference_interval"])
    text = f"{100 * row['difference']:+.1f} ({low:+.1f} to {high:+.1f}), p {row['p_holm']:.2g}"
    return _cell(text, row["difference"])


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _between(bounds: Sequence[float]) -> str:
    low, high = bounds
    return f"({100 * low:.1f} to {100 * high:.1f})"


def _bytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB"


def _gain(many: int) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        gain, between = row[f"speedup_{many}"], row[f"speedup_{many}_range"]
        if between is None:
            return _cell("" if row["method"] == STOCK else None)
        return _cell("{:.2f}x ({:.2f} to {:.2f})".format(gain, *between), gain)

    return cell


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "right, %": _accuracy_of,
    "difference": _difference,
    "tokens": _figure("kept", "{:.0f}".format),
    "KV": _figure("kv_bytes", _bytes),
    "first token": _gain(1),
    "eight at once": _gain(8),
    **{f"{name}, %": _ability_column(name) for name in ABILITIES},
    "as all tokens, %": _figure("agreement", _percent),
    "calibration error": _figure("calibration_error", "{:.3f}".format),
    "answered, %": _split_column("answered"),
    "unanswered, %": _split_column("unanswered"),
}


def _cell(text: str | None, value: float | None = None) -> str:
    if text is None:
        return f"<td class=none>{NOT_MEASURED}</td>"
    sort = "" if value is None else f' data-value="{value:.6g}"'
    return f"<td{sort}>{escape(text)}</td>"


def _line(cells: Sequence[str]) -> str:
    *most, last = (escape(cell) for cell in cells)
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in most)}<td class=many>{last}</td></tr>"


def _table(head: Sequence[str], lines: Sequence[str], sort: bool = False) -> str:
    mark = " data-sort" if sort else ""
    names = "".join(f"<th{mark}>{escape(name)}</th>" for name in head)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _left_out(document: Row) -> str:
    """List methods of the grid without a row, and cells that failed."""
    grid, seen = document["grid"] or {}, {(r["suite"], r["method"]) for r in document["rows"]}
    lines = []
    for suite in grid.get("suites", ()):
        absent = [name for name in grid["methods"] if (suite, name) not in seen]
        if absent:
            lines.append(f"{suite}: {', '.join(absent)}")
    for row in document["failed"]:
        what = f"{row['media']}, {row['method']} at {100 * row['budget']:g} %, seed {row['seed']}"
        lines.append(f"{what}, {row['job']}: {row['error']}")
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>Not measured</h2><ul>{items}</ul>" if items else ""


_WIDE, _HIGH, _LEFT, _RIGHT, _TOP, _LOW = 460, 280, 46, 90, 14, 40  # of a plot and its margins


def plot(rows: Sequence[Row], cost: str) -> str:
    """Draw accuracy over a cost on a logarithmic axis, and the front of the best; "" without any.

    Every point tells its name under the pointer; those on the front have a label.
    """
    mine = [row for row in rows if row[cost]]
    if len(mine) < 2:
        return ""
    xs = [math.log10(row[cost]) for row in mine]
    (left, right), ys = (min(xs), max(xs)), [row["accuracy"] for row in mine]
    low, high = math.floor(10 * min(ys)) / 10, math.ceil(10 * max(ys) - 1e-9) / 10
    high = high if high > low else low + 0.1

    def across(value: float) -> float:
        share = (math.log10(value) - left) / ((right - left) or 1.0)
        return float(_LEFT + share * (_WIDE - _LEFT - _RIGHT))

    def up(value: float) -> float:
        return float(_HIGH - _LOW - (value - low) / (high - low) * (_HIGH - _LOW - _TOP))

    front = sorted((r for r in mine if cost in r["fronts"]), key=lambda r: float(r[cost]))
    steps = [f"{across(row[cost]):.1f},{up(row['accuracy']):.1f}" for row in front]
    dots = "".join(_dot(row, cost, across, up) for row in [*mine, *front])
    labels = "".join(_labels(front, cost, across, up))
    name = f"Right answers over {COSTS[cost]}"
    return (
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" role=img aria-label="{name}"><title>{name}</title>'
        f"{_axes((low, high), (10**left, 10**right), across, up)}"
        f'<polyline class=front points="{" ".join(steps)}"/>{dots}{labels}'
        f'<text x="{_LEFT}" y="{_HIGH - 6}">{COSTS[cost]}</text></svg>'
    )


def _dot(
    row: Row, cost: str, across: Callable[[float], float], up: Callable[[float], float]
) -> str:
    x, y, best = across(row[cost]), up(row["accuracy"]), cost in row["fronts"]
    told = f"{_point_name(row)}: {_percent(row['accuracy'])} % at {row[cost]:,.4g}"
    mark = f'<circle{" class=best" * best} cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
    return f"{mark}<title>{escape(told)}</title></circle>"


def _point_name(row: Row) -> str:
    return str(row["method"]) + ("" if row["method"] == STOCK else f" {100 * row['budget']:g} %")


def _labels(
    front: Sequence[Row],
    cost: str,
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> Iterator[str]:
    """Yield one label for each point of the front; equal points share theirs."""
    found: dict[tuple[float, float], list[str]] = {}
    for row in front:
        found.setdefault((row[cost], row["accuracy"]), []).append(_point_name(row))
    for (x, y), names in found.items():
        text = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        place = f'x="{across(x) + 5:.1f}" y="{up(y) + 12:.1f}"'
        yield f"<text {place}>{escape(text)}</text>"


def _axes(
    heights: tuple[float, float],
    widths: tuple[float, float],
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> str:
    (low, high), (left, right) = heights, widths
    marks = []
    for tenth in range(round(10 * low), round(10 * high) + 1):
        y = up(tenth / 10)
        marks.append(f'<line class=axis x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{y}" y2="{y}"/>')
        marks.append(f'<text x="4" y="{y + 4:.1f}">{10 * tenth} %</text>')
    for value in dict.fromkeys((left, math.sqrt(left * right), right)):
        x = across(value)
        shown = f"{value:.3g}" if value < 1e4 else f"{value / 1e6:.2g}M"
        marks.append(f'<text x="{x:.1f}" y="{_HIGH - _LOW + 16}">{shown}</text>')
    return "".join(marks)
