"""`mmfast demo`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from mmfast.cli_options import Device, Dtype, Model
from mmfast.core.errors import MmfastError

HOST, PORT = "127.0.0.1", 7860


def demo(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all.")] = HOST,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = PORT,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = "auto",
    share: Annotated[
        bool, typer.Option("--share", help="A public address through gradio.live: not private.")
    ] = False,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = True,
) -> None:
    """Serve the demo page: ask, compare, watch, talk; nothing leaves this machine."""
    from mmfast.cli_output import quiet

    quiet()
    app = _application(model, device, dtype)
    socket = _listen(host, port)
    number = socket.getsockname()[1]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    where = f"http://{f'[{shown}]' if ':' in shown else shown}:{number}/"
    print(f"mmfast demo: {where} (Ctrl-C ends it)", flush=True)
    if share:
        print(f"mmfast demo: {_tunnel(shown, number)} is public", flush=True)
    if open_page and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(where)
    _serve(app, socket)


def _application(model: str | None, device: str | None, dtype: str) -> Any:
    """The page at the root of an application of its own.

    Raises:
        MmfastError: The extra is not installed, or the model cannot be loaded.
    """
    try:
        from fastapi import FastAPI

        from mmfast.demos.app import mount
        from mmfast.demos.shelf import Shelf
        from mmfast.serve.uploads import read_upload
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "gradio", "starlette"):
            raise
        raise MmfastError(
            f'the demo needs {error.name}, which is not installed: pip install "mmfast[demo]"'
        ) from None
    shelf = Shelf(model, device, dtype, read_upload)
    if model is not None:
        shelf.visual("image")  # a wrong name is told now, not to the first visitor
    shelf.warm_soon()
    return mount(FastAPI(openapi_url=None), "/", shelf=shelf)


def _listen(host: str, port: int) -> Any:
    """A socket that listens, so that its port is known.

    Raises:
        MmfastError: The address is taken, or not of this machine.
    """
    import socket

    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise MmfastError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; give another --port or "
            "--host (--port 0 picks a free one)"
        ) from None


def _tunnel(host: str, port: int) -> str:
    """An address of Gradio's servers that leads here.

    Raises:
        MmfastError: There is no way to them.
    """
    import secrets

    from gradio.networking import setup_tunnel

    try:
        return str(setup_tunnel(host, port, secrets.token_urlsafe(32), None, None))
    except Exception as error:  # of many kinds: no network, no program for the tunnel, refused
        raise MmfastError(f"cannot share: {error}; leave --share out") from None


def _serve(app: Any, socket: Any) -> None:
    """Serve until Ctrl-C; the first visitor finds the models loaded."""
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", ws_max_size=1 << 20, timeout_graceful_shutdown=3
    )
    uvicorn.Server(config).run(sockets=[socket])
