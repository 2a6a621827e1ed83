"""The tab "Compare": what each method keeps of the accuracy, at each budget."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr

import mmfast
from mmfast.demos import evidence, views
from mmfast.demos.chart import chart
from mmfast.demos.evidence import Measurement

START, FIRST = "clips", ("dtd", "divprune", "script", "visionzip", "fastv", "random")
MOST = 8  # in colour at once
SHARES = (0.5, 0.25, 0.1, 0.05)


def compare_tab() -> None:
    """Lay out the tab and wire it."""
    with gr.Row():
        suite = gr.Radio(list(evidence.SUITES), value=START, label="Questions about", scale=2)
        methods = gr.Dropdown(
            list(evidence.suite(START).curves),
            value=list(FIRST),
            multiselect=True,
            max_choices=MOST,
            label=f"Methods in colour, up to {MOST}",
            scale=3,
        )
    picture = gr.HTML(chart(evidence.suite(START), FIRST), elem_id="chart")
    listing = gr.HTML(table(START), elem_id="methods")
    quick: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
    suite.change(choose, [suite, methods], [methods, picture, listing], **quick)
    methods.change(draw, [suite, methods], picture, **quick)


def choose(suite: str, methods: Sequence[str]) -> tuple[Any, str, str]:
    """Other questions: the methods measured on them, their curves and their table."""
    curves = evidence.suite(suite).curves
    known = [name for name in methods if name in curves]
    return gr.update(choices=list(curves), value=known), draw(suite, known), table(suite)


def draw(suite: str, methods: Sequence[str]) -> str:
    """The curves."""
    return chart(evidence.suite(suite), methods)


def table(suite: str) -> str:
    """All methods of a suite with their papers, in a region that scrolls by itself."""
    found, known = evidence.suite(suite), {m.name: m for m in mmfast.methods("reducer")}
    shares = [s for s in SHARES if any(p.share == s for c in found.curves.values() for p in c)]
    rows = "".join(_row(name, points, known, shares) for name, points in found.curves.items())
    heads = "".join(f"<th scope=col>{share:.0%}</th>" for share in shares)
    return (
        '<div class="mm-scroll mm-table" tabindex="0" role="region" aria-label="Methods, papers '
        f'and right answers by budget"><table><thead><tr><th scope=col>method</th>{heads}'
        "<th scope=col>paper</th><th scope=col>what it does</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


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
