"""The demo as a page, and where it is mounted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import Any

import gradio as gr

from mmfast.demos import page
from mmfast.demos.about_tab import about_tab
from mmfast.demos.ask_tab import ask_tab
from mmfast.demos.compare_tab import compare_tab
from mmfast.demos.quota import UploadQuota
from mmfast.demos.shelf import Shelf
from mmfast.demos.voice_socket import VoiceSocket
from mmfast.demos.voice_tab import voice_tab
from mmfast.demos.watch_tab import watch_tab

WAITING = 64  # events of visitors that may wait; those beyond are told to come back
LARGEST = "50mb"  # of an upload
SWEEP = (600, 3600)  # every so many seconds, files older than so many are removed


def build(shelf: Shelf) -> Any:
    """All tabs on one page."""
    return _in_a_loop(lambda: _build(shelf))


def _in_a_loop(make: Callable[[], Any]) -> Any:
    """Call it while an event loop runs: Gradio opens one a lock otherwise and closes none."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with closing(asyncio.new_event_loop()) as loop:
            return loop.run_until_complete(_called(make))
    return make()


async def _called(make: Callable[[], Any]) -> Any:
    return make()


def _build(shelf: Shelf) -> Any:
    with gr.Blocks(title=page.TITLE, analytics_enabled=False, delete_cache=SWEEP) as blocks:
        gr.HTML(page.HEAD)
        with gr.Tabs():
            with gr.Tab("Ask", id="ask"):
                ask_tab(shelf)
            with gr.Tab("Compare", id="compare"):
                compare_tab()
            with gr.Tab("Watch", id="watch"):
                watch_tab(shelf, blocks)
            with gr.Tab("Voice", id="voice"):
                voice_tab(shelf)
            with gr.Tab("About", id="about"):
                about_tab(shelf)
        blocks.load(shelf.warm_soon, api_visibility="private", queue=False)
    blocks.queue(max_size=WAITING, default_concurrency_limit=4)
    blocks.has_launched = True  # else a mounted page takes any file of this machine for an upload
    for block in blocks.blocks.values():
        _local(block)
    return blocks


def _local(block: Any) -> None:
    """What a visitor gives is uploaded: no address is fetched for anybody."""
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
    read: Callable[[str], Any] | None = None,
    shelf: Shelf | None = None,
    **options: Any,
) -> Any:
    """Put the demo on a FastAPI application.

    Args:
        app: The application; a WebSocket route for the voice tab is added to it, too.
        path: Where the page is.
        model: As for `mmfast.pipeline`; loaded when the first visitor needs it.
        device: As for `mmfast.pipeline`.
        dtype: As for `mmfast.pipeline`.
        read: Decodes an uploaded file to pixels, apart from this process; None decodes here.
        shelf: Models that are there already, instead of the four above.
        **options: Further options of `gradio.mount_gradio_app`, such as `auth_dependency`.

    Returns:
        The application.
    """
    shelf = Shelf(model, device, dtype, read) if shelf is None else shelf
    where = "/" + path.strip("/")
    socket = VoiceSocket(shelf, options.get("auth_dependency"))
    app.add_api_websocket_route(where.rstrip("/") + "/voice-socket", socket.serve)
    given: dict[str, Any] = {
        "show_error": False,  # what went wrong inside is no visitor's business
        "max_file_size": LARGEST,
        "footer_links": [],
        "run_history": False,
        "ssr_mode": False,
        "mcp_server": False,
        "enable_monitoring": False,
        "pwa": False,
        **page.dress(),
    }
    given |= options

    def mounted() -> Any:
        blocks = _build(shelf)
        app.add_middleware(UploadQuota, path=where, blocks=blocks)
        return gr.mount_gradio_app(app, blocks, path=where, **given)

    return _in_a_loop(mounted)
