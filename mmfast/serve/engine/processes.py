"""The engine of several processes: encoding in some, prompts and answers in others."""

from __future__ import annotations

import os
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.models.loading import EMBEDDED
from mmfast.serve.engine.crew import Restarts
from mmfast.serve.engine.crowd import Crowd
from mmfast.serve.engine.worker import Maker

_ROLES = "mmfast.serve.engine.roles"


class Processes(Crowd):
    """Answers requests in worker processes on this machine.

    Workers that encode send embeddings through shared memory to workers that do the rest, each
    with a `Scheduler` of its own. A worker that dies ends the streams on it and is started again.

    Args:
        model: Checkpoint directory, hub id, or None (embedded).
        encode: Workers that encode; 0 lets those that answer encode, too.
        prefill: Prompts are read where answers are written; only 1 is possible.
        decode: Workers that answer, each with `slots` and `queue` of its own.
        threads: Of torch per worker; 0 shares the machine's cores out.
        restarts: How often workers are started again.
        linger: Seconds by which encoders hold back each result: for trials of faults.
        **given: Further arguments of the `Scheduler`.

    Raises:
        MmfastError: A count is not possible, or no worker starts: the model cannot be loaded, or
            a spec is wrong.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        encode: int = 1,
        prefill: int = 1,
        decode: int = 1,
        threads: int = 0,
        restarts: Restarts | None = None,
        linger: float = 0.0,
        **given: Any,
    ) -> None:
        _check(model, encode, prefill, decode)
        threads = threads or max(1, (os.cpu_count() or 1) // (encode + decode))
        given = {"sharing": decode, **given, "model": None if model is None else str(model)}
        whole = Maker("mmfast.serve.engine.scheduler:Scheduler", given)
        answer = (
            Maker(f"{_ROLES}:Scheduling", {"given": given}, threads)
            if encode
            else Maker(f"{_ROLES}:Answering", {"engine": whole}, threads)
        )
        device, dtype = given.get("device"), given.get("dtype", "auto")
        alike = {"model": given["model"], "device": device, "dtype": dtype, "linger": linger}
        encoder = Maker(f"{_ROLES}:Encoding", alike, threads)
        name = given.get("name") or (EMBEDDED if model is None else str(model))
        super().__init__(name, answer, decode, encoder, encode, restarts)


def _check(model: Any, encode: int, prefill: int, decode: int) -> None:
    if isinstance(model, tuple):
        raise MmfastError(
            "worker processes load their model themselves; give a directory or a hub id"
        )
    if prefill != 1:
        raise MmfastError(
            f"prefill={prefill} is not possible with processes, which read prompts where they "
            "answer; give decode more workers, or take the engine 'ray'"
        )
    for name, value, least in (("encode", encode, 0), ("decode", decode, 1)):
        if not isinstance(value, int) or value < least:
            raise MmfastError(f"{name}={value!r} is not allowed; give a number of at least {least}")
