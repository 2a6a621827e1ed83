"""The tab "Compare": the measured accuracy of every method against the share of tokens it keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any, NamedTuple

import gradio as gr

import mmfast
from mmfast.demos import views
from mmfast.demos.examples import RESULTS

SUITES = {
    "clips": "video", "pictures": "image", "three pictures": "multi-image", "pages": "document",
}  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """One measurement: `accuracy` (0 to 1, with its 95 % interval) at a `share` of the tokens."""

    share: float
    accuracy: float
    low: float
    high: float
    tokens: float


@dataclass(frozen=True)
class SuiteCurves:
    """Measurements on one kind of media; `full` is with all tokens, `curves` is by method."""

    full: Measurement
    curves: dict[str, tuple[Measurement, ...]]
    source: str


@cache
def suite_curves(name: str) -> SuiteCurves:
    """The newest rows of a suite: every method's budgets, ascending."""
    path = RESULTS / f"eval-{SUITES[name]}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    full, curves = None, dict[str, dict[float, Measurement]]()
    for row in rows:
        point = _point(row)
        if row["reduce"] is None:
            full, model = point, f"model {row['model']}, seed {row['seed']}"
            source = f"{row['n']} questions, {model}, {row['date']}"
        elif point.share < 1 and "+" not in row["reduce"]:
            curves.setdefault(row["reduce"].rpartition(":")[0], {})[point.share] = point
    if full is None:
        raise ValueError(f"{path.name} has no row with all tokens")
    ordered = {name: tuple(v for _, v in sorted(curves[name].items())) for name in sorted(curves)}
    return SuiteCurves(full, ordered, source)


def _point(row: dict[str, Any]) -> Measurement:
    name, _, budget = str(row["reduce"] or "all:1.0").rpartition(":")
    low, high = row["interval"]
    share = float(budget) if name and "." in budget else 1.0
    return Measurement(share, float(row["accuracy"]), low, high, float(row["kept"]))


COLOURS = ("#0f766e", "#c2410c", "#4338ca", "#a21caf", "#a16207", "#0369a1", "#be123c", "#4d7c0f")
TICKS = (0.05, 0.1, 0.25, 0.5, 1.0)


class Canvas(NamedTuple):
    """Sizes of a drawing in its own units, which are pixels at its natural width."""

    width: int
    height: int
    left: int = 44
    right: int = 14
    top: int = 30
    bottom: int = 44

    def x(self, share: float) -> float:
        part = math.log(max(share, TICKS[0]) / TICKS[0]) / math.log(TICKS[-1] / TICKS[0])
        return self.left + (self.width - self.left - self.right) * part

    def y(self, accuracy: float) -> float:
        """From 0, so that a difference looks as large as it is."""
        return self.height - self.bottom - (self.height - self.bottom - self.top) * accuracy


WIDE, NARROW = Canvas(1040, 430), Canvas(340, 330)


def chart(suite: SuiteCurves, chosen: Sequence[str]) -> str:
    picked = [name for name in chosen if name in suite.curves]
    drawings = "".join(
        f'<div class="mm-{name}">{_drawing(canvas, suite, picked)}</div>'
        for name, canvas in (("wide", WIDE), ("narrow", NARROW))
    )
    keys = "".join(
        f'<li><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{escape(name)}</li>'
        for i, name in enumerate(picked)
    )
    return (
        f'<figure class="mm-chart">{drawings}<ul class="mm-keys">{keys}<li><i class="mm-dash"></i>'
        f"all tokens: {suite.full.accuracy:.1%}</li><li><i class=mm-grey></i>the other methods</li>"
        f'</ul><figcaption class="mm-soft">{escape(suite.source)}. Point at a dot, or reach it '
        "with Tab, for its figures.</figcaption></figure>"
    )


def _drawing(canvas: Canvas, suite: SuiteCurves, picked: Sequence[str]) -> str:
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(picked)}
    rest = [name for name in suite.curves if name not in picked]
    curves = [
        _curve(canvas, name, suite.curves[name], colours.get(name), suite.full.accuracy)
        for name in [*rest, *picked]
    ]
    level = canvas.y(suite.full.accuracy)
    line = (
        f'<line class="mm-level" x1="{canvas.left}" x2="{canvas.width - canvas.right}" '
        f'y1="{level:.1f}" y2="{level:.1f}"/>'
    )
    return (
        f'<svg viewBox="0 0 {canvas.width} {canvas.height}" role="group" '
        f'aria-label="Right answers against visual tokens kept">{_axes(canvas)}{line}'
        f"{''.join(curves)}</svg>"
    )


def _axes(canvas: Canvas) -> str:
    low, high = canvas.y(0), canvas.y(1)
    parts = []
    for share in TICKS:
        x = canvas.x(share)
        parts.append(f'<line class="mm-grid" x1="{x:.1f}" x2="{x:.1f}" y1="{low}" y2="{high}"/>')
        anchor = "end" if share == TICKS[-1] else "middle"
        parts.append(f'<text x="{x:.1f}" y="{low + 18}" text-anchor="{anchor}">{share:.0%}</text>')
    for step in range(0, 101, 20):
        y = canvas.y(step / 100)
        right = canvas.width - canvas.right
        parts.append(
            f'<line class="mm-grid" x1="{canvas.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{canvas.left - 6}" y="{y + 4:.1f}" text-anchor="end">{step}%</text>'
        )
    middle = (canvas.left + canvas.width - canvas.right) / 2
    parts.append(
        f'<text x="{middle}" y="{canvas.height - 6}" text-anchor="middle">visual tokens kept</text>'
        f'<text x="{canvas.left}" y="14">right answers</text>'
    )
    return "".join(parts)


def _curve(
    canvas: Canvas, name: str, points: Sequence[Measurement], colour: str | None, full: float
) -> str:
    """A line through the measured points to all tokens, which no method changes."""
    corners = [*((p.share, p.accuracy) for p in points), (1.0, full)]
    place = " ".join(f"{canvas.x(share):.1f},{canvas.y(right):.1f}" for share, right in corners)
    style = "" if colour is None else f' style="--c:{colour}"'
    kind = "mm-curve" if colour is None else "mm-curve mm-chosen"
    dots = "".join(_dot(canvas, name, point, colour is not None) for point in points)
    return f'<g class="{kind}"{style}><polyline points="{place}"/>{dots}</g>'


def _dot(canvas: Canvas, name: str, point: Measurement, chosen: bool) -> str:
    short = f"{name} at {point.share:.0%}: {point.accuracy:.1%} right"
    says = f"{short} ({point.low:.0%} to {point.high:.0%}), {point.tokens:.0f} tokens"
    at = f'cx="{canvas.x(point.share):.1f}" cy="{canvas.y(point.accuracy):.1f}"'
    reach = ' tabindex="0"' if chosen else ""
    middle = (canvas.left + canvas.width) / 2
    return (
        f'<g class="mm-dot" role="img" aria-label="{escape(says)}"{reach}>'
        f'<circle class="mm-near" {at} r="9"/><circle {at} r="3.5"/>'
        f'<text class="mm-says" x="{middle}" y="{14 if canvas.width > 600 else 26}" '
        f'text-anchor="middle">{escape(says if canvas.width > 600 else short)}</text></g>'
    )


START, FIRST = "clips", ("dtd", "divprune", "script", "visionzip", "fastv", "random")
MOST = 8  # in colour at once
SHARES = (0.5, 0.25, 0.1, 0.05)


def compare_tab() -> None:
    with gr.Row():
        suite = gr.Radio(list(SUITES), value=START, label="Questions about", scale=2)
        methods = gr.Dropdown(
            list(suite_curves(START).curves),
            value=list(FIRST),
            multiselect=True,
            max_choices=MOST,
            label=f"Methods in colour, up to {MOST}",
            scale=3,
        )
    picture = gr.HTML(chart(suite_curves(START), FIRST), elem_id="chart")
    listing = gr.HTML(table(START), elem_id="methods")
    suite.change(choose, [suite, methods], [methods, picture, listing], **views.QUICK)
    methods.change(draw, [suite, methods], picture, **views.QUICK)


def choose(suite: str, methods: Sequence[str]) -> tuple[Any, str, str]:
    curves = suite_curves(suite).curves
    known = [name for name in methods if name in curves]
    return gr.update(choices=list(curves), value=known), draw(suite, known), table(suite)


def draw(suite: str, methods: Sequence[str]) -> str:
    return chart(suite_curves(suite), methods)


def table(suite: str) -> str:
    found, known = suite_curves(suite), {m.name: m for m in mmfast.methods("reducer")}
    shares = [s for s in SHARES if any(p.share == s for c in found.curves.values() for p in c)]
    rows = "".join(_row(name, points, known, shares) for name, points in found.curves.items())
    heads = ("method", *(f"{share:.0%}" for share in shares), "paper", "what it does")
    return views.table(heads, rows, "Methods, papers and right answers by budget", "mm-table")


def _row(
    name: str, points: Sequence[Measurement], known: dict[str, Any], shares: Sequence[float]
) -> str:
    at = {point.share: point.accuracy for point in points}
    cells = "".join(
        f'<td class="mm-number">{f"{at[share]:.1%}" if share in at else ""}</td>'
        for share in shares
    )
    method = known.get(name.partition("@")[0])
    paper = "" if method is None else views.link(method.paper) or "baseline"
    what = "" if method is None else escape(method.summary)
    return (
        f"<tr><th scope=row><code>{escape(name)}</code></th>{cells}<td class=mm-number>{paper}</td>"
        f"<td class=mm-what>{what}</td></tr>"
    )
