"""Parts of the page that several tabs show, and errors of visitors as one line."""

from __future__ import annotations

import base64
import functools
import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import gradio as gr

import mmfast


def player(path: str, uploaded: bool = False) -> str:
    kind, suffix = mmfast.kind_of(path), path.rsplit(".", 1)[-1].lower()
    if uploaded:
        source = "gradio_api/file=" + quote(path)
    else:
        data = base64.b64encode(Path(path).read_bytes()).decode()
        source = f"data:{'video/mp4' if suffix == 'mp4' else 'image/jpeg'};base64,{data}"
    if kind == "video" and suffix not in ("gif", "webp"):
        return (
            f'<video class="mm-player" src="{escape(source)}" controls loop muted autoplay '
            'playsinline aria-label="The clip"></video>'
        )
    return f'<img class="mm-player" src="{escape(source)}" alt="The picture">'


def uri(picture: Any) -> str:
    """A PIL image as a data URI, so that nothing is stored."""
    file = io.BytesIO()
    picture.save(file, "webp", quality=88)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()


def link(method: Any) -> str:
    """A link to the paper of one of `mmfast.methods`; empty for a baseline."""
    if not method.paper:
        return ""
    archive, where = (escape(part) for part in method.archive)
    text = f"{archive} {escape(method.paper)}"
    return f'<a href="{where}" target="_blank" rel="noopener noreferrer">{text}</a>'


def table(heads: Sequence[str], rows: str, label: str, kind: str = "") -> str:
    """Put rows of HTML into a table that scrolls by itself."""
    columns = "".join(f"<th scope=col>{escape(head)}</th>" for head in heads)
    return (
        f'<div class="mm-scroll {kind}" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def row(head: str, *cells: str) -> str:
    """A row of a table; the cells are HTML."""
    rest = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr><th scope=row>{escape(head)}</th>{rest}</tr>"


def suggestions(question: Any, asked: Sequence[str], label: str) -> Any:
    """Questions to pick for the text box `question`."""
    samples = [[each] for each in asked]
    more: dict[str, Any] = {"samples_per_page": 8, "type": "values"}
    return gr.Dataset(components=[question], samples=samples, label=label, **more)


def note(text: str) -> str:
    return f'<p class="mm-empty">{escape(text)}</p>'


def facts(rows: Sequence[tuple[str, str]], title: str) -> str:
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in rows)
    return f'<dl class="mm-facts" aria-label="{escape(title)}">{cells}</dl>'


# Options of events: those that answer at once, and those that keep the model busy.
QUICK: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
BUSY: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1}
F = TypeVar("F", bound=Callable[..., Any])
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^/\s'\"]+/)+")


def one_line(error: object) -> str:
    return _FOLDERS.sub("", " ".join(str(error).split()))


def polite(fn: F) -> F:
    """Show an `MmfastError` of an event as a message on the page."""

    @functools.wraps(fn)
    def told(*args: Any, **options: Any) -> Any:
        try:
            return fn(*args, **options)
        except mmfast.MmfastError as error:
            message = escape(one_line(error))
            raise gr.Error(message, print_exception=False) from None

    return told  # type: ignore[return-value]


EMPTY = "The answers come here."


def emptied() -> tuple[str, str, None]:
    """Results of nothing: a text, pictures, and what is remembered of them."""
    return note(EMPTY), "", None


def failed() -> tuple[str, str, None]:
    """Results of work that ended in a message."""
    return note("No answer: the message tells why."), "", None


class Run:
    """Work for one visitor, which another event of the visitor ends."""

    stopped = False

    def tick(self, progress: Any) -> Callable[[int, int], None]:
        """Begin; returns what is called with (answers done, most of them) in between."""
        self.stopped = False

        def tick(done: int, total: int) -> None:
            if self.stopped:
                raise mmfast.MmfastError("stopped")
            progress((done, total), desc=f"{done} of {total} answers")

        return tick

    def stop(self) -> None:
        self.stopped = True


def stoppable(
    starts: list[Any], fn: Any, given: list[Any], shown: list[Any], stop: Any, run: Any
) -> None:
    """Wire work that shows its progress once, leaves nothing stale, and ends at the button `stop`.

    On a phone the page scrolls to the results, `shown`, of which the first has the progress.
    """
    reveal = f"() => {{ window.mmReveal('{shown[0].elem_id}'); return []; }}"
    quick: dict[str, Any] = {**QUICK, "queue": False}
    ready, begun = partial(gr.Button, visible=False), partial(gr.Button, visible=True)
    first = gr.on(
        starts, lambda: (begun(), "", *emptied()[1:]), None, [stop, *shown], js=reveal, **quick
    )
    where: dict[str, Any] = {"show_progress_on": shown[0], "api_visibility": "private"}
    work = first.then(fn, given, shown, **where, **BUSY)
    work.success(ready, None, stop, js=reveal, **quick)
    work.failure(lambda: (ready(), *failed()), None, [stop, *shown], js=reveal, **quick)

    def ended(run: Run) -> tuple[Any, ...]:
        run.stop()
        return ready(), note("Stopped."), *emptied()[1:]

    stop.click(ended, run, [stop, *shown], cancels=[work], **quick)
