"""Start and stop of the server: socket, signals and uvicorn."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from mmfast.core.errors import MmfastError
from mmfast.serve.config import ServerConfig
from mmfast.serve.guard.shield import uvicorn_options


def bind(host: str, port: int) -> socket.socket:
    """Open the socket to listen on, before anything is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(2048)  # early clients wait; fails here if the port is taken
    except (OSError, UnicodeError) as error:
        found.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise MmfastError(
            f"cannot listen on {host}:{port} ({reason}); "
            "give another --port (0 takes a free one) or --host"
        ) from None
    return found


def url_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn with the limits of the options and a clean end on SIGINT and SIGTERM."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        options = {**uvicorn_options(config), "lifespan": "on"}
        super().__init__(uvicorn.Config(app, **options))
        self._service = getattr(getattr(app, "state", None), "service", None)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Take no more requests; let those at work end, and tell the rest why they do not."""
        super().handle_exit(sig, frame)
        if self._service is not None:
            self._service.stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on a signal without raising it again, which would be a failure of the process."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {each: signal.signal(each, self.handle_exit) for each in signals}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def serve(config: ServerConfig, listening: socket.socket, loaded: Callable[[], Any]) -> None:
    """Serve until a signal comes; `loaded` is called when the engine is loaded."""
    from mmfast.serve.guard.media import decoders
    from mmfast.serve.http.app import create_app

    app = create_app(config)
    server = Server(app, config)

    def done(future: Future[Any]) -> None:
        if future.exception() is None:
            loaded()
        else:
            server.should_exit = True

    # Ray, started by the engine's thread, leaves the handlers of signals as it found them: found
    # before the server's own, they would come back over those and a signal would kill the process.
    with server.capture_signals():
        engine: Future[Any] = app.state.service.start()
        engine.add_done_callback(done)
        threading.Thread(target=decoders(config).warm, daemon=True).start()
        server.run(sockets=[listening])
    error = app.state.service.failure()
    if isinstance(error, MmfastError):
        raise error
    if error is not None:
        raise MmfastError(
            f"the engine cannot be loaded: {type(error).__name__}: {error}"
        ) from error
