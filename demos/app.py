"""The demo as a page: its look, its tabs, its limits on uploads, and where it is mounted."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.responses import PlainTextResponse

import mmfast
from mmfast.demos import views
from mmfast.demos.ask import ask_tab
from mmfast.demos.compare import compare_tab
from mmfast.demos.shelf import Shelf
from mmfast.demos.voice import VoiceSocket, voice_tab
from mmfast.demos.watch import watch_tab

TITLE = "mmfast"
HEAD = (
    '<header class="mm-head"><h1>mmfast</h1><p>Image, video and speech models that answer sooner, '
    "remember longer and cost less.</p></header>"
)
SCRIPTS = ("page.js", "voice.js")


def theme() -> Any:
    return gr.themes.Base(
        primary_hue="teal",
        secondary_hue="teal",
        neutral_hue="slate",
        radius_size="lg",
        font=("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"),
        font_mono=("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"),
    ).set(
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_text_color="white",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_label_text_color="*neutral_600",
        block_label_text_color_dark="*neutral_300",
        block_shadow="none",
        block_label_text_size="*text_sm",
    )


def dress() -> dict[str, Any]:
    here = files("mmfast.demos")
    scripts = "".join(here.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    css, phone = (
        here.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "phone.css")
    )
    # What Gradio makes of `css` does not hold inside @media.
    head = f"<style>{phone}</style><script>{scripts}</script>"
    return {"theme": theme(), "css": css, "head": head}


MOST = 1 << 30  # bytes of all files of visitors
AT_ONCE = 64 << 20  # bytes of one upload, and of one that does not say how long it is none


class UploadQuota:
    """ASGI middleware in front of uploads to a page: bounds each one, and all that lie there."""

    def __init__(
        self, app: Any, path: str, blocks: Any, most: int = MOST, at_once: int = AT_ONCE
    ) -> None:
        self._app, self._blocks, self._most, self._at_once = app, blocks, most, at_once
        self._path = path.rstrip("/") + "/"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not self._uploads(scope):
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        if not length.isdigit() or int(length) > self._at_once:
            text = f"an upload has up to {self._at_once >> 20} MB, and says how many"
            await PlainTextResponse(text, 413)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            await asyncio.to_thread(self.sweep)

    def _uploads(self, scope: Any) -> bool:
        path = str(scope.get("path", "")) if scope["type"] == "http" else ""
        return path.startswith(self._path) and path.rstrip("/").endswith("/upload")

    def sweep(self) -> int:
        """Remove the oldest files until the rest is within the limit; return their number."""
        sets = list(self._blocks.temp_file_sets)
        found = sorted(_known({str(name) for each in sets for name in set(each)} - self._kept()))
        total, gone = sum(size for _, size, _ in found), set[str]()
        for _, size, name in found:
            if total <= self._most:
                break
            with suppress(OSError):
                Path(name).unlink()
                Path(name).parent.rmdir()  # of this file alone, where it is empty now
            total -= size
            gone.add(name)
        for each in sets:
            each -= {name for name in set(each) if str(name) in gone}
        return len(gone)

    def _kept(self) -> set[str]:
        mine = (getattr(block, "keep_in_cache", ()) for block in self._blocks.blocks.values())
        return {str(name) for each in mine for name in each}


def _known(names: Iterable[str]) -> Iterable[tuple[float, int, str]]:
    for name in names:
        with suppress(OSError):
            found = Path(name).stat()
            yield found.st_mtime, found.st_size, name


TEXT = """
### What can be asked here

The models inside are small on purpose: they load in a second, answer on a laptop, and were
trained for this page's clips. They know nothing of the world outside.

* **Ask** and **Compare**: short clips of one to four moving shapes, and single frames of them.
  Colour, shape, number of objects, direction, which is faster, corner at the start or the end,
  which came first, and a two-digit number on the screen. The receipt is read by a model of its
  own. What is said of photos and real films is meaningless. A real checkpoint takes the place of
  the small ones with `mmfast demo --model Qwen/Qwen2.5-VL-7B-Instruct`.
* **Watch**: the same shapes without end. What is on the screen *now*, and the number or the
  corner of a thing that was shown for some seconds, however long ago.
* **Voice**: numbers, colours, shapes, motions, positions, times and short dialogue in English;
  other words are spelt, badly. It speaks in four voices.

### What happens to what you give

All work is done on the machine that serves this page; the page asks no other one for anything.
Uploads are removed after an hour at most, frames of the camera and sound of the microphone are
not kept at all, and a stream ends when its page is closed.

### What the figures mean

"First token after" is measured here and now, with this machine's other work: medians of both ways
in turn, and "=" where the difference is within the noise. "Same answer" compares the two texts.
Links to papers leave this machine when you follow them.
"""


def versions(shelf: Shelf) -> list[tuple[str, str]]:
    names = ("torch", "transformers", "gradio")
    found: list[tuple[str, Any]] = [("mmfast", mmfast.__version__), ("model", shelf.name)]
    return [*found, *((name, version(name)) for name in names),
            ("python", platform.python_version())]  # fmt: skip


WAITING = 64  # events of visitors that may wait; further ones are refused
LARGEST = "50mb"  # of an upload
OFF = dict.fromkeys(("run_history", "ssr_mode", "mcp_server", "enable_monitoring", "pwa"), False)
SWEEP = (600, 3600)  # every so many seconds, files older than so many are removed


def build(shelf: Shelf) -> Any:
    return _in_a_loop(lambda: _build(shelf))


def _in_a_loop(make: Callable[[], Any]) -> Any:
    """Call it while an event loop runs: Gradio opens one a lock otherwise and closes none."""

    async def called() -> Any:
        return make()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with closing(asyncio.new_event_loop()) as loop:
            return loop.run_until_complete(called())
    return make()


def _build(shelf: Shelf) -> Any:
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=SWEEP) as blocks:
        gr.HTML(HEAD)
        with gr.Tabs():
            with gr.Tab("Ask", id="ask"):
                ask_tab(shelf, blocks)
            with gr.Tab("Compare", id="compare"):
                compare_tab(shelf)
            with gr.Tab("Watch", id="watch"):
                watch_tab(shelf, blocks)
            with gr.Tab("Voice", id="voice"):
                voice_tab(shelf)
            with gr.Tab("About", id="about"):
                gr.Markdown(TEXT)
                gr.HTML(views.facts(versions(shelf), "Versions"))
        blocks.load(shelf.warm_soon, api_visibility="private", queue=False)
    blocks.queue(max_size=WAITING, default_concurrency_limit=4)
    blocks.has_launched = True  # else a mounted page takes any file of this machine for an upload
    for block in blocks.blocks.values():
        _local(block)
    return blocks


def _local(block: Any) -> None:
    """Accept uploads alone: no address is fetched for a visitor."""
    later, now = block.async_move_resource_to_block_cache, block.move_resource_to_block_cache

    async def moved_later(path: Any) -> Any:
        return await later(_uploaded(path))

    block.async_move_resource_to_block_cache = moved_later
    block.move_resource_to_block_cache = lambda path: now(_uploaded(path))


def _uploaded(path: Any) -> Any:
    if "://" in str(path):
        raise gr.Error("this page fetches nothing from elsewhere; upload the file")
    return path


def mount(
    app: Any,
    path: str = "/demo",
    *,
    model: Any = None,
    device: Any = None,
    dtype: Any = "auto",
    read: Callable[..., Any] | None = None,
    shelf: Shelf | None = None,
    **options: Any,
) -> Any:
    """Put the demo on a FastAPI application, and return that.

    The voice tab adds a WebSocket route. `model`, `device`, `dtype` are those of `mmfast.pipeline`;
    `read` is that of `Shelf`; `shelf` holds models that are there already, instead of these four.
    Further options go to `gradio.mount_gradio_app`, such as `auth_dependency`.
    """
    shelf = Shelf(model, device, dtype, read) if shelf is None else shelf
    where = "/" + path.strip("/")
    socket = VoiceSocket(shelf, options.get("auth_dependency"))
    app.add_api_websocket_route(where.rstrip("/") + "/voice-socket", socket.serve)
    given: dict[str, Any] = {
        "show_error": False,  # what went wrong inside is no visitor's business
        "max_file_size": LARGEST,
        "footer_links": [],
        **OFF,
        **dress(),
        **options,
    }

    def mounted() -> Any:
        blocks = _build(shelf)
        app.add_middleware(UploadQuota, path=where, blocks=blocks)
        return gr.mount_gradio_app(app, blocks, path=where, **given)

    return _in_a_loop(mounted)
