"""The tab "Watch": a camera or an endless world in bounded memory, asked at any moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from html import escape
from typing import Any

import gradio as gr

import mmfast
from mmfast.demos import views
from mmfast.demos.shelf import Seats, Shelf
from mmfast.demos.views import one_line, polite

SMALL = "sink:64+window:1152+retrieve:16"  # of the embedded model: a window of 32 frames
PACE = 4.0  # frames of the world a second, each a second of its time
FACT_EVERY = 20.0  # seconds of the world from fact to fact
LOG = 50  # answers that are kept on the page


class VisitorStream:
    """A session of `video-stream`, what feeds it, and what was asked."""

    def __init__(self, session: Any, seed: int = 0) -> None:
        self.session = session
        self.world = mmfast.World(seed, every=FACT_EVERY)
        self.frame: Any = None  # the last one of the world
        self.seconds = 0.0  # of the stream
        self.log: list[tuple[float, str, str]] = []
        self.recalled: list[float] = []  # seconds of the frames that the last question read again
        self.error = ""
        self._began = time.monotonic()
        self._stop, self._thread = threading.Event(), None
        self._lock = threading.Lock()

    _thread: threading.Thread | None

    def push(self, frame: Any) -> None:
        with self._lock:  # events of one visitor may overtake each other
            now = time.monotonic() - self._began
            self.seconds = max(now, self.seconds + 1e-3)
            self.session.push(frame, self.seconds)

    def play(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._feed, name="mmfast-demo-world", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _feed(self) -> None:
        start = self.seconds + (1.0 if self.frame is not None else 0.0)
        try:
            for frame, seconds in self.world.frames(start=start):
                due = time.monotonic() + 1 / PACE
                self.session.push(frame, seconds)
                self.frame, self.seconds = frame, seconds
                if self._stop.wait(max(due - time.monotonic(), 0)):
                    return
        except mmfast.MmfastError as error:
            self.error = str(error)

    @property
    def playing(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._stop.is_set()

    def ask(self, question: str) -> Iterator[str]:
        """The answer as it grows; it is added to the log at its end."""
        if not self.session.stats()["frames"]:
            raise mmfast.MmfastError("nothing was seen yet; start the world or the camera first")
        at, text = self.seconds, ""
        with self.session.ask(question, max_new_tokens=32) as reply:
            self.recalled = [frame.time or 0.0 for frame in reply.recalled]
            for delta in reply:
                text += delta
                yield text
        self.log = [*self.log, (at, question, text.strip())][-LOG:]

    def shown(self) -> list[tuple[str, int, str, float]]:
        """Facts of the world that were on screen: name, number, corner, seconds since."""
        events = self.world.events(self.seconds) if self.frame is not None else []
        rows = [(e.name, e.number, e.corner, self.seconds - e.stop) for e in events]
        return [row for row in rows if row[3] >= 0][::-1]

    def figures(self) -> list[tuple[str, str]]:
        stats = self.session.stats()
        memory = stats["memory"]
        archive = memory.get("archive", {})
        stored = sum(archive.get("bytes", {}).values())
        frames = max(stats["units"], 1)
        tiers = [f"{tier} {count:,}" for tier, count in archive.get("blocks", {}).items()]
        late = sum(stats["source_events"].get(name, 0) for name in ("late", "repeated"))
        return [
            ("frames seen", f"{stats['frames']:,}"),
            ("stream time", _clock(stats["seconds"] or 0.0)),
            ("tokens seen", f"{stats['tokens']:,}"),
            ("live tokens", f"{memory['live_tokens']:,}"),
            ("window", (memory["spec"] or "everything").replace("+", " + ")),
            ("archived frames", f"{sum(archive.get('blocks', {}).values()):,}"),
            ("by tier", " · ".join(tiers) or "no archive"),
            ("left out", f"{stats['dropped'] + stats['gated'] + late:,} frames"),
            ("read again", _read_again(self.recalled)),
            ("memory", f"{(memory['bytes'] + stored) / 1e6:,.1f} MB"),
            ("work per frame", f"{(stats['encode_ms'] + stats['prefill_ms']) / frames:,.0f} ms"),
            ("questions", f"{stats['questions']:,}"),
        ]

    def close(self) -> None:
        self._stop.set()
        self.session.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)


def _read_again(times: list[float]) -> str:
    """Tell how many frames the last question read again, and between which times they lie."""
    if not times:
        return "no frame yet"
    return f"{len(times)} frames of {_clock(min(times))} to {_clock(max(times))}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


WORLD, CAMERA = "generated world", "camera"
FRAME_EVERY, LONGEST = 0.5, 900  # seconds between two frames of a camera, and of one recording
TICK = 0.7
NO_COUNTERS = "Counters come here once frames do."
MEMORIES = {
    "window of 32 frames + retrieval": SMALL,
    "window of 32 frames alone": "sink:64+window:1152",
}
ASKED = (
    "What number is on the screen now?",
    "What colour is the circle now?",
    "What shape is the white object now?",
)


class WatchEvents:
    """Handlers of the tab's events; each visitor has a stream of their own."""

    def __init__(self, shelf: Shelf, seats: Seats[VisitorStream]) -> None:
        self.shelf, self.seats = shelf, seats

    def of(self, request: gr.Request, memory: str = "") -> VisitorStream:
        """The visitor's stream, begun if there is none."""
        spec: dict[str, Any] = {"memory": MEMORIES.get(memory, SMALL)}
        if self.shelf.model is not None:  # frames of other models have other numbers of tokens
            spec = {}
        return self.seats.take(
            str(request.session_hash), lambda: VisitorStream(self.shelf.stream().open(**spec))
        )

    def play(self, memory: str, request: gr.Request) -> tuple[Any, ...]:
        self.of(request, memory).play()
        return gr.Timer(active=True), *self.look(request)

    def pause(self, request: gr.Request) -> tuple[Any, ...]:
        stream = self.seats.get(str(request.session_hash))
        if stream is not None:
            stream.pause()
        return gr.Timer(active=False), *self.look(request)

    def forget(self, request: gr.Request) -> tuple[Any, ...]:
        self.seats.leave(str(request.session_hash))
        return gr.Timer(active=False), *self.look(request), log([])

    def frame(self, picture: Any, memory: str, request: gr.Request) -> str:
        if picture is not None:
            self.of(request, memory).push(picture)
        return self.look(request)[1]

    def look(self, request: gr.Request) -> tuple[str, str, str]:
        stream = self.seats.get(str(request.session_hash))
        if stream is None:
            return screen(None), views.note(NO_COUNTERS), shown([])
        counters = views.facts(stream.figures(), "Counters")
        wrong = f'<p class="mm-other mm-verdict">{escape(one_line(stream.error))}</p>'
        return (
            screen(stream.frame),
            counters + (wrong if stream.error else ""),
            shown(stream.shown()),
        )

    def ask(self, question: str, request: gr.Request) -> Iterator[str]:
        """Answer from what was seen so far, as it is written."""
        stream = self.seats.get(str(request.session_hash))
        try:
            if stream is None:
                raise mmfast.MmfastError("nothing was seen yet; start the world or the camera")
            before, at = list(stream.log), stream.seconds
            for text in stream.ask(question):
                yield log([*before, (at, question, text)])
        except mmfast.MmfastError as error:
            message = escape(one_line(error))
            raise gr.Error(message, print_exception=False) from None

    def choose(self, which: str, request: gr.Request) -> list[Any]:
        """Show the parts of the world or the camera, begin anew."""
        self.leave(request)
        world = which == WORLD
        updates = [gr.update(visible=world) for _ in range(3)]
        rest = (views.note(NO_COUNTERS), shown([]), log([]))
        return [*updates, gr.update(visible=not world), gr.Timer(active=False), *rest]

    def leave(self, request: gr.Request) -> None:
        self.seats.leave(str(request.session_hash))


def watch_tab(shelf: Shelf, blocks: Any) -> WatchEvents:
    events = WatchEvents(shelf, Seats())
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
            counters = gr.HTML(views.note(NO_COUNTERS), elem_id="counters")
            question = gr.Textbox(ASKED[0], label="Question", max_length=500, elem_id="watch-q")
            tries = views.suggestions(question, suggestions(), "Questions about the world")
            ask = gr.Button("Ask", variant="primary", elem_id="watch-ask")
            answers = gr.HTML(log([]), elem_id="watch-log")
            with gr.Accordion("What the world has shown (the truth)", open=False):
                truth = gr.HTML(shown([]))
    timer = gr.Timer(TICK, active=False)
    seen = [world, counters, truth]
    play.click(polite(events.play), memory, [timer, *seen], **views.QUICK)
    pause.click(events.pause, None, [timer, *seen], **views.QUICK)
    forget.click(events.forget, None, [timer, *seen, answers], **views.QUICK)
    timer.tick(events.look, None, seen, queue=False, **views.QUICK)
    of_world = [world, play, pause]
    begun = [*of_world, camera, timer, counters, truth, answers]
    source.change(events.choose, source, begun, **views.QUICK)
    camera.stream(
        polite(events.frame), [camera, memory], counters, stream_every=FRAME_EVERY,
        time_limit=LONGEST, concurrency_limit=events.seats.most, **views.QUICK,
    )  # fmt: skip
    gr.on([ask.click, question.submit], events.ask, question, answers, **views.QUICK)
    tries.click(lambda row: row[0], tries, question, queue=False, **views.QUICK).then(
        events.ask, question, answers, **views.QUICK
    )
    blocks.unload(events.leave)
    return events


def suggestions() -> list[str]:
    facts = mmfast.World(0, every=FACT_EVERY).events()[:3]
    return [*ASKED, *(f"What number is at the {fact.name}?" for fact in facts[:2]),
            f"In which corner is the {facts[2].name}?"]  # fmt: skip


def screen(frame: Any) -> str:
    if frame is None:
        return views.note("Press Start: moving shapes, and now and then a thing with a number.")
    from PIL import Image

    picture = Image.fromarray(frame).resize((288, 288), Image.Resampling.NEAREST)
    return (
        f'<img class="mm-screen" src="{views.uri(picture)}" alt="The world as it is now">'
        '<p class="mm-soft">Four times as fast as it lives.</p>'
    )


def shown(rows: list[tuple[str, int, str, float]]) -> str:
    """Show the facts of the past that can be asked about."""
    if not rows:
        return views.note("A fact is shown every 20 seconds of the world.")
    body = "".join(
        views.row(name, str(number), escape(corner), f"{age:.0f} s ago")
        for name, number, corner, age in rows
    )
    return views.table(("thing", "number", "corner", "when"), body, "What was shown")


def log(rows: list[tuple[float, str, str]]) -> str:
    lines = "".join(
        f"<li><span class=mm-soft>{_clock(at)} · {escape(question)}</span>"
        f"<strong>{escape(answer)}</strong></li>"
        for at, question, answer in reversed(rows)
    )
    return f'<ol class="mm-log" role="log" aria-label="Answers">{lines}</ol>'
