"""The tab "Ask": one question answered with all visual tokens and with fewer, side by side."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

import gradio as gr

import mmfast
from mmfast.demos import examples, views
from mmfast.demos.examples import CLIPS, OWN
from mmfast.demos.shelf import Shelf
from mmfast.demos.views import polite

ROUNDS, PATIENCE = 5, 1.5  # timed answers of each kind, and seconds after which none is begun
_NOT_OFFERED = ("pixel",)  # drops flat patches before the tower and takes no budget


@dataclass(frozen=True)
class Shown:
    """One way of answering, and what it cost."""

    spec: str | None  # what reduced; None is nothing
    text: str  # the answer
    tokens: int  # visual tokens left after the last stage
    of: int  # visual tokens without any reduction
    ttft_ms: float  # milliseconds to the first token, reading the media included; a median
    rounds: int  # answers that were timed
    # `(stage, tokens in, tokens out, ms)` of the last one
    rows: tuple[tuple[str, int, int, float], ...]
    frames: tuple[tuple[Any, str], ...]  # `(picture, caption)` of every frame the model saw


def chosen(example: str | None, upload: str | None) -> str:
    if example and example != OWN:
        return str(CLIPS / example)
    if not upload:
        raise mmfast.MmfastError("there is no file yet; pick an example, or upload your own")
    return upload


def spec_of(method: str, percent: float) -> str:
    return f"{method}:{min(max(percent, 1), 100) / 100:.2f}"


def offered() -> list[Any]:
    """Methods that take a budget and visual tokens."""
    return [m for m in mmfast.methods("reducer") if m.sites[0] not in _NOT_OFFERED]


def answers(
    shelf: Shelf, media: Any, question: str, specs: list[str | None], patience: float = PATIENCE
) -> list[Shown]:
    """Answer in each way, turn by turn, and time it; a spec of None keeps all tokens.

    The first answers warm up and count only if there was no time for more; after `patience` seconds
    no further round is begun.
    """
    kind = mmfast.kind_of(media)
    pipes = [shelf.visual(kind, spec) for spec in specs]
    rounds: list[list[Any]] = []
    begun = time.monotonic()
    while len(rounds) <= ROUNDS and (not rounds or time.monotonic() - begun < patience):
        rounds.append([pipe(media, question) for pipe in pipes])
    timed = rounds[1:] or rounds
    return [
        _shown(pipe, media, spec, [one[i] for one in timed])
        for i, (pipe, spec) in enumerate(zip(pipes, specs, strict=True))
    ]


def _shown(pipe: Any, media: Any, spec: str | None, found: list[Any]) -> Shown:
    last = found[-1]
    rows = tuple((row.label, row.tokens_in, row.tokens_out, row.ms) for row in last.trace.rows)
    frames = tuple(pipe.overlay(media, last.trace, sheets=False)[0])
    ttft = statistics.median(answer.ttft_ms for answer in found)
    tokens = last.kept_tokens, last.visual_tokens
    return Shown(spec, last.text, *tokens, ttft, len(found), rows, frames)


def same(first: str, second: str) -> bool:
    return " ".join(first.lower().split()) == " ".join(second.lower().split())


START, METHOD, BUDGET = "red-circle.mp4", "divprune", 25
SLIDING = 0.25  # seconds of timing while the slider moves
MEDIA = [".mp4", ".webm", ".mov", ".mkv", ".avi", ".gif", ".png", ".jpg", ".jpeg", ".webp"]


def ask_tab(shelf: Shelf) -> None:
    with gr.Row(equal_height=False):
        with gr.Column(scale=4, min_width=300):
            example, upload, player = _media()
            question = gr.Textbox(
                examples.questions(START)[0], label="Question", max_length=500, submit_btn=False
            )
            ask = gr.Button("Ask", variant="primary", elem_id="ask")
            asked = examples.questions(START)
            tries = views.suggestions(question, asked, "Questions about this one")
        with gr.Column(scale=6, min_width=300):
            method, budget, about = _method()
            result = gr.HTML(views.note("Press Ask: the answers come here."), elem_id="answers")
            pictures = gr.HTML("", elem_id="frames")
    before = gr.State(None, time_to_live=3600)
    given = [example, upload, question, method, budget, before]
    shown = [result, pictures, before]
    fresh = polite(partial(compare, shelf, fresh=True))
    slide = polite(partial(compare, shelf, fresh=False))
    how: dict[str, Any] = {**views.BUSY, "api_visibility": "private"}
    gr.on([ask.click, question.submit], fresh, given, shown, **how)
    live = {**how, "trigger_mode": "always_last", "show_progress": "hidden"}
    gr.on([budget.input, method.input], slide, given, shown, **live)
    method.change(about_method, method, about, api_visibility="private", queue=False)
    tries.click(lambda row: row[0], tries, question, api_visibility="private", queue=False).then(
        fresh, given, shown, **how
    )
    outputs = [upload, player, question, tries]
    example.change(polite(choose), [example, upload], outputs, **views.QUICK)
    upload.change(polite(take), upload, player, **views.QUICK)

    def answered(example: str, question: str, reduce: str) -> dict[str, Any]:
        """Answer a question about an example; "" as `reduce` keeps all tokens."""
        return answer(shelf, example, question, reduce)

    gr.api(answered, api_name="ask", **views.BUSY)


def _media() -> tuple[Any, Any, Any]:
    example = gr.Dropdown(
        [*examples.names(), examples.OWN], value=START, label="Clip or picture", filterable=False
    )
    upload = gr.File(
        label="Your own clip or picture, up to 50 MB", file_types=MEDIA, height=120, visible=False
    )
    player = gr.HTML(views.player(str(examples.CLIPS / START)), elem_id="player")
    return example, upload, player


def _method() -> tuple[Any, Any, Any]:
    named = sorted(offered(), key=lambda each: each.name)
    with gr.Row():
        method = gr.Dropdown(
            [each.name for each in named], value=METHOD, label="Method", min_width=150
        )
        budget = gr.Slider(
            2, 100, BUDGET, step=1, label="Visual tokens kept, %", elem_id="budget", min_width=220
        )
    about = gr.HTML(about_method(METHOD), elem_id="about-method")
    return method, budget, about


def choose(example: str, upload: str | None) -> tuple[Any, ...]:
    if example == examples.OWN:
        return gr.File(visible=True), take(upload), gr.skip(), gr.Dataset(samples=[])
    asked = examples.questions(example)
    samples = gr.Dataset(samples=[[each] for each in asked])
    shown = views.player(str(examples.CLIPS / example))
    return gr.File(visible=False), shown, asked[0], samples


def take(upload: str | None) -> str:
    if not upload:
        return views.note("Choose a file: mp4, webm, mov, mkv, avi, gif, png, jpg, webp.")
    return views.player(upload, uploaded=True)


def compare(
    shelf: Shelf,
    example: str | None,
    upload: str | None,
    question: str,
    method: str,
    budget: float,
    before: Any,
    fresh: bool,
) -> tuple[str, str, Any]:
    """Answer with all tokens (while the slider moves, the answer of before) and with fewer."""
    path, spec = chosen(example, upload), spec_of(method, budget)
    media = shelf.read(path) if example == examples.OWN else path
    about = (path, question.strip())
    if fresh or before is None or before[0] != about:
        base, fast = answers(shelf, media, question, [None, spec])
    else:
        base = before[1]
        (fast,) = answers(shelf, media, question, [spec], SLIDING)
    right = examples.right_answer(example or "", question)
    return cards(base, fast, right), frames(base, fast), (about, base)


def answer(shelf: Shelf, example: str, question: str, reduce: str) -> dict[str, Any]:
    if example not in dict(examples.names()).values():
        raise gr.Error("no such example", print_exception=False)
    media = str(examples.CLIPS / example)
    (shown,) = polite(answers)(shelf, media, question, [reduce or None], 0.0)
    tokens = {"kept_tokens": shown.tokens, "visual_tokens": shown.of}
    return {"answer": shown.text, **tokens, "ttft_ms": round(shown.ttft_ms, 3)}


LEGEND = (
    ("as it was", "kept"),
    ("same colour", "merged into one token; its place is framed"),
    ("dark", "dropped"),
    ("pale", "merged inside the vision tower"),
)


def cards(base: Shown, fast: Shown, right: str | None) -> str:
    agree = same(base.text, fast.text)
    word = "Same answer" if agree else "Another answer"
    verdict = f"{word} with {fast.tokens / max(fast.of, 1):.0%} of the visual tokens."
    known = "" if right is None else f' <span class="mm-soft">Right is: {escape(right)}.</span>'
    left = _card("All tokens", base, None)
    card = _card(fast.spec or "All tokens", fast, base)
    return (
        f'<div class="mm-cards">{left}{card}</div>'
        f'<p class="mm-verdict {"mm-same" if agree else "mm-other"}" role="status">'
        f"<strong>{verdict}</strong>{known}</p>{_stages(base, fast)}"
    )


def _card(title: str, shown: Shown, base: Shown | None) -> str:
    tokens, ttft = f"{shown.tokens:,}", f"{shown.ttft_ms:,.0f} ms"
    if base is not None:
        tokens += f" <small>of {shown.of:,}</small>"
        ttft += f" <small>{base.ttft_ms / max(shown.ttft_ms, 1e-9):.2f}x</small>"
    return (
        f'<section class="mm-card{"" if base is None else " mm-fast"}"><h3>{escape(title)}</h3>'
        f'<p class="mm-answer">{escape(shown.text) or "(no answer)"}</p><dl>'
        f"<div><dt>visual tokens</dt><dd>{tokens}</dd></div>"
        f"<div><dt>first token after</dt><dd>{ttft}</dd></div></dl></section>"
    )


def _stages(base: Shown, fast: Shown) -> str:
    before = {name: f"{ms:,.1f}" for name, _, _, ms in base.rows}
    rows = "".join(
        views.row(name, f"{was:,}", f"{left:,}", before.get(name, ""), f"{ms:,.1f}")
        for name, was, left, ms in fast.rows
    )
    heads = ("stage", "tokens in", "out", "all tokens, ms", "fewer, ms")
    return (
        "<details class=mm-more><summary>Where the time went</summary>"
        f"{views.table(heads, rows, 'Milliseconds per stage')}"
        f"<p class=mm-soft>First token: median of {fast.rounds}, both ways in turn; stages: of the "
        "last one. The embedded model is so small that reading and encoding take most of the time; "
        "the README has models of real size.</p></details>"
    )


def frames(base: Shown, fast: Shown) -> str:
    seen = [views.uri(picture) for picture, _ in base.frames]
    left = [
        {"kept": views.uri(picture), "caption": _caption(number, len(fast.frames), line)}
        for number, (picture, line) in enumerate(fast.frames)
    ]
    data = [{"seen": seen[min(i, len(seen) - 1)], **each} for i, each in enumerate(left)]
    legend = "".join(f"<li><b>{name}</b> {meaning}</li>" for name, meaning in LEGEND)
    return (
        f"<mm-frames data-frames='{escape(json.dumps(data), quote=True)}'></mm-frames>"
        f'<ul class="mm-legend">{legend}</ul>'
    )


def _caption(number: int, count: int, line: str) -> str:
    rest = line.split(": ", 1)[-1]
    return f"Frame {number + 1} of {count}: {rest}" if count > 1 else rest


def about_method(name: str) -> str:
    method = next(each for each in offered() if each.name == name)
    paper = views.link(method.paper) or "a baseline, no paper"
    needs = ", ".join(method.needs)
    return f'<p class="mm-soft">{escape(method.summary)} Reads: {escape(needs)}. {paper}</p>'
