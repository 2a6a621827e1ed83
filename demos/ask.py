"""The tab "Ask": one question answered with all visual tokens and with fewer, side by side."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr

import mmfast
from mmfast.demos import examples, views
from mmfast.demos.examples import CLIPS, OWN, START
from mmfast.demos.shelf import FRAMES, Shelf
from mmfast.demos.views import Run, polite

MEDIA = [".mp4", ".webm", ".mov", ".mkv", ".avi", ".gif", ".png", ".jpg", ".jpeg", ".webp"]
MOST = 32  # frames


class MediaInputs(NamedTuple):
    """Components that choose what is asked about."""

    upload: Any
    example: Any
    player: Any
    frames: Any
    changed: Any  # hidden; the page presses it as soon as a file is given, also one it refuses

    def wire(self, shown: list[Any], question: Any, tries: Any = None) -> None:
        """Show what is chosen; the results `shown` are of another one, and go."""
        clear: dict[str, Any] = {**views.QUICK, "queue": False}
        self.changed.click(views.emptied, None, shown, **clear)
        asked = [question] if tries is None else [question, tries]
        given, outputs = [self.example, self.upload], [self.player, self.frames, *asked]
        choose = polite(choose_several if tries is None else choose_one)
        chosen = self.example.input(views.emptied, None, shown, **clear)
        chosen.then(choose, given, outputs, **views.QUICK)
        stale = [self.example, self.player, *asked[1:], *shown]
        taken = self.upload.change(partial(own, tries is not None), None, stale, **clear)
        taken.then(polite(take), given, [self.player, self.frames], **views.QUICK)


def media_inputs(name: str) -> MediaInputs:
    upload = gr.File(
        label="Your own clip or picture, up to 50 MB",
        file_types=MEDIA,
        height=170,
        elem_id=f"{name}-upload",
        elem_classes="mm-upload",
    )
    example = gr.Dropdown(
        [*examples.names(), OWN], value=START, label="Clip or picture", filterable=False
    )
    player = gr.HTML(views.player(str(CLIPS / START)))
    frames = gr.Slider(
        1, MOST, FRAMES, step=1, label="Frames read from the clip", elem_id=f"{name}-frames",
        info="A long clip loses what happens between them.",
    )  # fmt: skip
    changed = gr.Button(visible="hidden", elem_id=f"{name}-upload-changed")
    return MediaInputs(upload, example, player, frames, changed)


def own(tries: bool) -> tuple[Any, ...]:
    """The upload is what is asked about now; what was shown before is stale, its questions too."""
    return OWN, take(OWN, None)[0], *[_tries([])] * tries, *views.emptied()


def _tries(asked: list[str]) -> Any:
    return gr.Dataset(samples=[[each] for each in asked], visible=bool(asked))


def chosen(example: str | None, upload: str | None) -> str:
    if example and example != OWN:
        return str(CLIPS / example)
    if not upload:
        raise mmfast.MmfastError("there is no file yet; pick an example, or upload your own")
    return upload


def opened(shelf: Shelf, example: str | None, upload: str | None, frames: float) -> tuple[str, Any]:
    """The path of what is chosen, and that or its pixels as a pipeline takes it."""
    path = chosen(example, upload)
    media, note = shelf.read(path, int(frames)) if example == OWN else (path, "")
    if note:  # a pipeline has notes of its own on a file
        gr.Warning(note)
    return path, media


def take(example: str | None, upload: str | None) -> tuple[str, Any]:
    """The player, and the control of frames where it is a clip."""
    if example == OWN and not upload:
        return views.note(
            "Choose a file: mp4, webm, mov, mkv, avi, gif, png, jpg, webp."
        ), gr.skip()
    path = chosen(example, upload)
    shown = views.player(path, uploaded=example == OWN)
    return shown, gr.Slider(visible=mmfast.kind_of(path) == "video")


def choose_one(example: str, upload: str | None) -> tuple[Any, ...]:
    if example == OWN:
        return *take(example, upload), gr.skip(), _tries([])
    asked = examples.questions(example)
    return *take(example, upload), asked[0], _tries(asked)


def choose_several(example: str, upload: str | None) -> tuple[Any, ...]:
    asked = gr.skip() if example == OWN else "\n".join(examples.questions(example))
    return *take(example, upload), asked


ROUNDS, SECONDS = 7, 4.0  # most timed rounds, and the time after which no further one begins
_NOT_OFFERED = ("pixel",)  # drops flat patches before the tower and takes no budget
Rows = list[dict[str, Any]]  # of `mmfast.time_answers`


@dataclass(frozen=True)
class Shown:
    """One way of answering, and what it kept."""

    spec: str | None  # what reduced; None is nothing
    text: str  # the answer
    tokens: int  # visual tokens left after the last stage
    of: int  # visual tokens without any reduction
    frames: tuple[tuple[Any, str], ...]  # `(picture, caption)` of every frame the model saw
    notes: tuple[str, ...] = ()  # such as on a picture that the embedded model does not know


def spec_of(method: str, percent: float) -> str:
    return f"{method}:{min(max(percent, 1), 100) / 100:.2f}"


def offered() -> list[Any]:
    """Methods that take a budget and visual tokens."""
    return [m for m in mmfast.methods("reducer") if m.sites[0] not in _NOT_OFFERED]


def pipe_for(shelf: Shelf, media: Any, spec: str | None, frames: int = FRAMES) -> Any:
    """The pipeline that answers about a medium of the page: an example's path, a file or pixels."""
    return shelf.visual(mmfast.kind_of(media), spec, frames, examples.reader(media))


def glimpse(shelf: Shelf, media: Any, question: str, spec: str | None, frames: int) -> Shown:
    """One answer, not timed; a spec of None keeps all tokens."""
    pipe = pipe_for(shelf, media, spec, frames)
    return _shown(pipe, media, spec, pipe(media, question))


def timed(
    shelf: Shelf, media: Any, question: str, spec: str, frames: int = FRAMES, **how: Any
) -> tuple[Shown, Shown, Rows]:
    """Answer with all tokens and with `spec` in turn, several times; `how` is `time_answers`'."""
    specs = {"all": None, "spec": spec}
    pipes = {name: pipe_for(shelf, media, each, frames) for name, each in specs.items()}
    how = {"rounds": ROUNDS, "seconds": SECONDS, "warm": False, **how}
    answers, rows = mmfast.time_answers(pipes, media, question, **how)
    base, fast = (_shown(pipes[name], media, specs[name], answers[name]) for name in specs)
    return base, fast, rows


def _shown(pipe: Any, media: Any, spec: str | None, answer: Any) -> Shown:
    frames = tuple(pipe.overlay(media, answer.trace, sheets=False)[0])
    counts = answer.kept_tokens, answer.visual_tokens
    return Shown(spec, answer.text, *counts, frames, tuple(answer.noted.get("notes", ())))


def same(first: str, second: str) -> bool:
    return " ".join(first.lower().split()) == " ".join(second.lower().split())


METHOD, BUDGET = "divprune", 25


def ask_tab(shelf: Shelf, blocks: Any) -> None:
    with gr.Row(equal_height=False):
        with gr.Column(scale=4, min_width=300):
            media = media_inputs("ask")
            question = gr.Textbox(
                examples.questions(START)[0], label="Question", max_length=500, submit_btn=False
            )
            asked = examples.questions(START)
            tries = views.suggestions(question, asked, "Questions about this one")
        with gr.Column(scale=6, min_width=300):
            method, budget, about = _method()
            with gr.Row():
                ask = gr.Button("Ask", variant="primary", elem_id="ask")
                stop = gr.Button("Stop", variant="stop", elem_id="ask-stop", visible=False)
            result = gr.HTML(views.note(views.EMPTY), elem_id="answers")
            pictures = gr.HTML("", elem_id="frames")
            code = gr.HTML(copies(shelf, START, None, asked[0], METHOD, BUDGET, FRAMES))
    before, run = gr.State(None, time_to_live=3600), gr.State(Run())
    settings = [media.example, media.upload, question, method, budget, media.frames]
    shown = [result, pictures, before]
    tab = Answers(shelf)
    picked = tries.click(lambda row: row[0], tries, question, **views.QUICK, queue=False)
    picked.then(None, None, None, js="() => document.querySelector('#ask').click()")
    views.stoppable(
        [ask.click, question.submit], polite(tab.fresh), [*settings, run], shown, stop, run
    )
    how: dict[str, Any] = {**views.BUSY, "api_visibility": "private"}
    live = {**how, "trigger_mode": "always_last", "show_progress": "hidden"}
    slides = [budget.input, method.input, media.frames.input]
    moved = gr.on(slides, polite(tab.slide), [*settings, before], shown, **live)
    moved.failure(views.failed, None, shown, **views.QUICK)
    method.change(about_method, method, about, api_visibility="private", queue=False)
    gr.on([each.change for each in settings], partial(copies, shelf), settings, code, **views.QUICK)
    media.wire(shown, question, tries)
    blocks.load(tab.arrival, None, shown, **how, show_progress_on=result)
    shelf.needed.append(tab.arrival)

    def answered(example: str, question: str, reduce: str) -> dict[str, Any]:
        """Answer a question about an example; "" as `reduce` keeps all tokens."""
        return answer(shelf, example, question, reduce)

    gr.api(answered, api_name="ask", **views.BUSY)


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


class Answers:
    """The events of the tab."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def arrival(self) -> tuple[str, str, Any]:
        """The first example, answered before anybody asks: once for all visitors."""
        try:
            return self.shelf.once("arrival", self._first)  # type: ignore[no-any-return]
        except mmfast.MmfastError:
            return views.emptied()  # told when it is asked

    def _first(self) -> tuple[str, str, Any]:
        given = (START, None, examples.questions(START)[0], METHOD, BUDGET, FRAMES)
        if self.shelf.model is not None:  # nobody waits for the timing of a large model
            return self.slide(*given, None)
        return self.fresh(*given, Run())

    def fresh(
        self,
        example: str | None,
        upload: str | None,
        question: str,
        method: str,
        budget: float,
        frames: float,
        run: Run,
        progress: Any = gr.Progress(),  # noqa: B008 (Gradio looks for it here)
    ) -> tuple[str, str, Any]:
        """Answer both ways, in turn, and time it."""
        path, media = opened(self.shelf, example, upload, frames)
        spec, tick = spec_of(method, budget), run.tick(progress)
        base, fast, rows = timed(self.shelf, media, question, spec, int(frames), tick=tick)
        right = examples.right_answer(example or "", question)
        about = (path, question.strip(), frames)
        html = cards(base, fast, rows, right) + real_size(method, budget)
        return html, pictures_of(base, fast), (about, base)

    def slide(
        self,
        example: str | None,
        upload: str | None,
        question: str,
        method: str,
        budget: float,
        frames: float,
        before: Any,
    ) -> tuple[str, str, Any]:
        """Answer once with fewer tokens; the answer with all tokens is that of before."""
        path, media = opened(self.shelf, example, upload, frames)
        about, spec = (path, question.strip(), frames), spec_of(method, budget)
        known = before is not None and before[0] == about
        look = partial(glimpse, self.shelf, media, question, frames=int(frames))
        base, fast = before[1] if known else look(None), look(spec)
        right = examples.right_answer(example or "", question)
        html = cards(base, fast, [], right) + real_size(method, budget)
        return html, pictures_of(base, fast), (about, base)


def answer(shelf: Shelf, example: str, question: str, reduce: str) -> dict[str, Any]:
    if example not in dict(examples.names()).values():
        raise gr.Error("no such example", print_exception=False)
    pipe = pipe_for(shelf, str(CLIPS / example), reduce or None)
    found = polite(pipe.__call__)(str(CLIPS / example), question)
    tokens = {"kept_tokens": found.kept_tokens, "visual_tokens": found.visual_tokens}
    return {"answer": found.text, **tokens, "ttft_ms": round(found.ttft_ms, 3), **found.noted}


def _kind(path: str) -> str:
    try:
        return mmfast.kind_of(path)
    except mmfast.MmfastError:  # told where the file is shown
        return "video"


def copies(
    shelf: Shelf,
    example: str | None,
    upload: str | None,
    question: str,
    method: str,
    budget: float,
    frames: float,
) -> str:
    """Buttons that copy the code of these settings."""
    spec, own = spec_of(method, budget), example == OWN
    name = Path(upload).name if own and upload else "clip.mp4" if own else str(example)
    reader = None if own else examples.reader(str(CLIPS / name))
    model = reader if shelf.model is None else shelf.source
    given = {} if model is None else {"model": model}
    given |= {key: str(value) for key, value in shelf.place.items() if value not in (None, "auto")}
    given |= {"reduce": spec}
    kind = _kind((upload or "") if own else str(CLIPS / name))
    options = "".join(f", {key}={value!r}" for key, value in given.items())
    place = repr(name) if own else f"str(files('mmfast.assets') / 'clips' / {name!r})"
    python = (
        ("" if own else "from importlib.resources import files\n\n")
        + f"import mmfast\n\npipe = mmfast.pipeline('{kind}-qa'{options}, frames={frames:.0f})\n"
        f"answer = pipe({place}, {question!r})\n"
        "print(answer, answer.kept_tokens, answer.ttft_ms)\n"
    )
    folder = '"$(python -c "import mmfast.assets as a; print(*a.__path__)")"/clips/'
    place = shlex.quote("./" * name.startswith("-") + name) if own else folder + shlex.quote(name)
    given = {"compare": given.pop("reduce"), **given}
    flags = "".join(f" --{key} {shlex.quote(value)}" for key, value in given.items())
    asked = shlex.quote(question)
    line = f"mmfast ask {place} {asked} --frames {frames:.0f}{flags}\n"
    buttons = "".join(
        f'<button type="button" class="mm-button" data-copy="{escape(text)}">Copy as {label}'
        "</button>"
        for label, text in (("Python", python), ("CLI", line))
    )
    return (
        f'<div class="mm-copies">{buttons}<details class="mm-more"><summary>Show the code</summary>'
        f"<pre>{escape(python)}\n{escape(line)}</pre></details></div>"
    )


LEGEND = (
    ("as it was", "kept"),
    ("same colour", "merged into one token; its place is framed"),
    ("dark", "dropped"),
    ("pale", "partly mixed with others"),
)


def cards(base: Shown, fast: Shown, rows: Rows, right: str | None) -> str:
    """Both answers; without `rows` nothing was timed."""
    agree = same(base.text, fast.text)
    word = "Same answer" if agree else "Another answer"
    verdict = f"{word} with {fast.tokens / max(fast.of, 1):.0%} of the visual tokens."
    known = "" if right is None else f' <span class="mm-soft">Right is: {escape(right)}.</span>'
    first = next((row for row in rows if row["stage"] == "first token"), None)
    left = _card("All tokens", base, "" if first is None else f"{first['all_ms']:,.0f} ms", "")
    ms = "" if first is None else f"{first['median_ms']:,.0f} ms <small>{gain(first)}</small>"
    card = _card(fast.spec or "All tokens", fast, ms, f" <small>of {fast.of:,}</small>")
    notes = dict.fromkeys((*base.notes, *fast.notes))
    told = "".join(f'<p class="mm-soft">{escape(each)}</p>' for each in notes)
    return (
        f'<div class="mm-cards">{left}{card}</div>'
        f'<p class="mm-verdict {"mm-same" if agree else "mm-other"}" role="status">'
        f"<strong>{verdict}</strong>{known}</p>{told}{_stages(rows)}"
    )


def gain(row: dict[str, Any]) -> str:
    """Return the speed-up, or "=" within the noise."""
    return "=" if row["equal"] else f"{row['speedup']:.2f}x"


def _card(title: str, shown: Shown, ms: str, of: str) -> str:
    return (
        f'<section class="mm-card{" mm-fast" if of else ""}"><h3>{escape(title)}</h3>'
        f'<p class="mm-answer">{escape(shown.text) or "(no answer)"}</p><dl>'
        f"<div><dt>visual tokens</dt><dd>{shown.tokens:,}{of}</dd></div>"
        f"<div><dt>first token after</dt><dd>{ms or '<small>not timed</small>'}</dd></div>"
        "</dl></section>"
    )


def _stages(rows: Rows) -> str:
    if not rows:
        return '<p class="mm-soft">Answered once, not timed: press Ask for medians.</p>'
    first = next(row for row in rows if row["stage"] == "first token")
    lines = "".join(
        views.row(
            row["stage"], f"{row['all_ms']:,.1f}", f"{row['median_ms']:,.1f}",
            f"{row['noise']:.0%}", gain(row),
        )
        for row in rows
    )  # fmt: skip
    heads = ("stage", "all tokens, ms", "fewer, ms", "noise", "faster")
    equal = " It is within the noise: no difference." if first["equal"] else ""
    return (
        f'<p class="mm-soft mm-timed">Medians of {first["n"]} rounds, both ways in turn; noise '
        f"{first['noise']:.0%}, from all tokens run twice a round.{equal}</p>"
        "<details class=mm-more><summary>Where the time went</summary>"
        f"{views.table(heads, lines, 'Milliseconds per stage')}"
        '<p class=mm-soft>"=" is a difference within the noise. The embedded model is so small '
        "that reading and encoding take most of the time.</p></details>"
    )


def real_size(method: str, percent: float) -> str:
    """Measured rows of a real model's shape at the budget that is nearest to the chosen one."""
    rows = examples.real_rows(percent / 100)
    whole, known = rows[0], [row for row in rows[1:] if row["method"] == method]
    share = whole["share"]
    cells = "".join(
        views.row(
            row["reduce"] or "all tokens", f"{row['kept']:,}", f"{row['median_ms']:,.0f}",
            "" if row["reduce"] is None else gain(row), f"{row['decode_ms']:,.0f}",
        )
        for row in [whole, *(known or rows[1:])]
    )  # fmt: skip
    which = f"at {share:.0%}, the measured budget nearest to {percent:.0f}%"
    missing = "" if known else f" {escape(method)} was not measured; these were."
    heads = ("kept", "tokens", "prompt, ms", "faster", "a token, ms")
    return (
        '<section class="mm-real"><h3>The same saving at a real size</h3>'
        f"{views.table(heads, cells, 'Measured at a real size')}"
        f"<p class=mm-soft>Not run here: stored measurements of the 0.5B shape of {whole['preset']}"
        f" ({whole['frames']} frames, {whole['dtype']}, {whole['threads']} thread of an "
        f"{escape(whole['processor'])}, {whole['date']}), {which}.{missing}</p></section>"
    )


def pictures_of(base: Shown, fast: Shown) -> str:
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
    head, _, rest = line.partition(": ")
    if not head.isdigit():
        return f"{head.capitalize()}: {rest}"
    return f"Frame {number + 1} of {count}: {rest}" if count > 1 else rest


_SIGNALS = {"x": "features", "attn": "attention", "query": "the question", "rope": "positions"}


def about_method(name: str) -> str:
    method = next(each for each in offered() if each.name == name)
    paper = views.link(method) or "a baseline, no paper"
    needs = ", ".join(_SIGNALS.get(name, name.replace("_", " ")) for name in method.needs)
    return f'<p class="mm-soft">{escape(method.summary)} Reads: {escape(needs)}. {paper}</p>'
