"""The tab "Watch": a camera or an endless world in bounded memory, asked at any moment."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import gradio as gr

import mmfast
from mmfast.demos import views
from mmfast.demos.polite import one_line, polite
from mmfast.demos.seats import Seats
from mmfast.demos.shelf import Shelf
from mmfast.demos.viewing import SMALL, DemoViewing

WORLD, CAMERA = "generated world", "camera"
EVERY, LONGEST = 0.5, 900  # seconds between two frames of a camera, and of one recording
TICK = 0.7
MEMORIES = {
    "window of 32 frames + retrieval": SMALL,
    "window of 32 frames alone": "sink:64+window:1152",
}
ASKED = (
    "What number is on the screen now?",
    "What colour is the circle now?",
    "What shape is the white object now?",
)


class Watching:
    """What the events of the tab do; each visitor has a stream of their own.

    Args:
        shelf: Where the models are.
        seats: Whose stream is whose, by Gradio's session.
    """

    def __init__(self, shelf: Shelf, seats: Seats[DemoViewing]) -> None:
        self.shelf, self.seats = shelf, seats

    def of(self, request: gr.Request, memory: str = "") -> DemoViewing:
        """The visitor's stream, begun if there is none."""
        spec: dict[str, Any] = {"memory": MEMORIES.get(memory, SMALL)}
        if self.shelf.model is not None:  # frames of other models have other numbers of tokens
            spec = {}
        return self.seats.take(
            str(request.session_hash), lambda: DemoViewing(self.shelf.stream().open(**spec))
        )

    def play(self, memory: str, request: gr.Request) -> tuple[Any, ...]:
        """Start the world."""
        self.of(request, memory).play()
        return gr.Timer(active=True), *self.look(request)

    def pause(self, request: gr.Request) -> tuple[Any, ...]:
        """Hold the world."""
        viewing = self.seats.get(str(request.session_hash))
        if viewing is not None:
            viewing.pause()
        return gr.Timer(active=False), *self.look(request)

    def forget(self, request: gr.Request) -> tuple[Any, ...]:
        """End the stream and begin with nothing."""
        self.seats.leave(str(request.session_hash))
        return gr.Timer(active=False), *self.look(request), log([])

    def frame(self, picture: Any, memory: str, request: gr.Request) -> str:
        """A frame of the camera came."""
        if picture is not None:
            self.of(request, memory).push(picture)
        return self.look(request)[1]

    def look(self, request: gr.Request) -> tuple[str, str, str]:
        """What the world shows, counters, and what it has shown."""
        viewing = self.seats.get(str(request.session_hash))
        if viewing is None:
            return screen(None), views.note("Counters come here once frames do."), shown([])
        counters = views.facts(viewing.figures(), "Counters")
        wrong = f'<p class="mm-other mm-verdict">{escape(one_line(viewing.error))}</p>'
        return (
            screen(viewing.frame),
            counters + (wrong if viewing.error else ""),
            shown(viewing.shown()),
        )

    def ask(self, question: str, request: gr.Request) -> Iterator[str]:
        """Answer from what was seen so far, as it is written."""
        viewing = self.seats.get(str(request.session_hash))
        try:
            if viewing is None:
                raise mmfast.MmfastError("nothing was seen yet; start the world or the camera")
            before, at = list(viewing.log), viewing.seconds
            for text in viewing.ask(question):
                yield log([*before, (at, question, text)])
        except mmfast.MmfastError as error:
            message = escape(one_line(error))
            raise gr.Error(message, print_exception=False) from None

    def leave(self, request: gr.Request) -> None:
        """The visitor closed the page."""
        self.seats.leave(str(request.session_hash))


def watch_tab(shelf: Shelf, blocks: Any) -> Watching:
    """Lay out the tab and wire it."""
    watching = Watching(shelf, Seats())
    with gr.Row(equal_height=False):
        with gr.Column(scale=4, min_width=300):
            source = gr.Radio([WORLD, CAMERA], value=WORLD, label="Watch")
            world = gr.HTML(screen(None), elem_id="world")
            camera = gr.Image(
                sources=["webcam"], streaming=True, label="Camera", visible=False, height=280,
                webcam_options=gr.WebcamOptions(mirror=False), type="numpy", elem_id="camera",
            )  # fmt: skip
            with gr.Row():
                play = gr.Button("Start", variant="primary", elem_id="play", min_width=90)
                pause = gr.Button("Pause", min_width=90, elem_id="pause")
                forget = gr.Button("Forget all", min_width=90)
            memory = gr.Dropdown(
                list(MEMORIES), value=next(iter(MEMORIES)), label="Memory",
                visible=shelf.model is None, info="of the next stream: Forget all, then Start",
            )  # fmt: skip
        with gr.Column(scale=6, min_width=300):
            counters = gr.HTML(watching_note(), elem_id="counters")
            question = gr.Textbox(ASKED[0], label="Question", max_length=500, elem_id="watch-q")
            tries = gr.Dataset(
                components=[question], samples=[[each] for each in suggestions()], type="values",
                label="Questions about the world", samples_per_page=8,
            )  # fmt: skip
            ask = gr.Button("Ask", variant="primary", elem_id="watch-ask")
            answers = gr.HTML(log([]), elem_id="watch-log")
            with gr.Accordion("What the world has shown (the truth)", open=False):
                truth = gr.HTML(shown([]))
    timer = gr.Timer(TICK, active=False)
    quick: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
    seen = [world, counters, truth]
    play.click(polite(watching.play), memory, [timer, *seen], **quick)
    pause.click(watching.pause, None, [timer, *seen], **quick)
    forget.click(watching.forget, None, [timer, *seen, answers], **quick)
    timer.tick(watching.look, None, seen, queue=False, **quick)
    _camera(watching, source, camera, [world, play, pause], memory, counters, timer)
    gr.on([ask.click, question.submit], watching.ask, question, answers, **quick)
    tries.click(lambda row: row[0], tries, question, queue=False, **quick).then(
        watching.ask, question, answers, **quick
    )
    blocks.unload(watching.leave)
    return watching


def _camera(
    watching: Watching,
    source: Any,
    camera: Any,
    of_world: list[Any],
    memory: Any,
    counters: Any,
    timer: Any,
) -> None:
    """Camera or world: one of them feeds the stream; another source begins another stream."""

    def choose(which: str, request: gr.Request) -> list[Any]:
        watching.leave(request)
        world = which == WORLD
        updates = [gr.update(visible=world) for _ in of_world]
        return [*updates, gr.update(visible=not world), gr.Timer(active=False), watching_note()]

    quick: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
    source.change(choose, source, [*of_world, camera, timer, counters], **quick)
    camera.stream(
        polite(watching.frame), [camera, memory], counters, stream_every=EVERY, time_limit=LONGEST,
        concurrency_limit=watching.seats.most, **quick,
    )  # fmt: skip


def suggestions() -> list[str]:
    """Questions about what the world shows now, and about its first facts."""
    facts = mmfast.World(0, every=20.0).events()[:3]
    return [*ASKED, *(f"What number is at the {fact.name}?" for fact in facts[:2]),
            f"In which corner is the {facts[2].name}?"]  # fmt: skip


def watching_note() -> str:
    """What stands where the counters will be."""
    return views.note("Counters come here once frames do.")


def screen(frame: Any) -> str:
    """The last frame of the world."""
    if frame is None:
        return views.note("Press Start: moving shapes, and now and then a thing with a number.")
    from PIL import Image

    picture = Image.fromarray(frame).resize((288, 288), Image.Resampling.NEAREST)
    return (
        f'<img class="mm-screen" src="{views.uri(picture)}" alt="The world as it is now">'
        '<p class="mm-soft">Four times as fast as it lives.</p>'
    )


def shown(rows: list[tuple[str, int, str, float]]) -> str:
    """What can be asked about the past, with the right answers."""
    if not rows:
        return views.note("A fact is shown every 20 seconds of the world.")
    body = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{number}</td><td>{escape(corner)}</td>"
        f"<td>{age:.0f} s ago</td></tr>"
        for name, number, corner, age in rows
    )
    return (
        '<div class="mm-scroll" tabindex="0" role="region" aria-label="What was shown"><table>'
        "<thead><tr><th scope=col>thing</th><th scope=col>number</th><th scope=col>corner</th>"
        f"<th scope=col>when</th></tr></thead><tbody>{body}</tbody></table></div>"
    )


def log(rows: list[tuple[float, str, str]]) -> str:
    """Questions and answers, the newest first."""
    lines = "".join(
        f"<li><span class=mm-soft>{int(at) // 60}:{int(at) % 60:02d} · {escape(question)}</span>"
        f"<strong>{escape(answer)}</strong></li>"
        for at, question, answer in reversed(rows)
    )
    return f'<ol class="mm-log" role="log" aria-label="Answers">{lines}</ol>'
