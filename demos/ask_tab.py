"""The tab "Ask": the same question with all visual tokens and with fewer."""

from __future__ import annotations

from functools import partial
from typing import Any

import gradio as gr

from mmfast.demos import asking, examples, views
from mmfast.demos.polite import polite
from mmfast.demos.shelf import Shelf

START, METHOD, BUDGET = "red-circle.mp4", "divprune", 25
SLIDING = 0.25  # seconds of timing while the slider moves
MEDIA = [".mp4", ".webm", ".mov", ".mkv", ".avi", ".gif", ".png", ".jpg", ".jpeg", ".webp"]


def ask_tab(shelf: Shelf) -> None:
    """Lay out the tab and wire it."""
    with gr.Row(equal_height=False):
        with gr.Column(scale=4, min_width=300):
            example, upload, player = _media()
            question = gr.Textbox(
                examples.questions(START)[0], label="Question", max_length=500, submit_btn=False
            )
            ask = gr.Button("Ask", variant="primary", elem_id="ask")
            tries = gr.Dataset(
                components=[question],
                samples=[[each] for each in examples.questions(START)],
                label="Questions about this one",
                samples_per_page=8,
                type="values",
            )
        with gr.Column(scale=6, min_width=300):
            method, budget, about = _method()
            result = gr.HTML(views.note("Press Ask: the answers come here."), elem_id="answers")
            pictures = gr.HTML("", elem_id="frames")
    before = gr.State(None, time_to_live=3600)
    given = [example, upload, question, method, budget, before]
    shown = [result, pictures, before]
    fresh = polite(partial(compare, shelf, fresh=True))
    slide = polite(partial(compare, shelf, fresh=False))
    how: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1}
    gr.on([ask.click, question.submit], fresh, given, shown, api_visibility="private", **how)
    live = {**how, "trigger_mode": "always_last", "show_progress": "hidden"}
    gr.on([budget.input, method.input], slide, given, shown, api_visibility="private", **live)
    method.change(about_method, method, about, api_visibility="private", queue=False)
    tries.click(lambda row: row[0], tries, question, api_visibility="private", queue=False).then(
        fresh, given, shown, api_visibility="private", **how
    )
    _choosing(example, upload, player, question, tries)

    def answered(example: str, question: str, reduce: str) -> dict[str, Any]:
        """Answer a question about an example; "" as `reduce` keeps all tokens."""
        return answer(shelf, example, question, reduce)

    gr.api(answered, api_name="ask", **how)


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
    named = sorted(asking.offered(), key=lambda each: each.name)
    with gr.Row():
        method = gr.Dropdown(
            [each.name for each in named], value=METHOD, label="Method", min_width=150
        )
        budget = gr.Slider(
            2, 100, BUDGET, step=1, label="Visual tokens kept, %", elem_id="budget", min_width=220
        )
    about = gr.HTML(about_method(METHOD), elem_id="about-method")
    return method, budget, about


def _choosing(example: Any, upload: Any, player: Any, question: Any, tries: Any) -> None:
    """Choosing another file shows it, and what can be asked about it."""
    outputs = [upload, player, question, tries]
    quick: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
    example.change(polite(choose), [example, upload], outputs, **quick)
    upload.change(polite(take), upload, player, **quick)


def choose(example: str, upload: str | None) -> tuple[Any, ...]:
    """Another example, or room for an upload."""
    if example == examples.OWN:
        return gr.File(visible=True), take(upload), gr.skip(), gr.Dataset(samples=[])
    asked = examples.questions(example)
    samples = gr.Dataset(samples=[[each] for each in asked])
    shown = views.player(str(examples.CLIPS / example))
    return gr.File(visible=False), shown, asked[0], samples


def take(upload: str | None) -> str:
    """Show an upload, or say why it is none."""
    if not upload:
        return views.note("Choose a file: mp4, webm, mov, mkv, avi, gif, png, jpg, webp.")
    return views.player(upload, uploaded=True)


def about_method(name: str) -> str:
    """What a method does, and where it comes from."""
    found = {each.name: each for each in asking.offered()}
    return views.about_method(found[name])


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
    """Answer with all tokens and with fewer.

    While the slider moves, the answer with all tokens is the one of before.
    """
    path, spec = asking.chosen(example, upload), asking.spec_of(method, budget)
    media = shelf.read(path) if example == examples.OWN else path
    about = (path, question.strip())
    if fresh or before is None or before[0] != about:
        base, fast = asking.answers(shelf, media, question, [None, spec])
    else:
        base = before[1]
        (fast,) = asking.answers(shelf, media, question, [spec], SLIDING)
    right = examples.right_answer(example or "", question)
    return views.cards(base, fast, right), views.frames(base, fast), (about, base)


def answer(shelf: Shelf, example: str, question: str, reduce: str) -> dict[str, Any]:
    """Answer a question about an example; "" as `reduce` keeps all tokens."""
    if example not in dict(examples.names()).values():
        raise gr.Error("no such example", print_exception=False)
    media = str(examples.CLIPS / example)
    (shown,) = polite(asking.answers)(shelf, media, question, [reduce or None], 0.0)
    return {
        "answer": shown.text,
        "kept_tokens": shown.tokens,
        "visual_tokens": shown.of,
        "ttft_ms": round(shown.ttft_ms, 3),
    }
