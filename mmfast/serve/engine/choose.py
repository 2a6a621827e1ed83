"""Which engine a server runs."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from mmfast.core.errors import MmfastError, unknown
from mmfast.serve.config import ENGINES, ServerConfig
from mmfast.serve.engine.base import Executor

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
        from mmfast.serve.engine.processes import Processes

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
