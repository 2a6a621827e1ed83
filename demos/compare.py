"""The tab "Compare": methods on a clip of the visitor, and their measured accuracy by budget."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from html import escape
from itertools import cycle
from typing import Any

import gradio as gr

import mmfast
from mmfast.demos import examples, views
from mmfast.demos.ask import gain, media_inputs, opened, pipe_for, same, spec_of
from mmfast.demos.examples import RESULTS
from mmfast.demos.shelf import FRAMES, Shelf
from mmfast.demos.views import Run, polite

SUITES = {
    "clips": "video", "pictures": "image", "three pictures": "multi-image", "pages": "document",
    "tables": "table",
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
    rows = examples.measured_rows(path)
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


def across(share: float) -> float:
    """Place of a share along the axis of shares, from 0 to 1; the axis is logarithmic."""
    return math.log(max(share, TICKS[0]) / TICKS[0]) / math.log(1 / TICKS[0])


Line = list[tuple[float, float]]  # places, each from 0 to 1 along both axes
Dot = tuple[float, float, str, str]  # its place, and what it says in a narrow and in a wide plot


def series(colour: str | None, line: Line, dots: Sequence[Dot]) -> dict[str, Any]:
    """A line with dots of a plot; the one without a colour stands behind."""
    return {"colour": colour, "line": line, "dots": dots}


def plot(
    found: Sequence[dict[str, Any]], marks: Sequence[tuple[float, str]], **more: object
) -> str:
    """An element that page.js draws: series over axes from 0, so that differences look their size.

    `marks` label places along x. Further parts are `label`, `below` and `above`, texts of the plot
    and its axes, and `level`, the height of a dashed line.
    """
    data = json.dumps({"series": found, "marks": marks, **more})
    return f"<mm-plot data-plot='{escape(data, quote=True)}'></mm-plot>"


def chart(suite: SuiteCurves, chosen: Sequence[str]) -> str:
    picked = [name for name in chosen if name in suite.curves]
    colours = dict(zip(picked, cycle(COLOURS), strict=False))
    rest = [name for name in suite.curves if name not in picked]
    full = suite.full.accuracy
    drawing = plot(
        [_curve(name, suite.curves[name], colours.get(name), full) for name in [*rest, *picked]],
        [(across(share), f"{share:.0%}") for share in TICKS],
        label="Right answers against visual tokens kept",
        below="visual tokens kept",
        above="right answers",
        level=full,
    )
    keys = "".join(
        f'<li><i style="background:{colour}"></i>{escape(name)}</li>'
        for name, colour in colours.items()
    )
    return (
        f'<figure class="mm-chart">{drawing}<ul class="mm-keys">{keys}<li><i class="mm-dash"></i>'
        f"all tokens: {full:.1%}</li><li><i class=mm-grey></i>the other methods</li>"
        f'</ul><figcaption class="mm-soft">{escape(suite.source)}. Point at a dot, or reach it '
        "with Tab, for its figures.</figcaption></figure>"
    )


def _curve(
    name: str, points: Sequence[Measurement], colour: str | None, full: float
) -> dict[str, Any]:
    """A line through the measured points to all tokens, which no method changes."""
    dots = []
    for point in points:
        short = f"{name} at {point.share:.0%}: {point.accuracy:.1%} right"
        says = f"{short} ({point.low:.0%} to {point.high:.0%}), {point.tokens:.0f} tokens"
        dots.append((across(point.share), point.accuracy, short, says))
    return series(colour, [*(dot[:2] for dot in dots), (1.0, full)], dots)


START, FIRST = "clips", ("dtd", "divprune", "script", "visionzip", "fastv", "random")
MOST = 8  # in colour at once
SHARES = (0.5, 0.25, 0.1, 0.05)


def compare_tab(shelf: Shelf) -> None:
    gr.Markdown("### On this clip")
    _trial_inputs(shelf)
    gr.Markdown("### Measured on many clips")
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
    paper = "" if method is None else views.link(method) or "baseline"
    what = "" if method is None else escape(method.summary)
    return (
        f"<tr><th scope=row><code>{escape(name)}</code></th>{cells}<td class=mm-number>{paper}</td>"
        f"<td class=mm-what>{what}</td></tr>"
    )


ROUNDS, SECONDS, QUESTIONS = 5, 8.0, 6
ALL = "all tokens"


@dataclass(frozen=True)
class Outcome:
    """One way of answering some questions about a clip; times are milliseconds to the first token.

    `share` is of right answers, or of those that equal the ones with all tokens.
    """

    name: str
    share: float
    ms: float  # a median; `low` and `high` are its quantiles 0.2 and 0.8
    low: float
    high: float
    faster: str  # than all tokens; "=" within the noise
    tokens: int


def ranked(suite: str, share: float) -> tuple[list[str], list[str]]:
    """Methods by measured accuracy at the nearest budget: above random selection, and the rest."""
    found = {
        name: min(points, key=lambda p: abs(math.log(p.share / share))).accuracy
        for name, points in suite_curves(suite).curves.items()
    }
    order = sorted(found, key=lambda name: (-found[name], name))
    good = [name for name in order if found[name] > found["random"]]
    return good, [name for name in order if name not in good]


def trial(
    shelf: Shelf,
    media: Any,
    questions: Sequence[str],
    specs: Sequence[str],
    known: Sequence[str | None] = (),
    frames: int = FRAMES,
    tick: Any = lambda done, total: None,
    seconds: float = SECONDS,
) -> list[Outcome]:
    """Ask every question in every way, and time the first one in turn; all tokens come first.

    `known` are the right answers; unless all are there, those with all tokens take their place.
    """
    pipes = {name: pipe_for(shelf, media, name, frames) for name in specs}
    pipes = {ALL: pipe_for(shelf, media, None, frames), **pipes}
    rest = [(name, question) for question in questions[1:] for name in pipes]
    texts: dict[str, list[str]] = {name: [] for name in pipes}
    for number, (name, question) in enumerate(rest):
        tick(number, len(rest) + ROUNDS * (len(pipes) + 1))
        texts[name].append(pipes[name](media, question).text)
    later = lambda done, total: tick(len(rest) + done, len(rest) + total)
    how: dict[str, Any] = {"rounds": ROUNDS, "seconds": seconds, "warm": False}
    answers, rows = mmfast.time_answers(pipes, media, questions[0], later, **how)
    said = {name: [answers[name].text, *texts[name]] for name in pipes}
    wanted = list(known) if known and None not in known else said[ALL]
    first = {row["job"]: row for row in rows if row["stage"] == "first token"}
    found = []
    for name, mine in said.items():
        share = sum(map(same, mine, wanted)) / len(wanted)
        row = first.get(name) or dict.fromkeys(_TIMES, next(iter(first.values()))["all_ms"])
        faster = gain(row) if name in first else ""
        ms, low, high = (row[key] for key in _TIMES)
        found.append(Outcome(name, share, ms, low, high, faster, answers[name].kept_tokens))
    return found


_TIMES = ("median_ms", "p20_ms", "p80_ms")


def trial_chart(outcomes: Sequence[Outcome], label: str) -> str:
    """Outcomes as dots over time, their figures in a table; `label` says what the share is of."""
    most = 1.08 * max(each.high for each in outcomes)
    power = 10.0 ** math.floor(math.log10(most / 3))
    step = next(power * n for n in (5, 2, 1) if n == 1 or power * n * 3 <= most)
    found = []
    for number, each in enumerate(outcomes):
        short = f"{each.name}: {each.share:.0%}, {each.ms:,.0f} ms"
        line = [(ms / most, each.share) for ms in (each.low, each.high)]
        dot = (each.ms / most, each.share, short, f"{short} {each.faster}")
        found.append(series(_colour(number), line, [dot]))
    drawing = plot(
        found,
        [(step * i / most, f"{step * i:g}") for i in range(int(most / step) + 1)],
        label=f"{label} over time",
        below="milliseconds to the first token",
        above=label,
    )
    rows = "".join(
        f'<tr><th scope=row><i class="mm-key" style="background:{_colour(i)}"></i>'
        f"<code>{escape(each.name)}</code></th><td>{each.share:.0%}</td><td>{each.ms:,.0f}</td>"
        f"<td>{each.faster}</td><td>{each.tokens:,}</td></tr>"
        for i, each in enumerate(outcomes)
    )
    heads = ("method", label.split()[0], "first token, ms", "faster", "tokens")
    return f'<figure class="mm-chart">{drawing}</figure>{views.table(heads, rows, "Outcomes")}'


def _colour(number: int) -> str:
    return ("currentColor", *COLOURS)[number % (1 + len(COLOURS))]


def _trial_inputs(shelf: Shelf) -> None:
    good, rest = ranked(START, 0.25)
    with gr.Row(equal_height=False):
        with gr.Column(scale=4, min_width=300):
            media = media_inputs("compare")
        with gr.Column(scale=6, min_width=300):
            asked = "\n".join(examples.questions(examples.START))
            questions = gr.Textbox(
                asked, label=f"Questions, one a line, up to {QUESTIONS}", lines=4, max_length=3000
            )
            methods = gr.Dropdown(
                [*((f"{name} (recommended)", name) for name in good), *rest],
                value=[*good[:4], "random"],
                multiselect=True,
                max_choices=MOST,
                label="Methods, those above random selection first",
            )
            budget = gr.Slider(2, 100, 25, step=1, label="Visual tokens kept, %")
            run = gr.Button("Compare", variant="primary", elem_id="compare-run")
            stop = gr.Button("Stop", variant="stop", elem_id="compare-stop", visible=False)
            result = gr.HTML(views.note(views.EMPTY), elem_id="trial")
            beside, memory = gr.HTML("", visible=False), gr.State(None)
    shown, state = [result, beside, memory], gr.State(Run())
    given = [media.example, media.upload, questions, methods, budget, media.frames, state]
    views.stoppable([run.click], polite(partial(run_trial, shelf)), given, shown, stop, state)
    media.wire(shown, questions)


def run_trial(
    shelf: Shelf,
    example: str | None,
    upload: str | None,
    questions: str,
    methods: Sequence[str],
    budget: float,
    frames: float,
    state: Run,
    progress: Any = gr.Progress(),  # noqa: B008 (Gradio looks for it here)
) -> tuple[str, str, None]:
    """Compare methods on one clip, as the settings of the tab say."""
    _, media = opened(shelf, example, upload, frames)
    asked = [line.strip() for line in questions.splitlines() if line.strip()][:QUESTIONS]
    suite = "clips" if mmfast.kind_of(media) == "video" else "pictures"
    suite = "tables" if examples.reader(media) else suite
    good, rest = ranked(suite, budget / 100)
    specs = [spec_of(name, budget) for name in [*good, *rest] if name in methods]
    if not asked or not specs:
        raise mmfast.MmfastError(
            f"{len(asked)} questions and {len(specs)} methods for {suite} compare nothing; "
            "give at least one of each"
        )
    known = [examples.right_answer(example or "", question) for question in asked]
    tick = state.tick(progress)
    found = trial(shelf, media, asked, specs, known, int(frames), tick)
    label = "same answer as all tokens" if None in known else "right answers"
    left_out = [name for name in methods if name not in [*good, *rest]]
    skipped = f" Not for {suite}: {', '.join(left_out)}." if left_out else ""
    return (
        trial_chart(found, label)
        + (
            f'<p class="mm-soft">{len(asked)} questions, which is few: the curves below are of '
            "hundreds. Time: medians of the first question, all in turn; a bar is from the "
            f'quantile 0.2 to 0.8, "=" is within the noise.{escape(skipped)}</p>'
        ),
        "",
        None,
    )
