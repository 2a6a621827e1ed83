"""Which engine a server runs."""

from __future__ import annotations

import threading
import time
from pathlib import PurePath
from typing import Any

from mmfast.core.errors import MmfastError, unknown
from mmfast.serve.config import ENGINES, ServerConfig
from mmfast.serve.engine.base import (
    BusyError,
    Delta,
    Emit,
    Executor,
    Failure,
    Finish,
    Health,
    Media,
    Reason,
    Request,
)

EMBEDDED = "mmfast-tiny-video"


def name_of(config: ServerConfig) -> str:
    """What the model is called: as told, else its directory or hub id."""
    if config.name:
        return config.name
    if config.model is None:
        return EMBEDDED
    local = config.model.startswith((".", "/", "~")) or config.model.count("/") != 1
    return PurePath(config.model).name if local else config.model


def choose(config: ServerConfig) -> Executor:
    """Load the engine that `config.engine` names.

    Raises:
        MmfastError: There is none of that name, or it needs what is not installed.
        ModelError: The checkpoint cannot be loaded.
    """
    if config.engine == "inproc":
        from mmfast.serve.engine.scheduler import Scheduler

        return Scheduler(config.model, **_shared(config))
    if config.engine == "processes":
        from mmfast.serve.engine.processes.crowd import Processes

        return Processes(config.model, **_shared(config), **_replicas(config))
    if config.engine == "ray":
        return _on_ray(config)
    raise MmfastError(unknown("engine", config.engine, ENGINES))


def _on_ray(config: ServerConfig) -> Executor:
    try:
        from mmfast.serve.ray.engine import RayEngine
    except ModuleNotFoundError as error:
        raise MmfastError(
            f"--engine ray needs {error.name}, which is not installed; "
            'pip install "mmfast[ray]", or choose inproc or processes'
        ) from error
    return RayEngine(
        config.model, **_shared(config), **_replicas(config), address=config.ray_address
    )


def _shared(config: ServerConfig) -> dict[str, Any]:
    return {
        "reduce": config.reduce,
        "cache": config.cache,
        "device": config.device,
        "dtype": config.dtype,
        "slots": config.slots,
        "context": config.context,
        "chunk": config.chunk,
        "queue": config.queue,
        "memory": config.memory,
        "name": name_of(config),
    }


def _replicas(config: ServerConfig) -> dict[str, Any]:
    return {
        "encode": config.encode_replicas,
        "prefill": config.prefill_replicas,
        "decode": config.decode_replicas,
    }


class Echo:
    """Answers with the words of the last message, one word a token.

    Args:
        pause: Seconds between words.
        limit: Requests at once; one more is refused.
    """

    def __init__(self, pause: float = 0.0, limit: int = 64) -> None:
        self.model, self._pause, self._limit = "echo", pause, limit
        self._lock = threading.Lock()
        self._running: dict[str, threading.Event] = {}

    def submit(self, request: Request, emit: Emit) -> None:
        """See `Executor.submit`."""
        with self._lock:
            if len(self._running) >= self._limit:
                raise BusyError(f"{self._limit} requests run already; try again in a second")
            gone = self._running[request.id] = threading.Event()
        threading.Thread(target=self._answer, args=(request, emit, gone), daemon=True).start()

    def _answer(self, request: Request, emit: Emit, gone: threading.Event) -> None:
        words = [w for part in request.messages[-1].content for w in _words(part)]
        said = words[: request.sampling.max_tokens]
        for i, word in enumerate(said):
            if gone.is_set():
                break
            emit(Delta(" " * (i > 0) + word))
            time.sleep(self._pause)
        with self._lock:
            self._running.pop(request.id, None)
        if gone.is_set():
            emit(Failure("cancelled", 499, "cancelled"))
        else:
            reason: Reason = "stop" if len(said) == len(words) else "length"
            emit(Finish(reason, len(words), len(said)))

    def cancel(self, request_id: str) -> None:
        """See `Executor.cancel`."""
        with self._lock:
            if request_id in self._running:
                self._running[request_id].set()

    def health(self) -> Health:
        """See `Executor.health`."""
        with self._lock:
            return Health(True, running=len(self._running))

    def close(self) -> None:
        """See `Executor.close`."""
        with self._lock:
            for gone in self._running.values():
                gone.set()


def _words(part: str | Media) -> list[str]:
    return [f"<{part.shot.kind}>"] if isinstance(part, Media) else part.split()
