"""Encode, prefill and decode as deployments of their own, each with its number of replicas.

A request goes through one replica of each: encode gives embeddings, prefill keys and values with
the logits of the first token, decode the answer, in one batch with all others of its replica. What
one gives lies in Ray's object store and goes straight to the next one; if the giver dies, it is
still there. What goes wrong with a request travels the same way, as a `Failure`.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmfast.core.errors import MmfastError, ModelError
from mmfast.models.loading import load
from mmfast.models.quiet import quiet
from mmfast.serve.engine.base import Delta, Event, Failure, Request
from mmfast.serve.engine.failures import failure
from mmfast.serve.engine.processes.messages import Parcel, unwrap, wrap
from mmfast.serve.engine.slots import moved
from mmfast.serve.ray.cluster import Cluster, calm, share, sharing

ROLES = ("encode", "prefill", "decode")


@dataclass(frozen=True)
class ReplicaSettings:
    """What every replica is told.

    Attributes:
        model: As of `load`.
        device: As of `load`.
        dtype: As of `load`.
        threads: Of torch in each replica; 0 leaves them.
        slots: Answers at once in one decode replica.
        chunk: Most tokens of one prefill pass.
        context: Longest prompt and answer in tokens; None takes the model's.
        memory: Of keys and values in one decode replica, as of the `Scheduler`.
        linger: Seconds by which encode and prefill hold back each result: for trials of faults.
        sharing: Decode replicas on one device, among which its free memory is shared out.
    """

    model: str | None = None
    device: str | None = None
    dtype: str = "auto"
    threads: int = 1
    slots: int = 16
    chunk: int = 256
    context: int | None = None
    memory: str | int | None = None
    linger: float = 0.0
    sharing: int = 1

    def load(self) -> tuple[Any, Any]:
        """Model and processor."""
        import torch

        quiet()
        if self.threads:
            torch.set_num_threads(self.threads)
        return load(self.model, self.device, self.dtype)


@dataclass(frozen=True, eq=False)
class Handed:
    """What one role gives the next.

    Attributes:
        parcel: `Embedded`, or `Piece`.
        workers: Process of each role so far.
    """

    parcel: Parcel
    workers: dict[str, int]


class Encode:
    """Replica that encodes media, and reduces and embeds prompts."""

    def __init__(self, plan: ReplicaSettings) -> None:
        from mmfast.serve.engine.encoder import MediaEncoder
        from mmfast.serve.engine.services import Gathering

        self._gathering, self._linger = Gathering(MediaEncoder(*plan.load())), plan.linger

    async def __call__(self, request: Request, reduce: str | None) -> Handed | Failure:
        """Embeddings of a request."""
        try:
            prepare = self._gathering.encoder.prepare
            prepared = await asyncio.to_thread(prepare, request, reduce)
        except ModelError as error:  # it takes no such media
            return Failure(str(error), 400, "invalid_request_error")
        except Exception as error:
            return failure(error, request.id)
        try:
            embedded = await asyncio.wrap_future(self._gathering.encode(prepared))
        except Exception as error:
            return failure(error, request.id)
        await asyncio.sleep(self._linger)
        return Handed(wrap(embedded), {"encode": os.getpid()})


class Prefill:
    """Replica that reads prompts."""

    def __init__(self, plan: ReplicaSettings) -> None:
        from mmfast.serve.engine.prefill import Prefiller
        from mmfast.serve.engine.request import context_of
        from mmfast.serve.engine.services import Filling

        model, _ = plan.load()
        self._device = model.device
        context = plan.context or context_of(model)
        self._filling, self._linger = Filling(Prefiller(model, plan.chunk), context), plan.linger

    async def __call__(self, given: Handed | Failure, answer: int) -> Handed | Failure:
        """Keys and values of a prompt whose answer may have so many tokens."""
        if isinstance(given, Failure):
            return given
        try:
            future = self._filling.fill(moved(unwrap(given.parcel), self._device), answer)
            piece = await asyncio.wrap_future(future)
        except Exception as error:
            return failure(error)
        await asyncio.sleep(self._linger)
        return Handed(wrap(piece), {**given.workers, "prefill": os.getpid()})


class Decode:
    """Replica that writes answers."""

    def __init__(self, plan: ReplicaSettings) -> None:
        from mmfast.serve.engine.decode import DecodeBatch
        from mmfast.serve.engine.services import Continuing
        from mmfast.serve.engine.slots import kv_limit

        model, processor = plan.load()
        self._device = model.device
        limit = kv_limit(plan.memory, self._device, plan.sharing)
        self._continuing = Continuing(DecodeBatch(model, plan.slots), processor.tokenizer, limit)

    async def __call__(
        self, request: Request, given: Handed | Failure
    ) -> AsyncIterator[dict[str, int] | tuple[Event, ...]]:
        """First the processes that had to do with it, then events as they come."""
        if isinstance(given, Failure):
            yield (given,)
            return
        yield {**given.workers, "decode": os.getpid()}
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, event)

        self._continuing.add(request, moved(unwrap(given.parcel), self._device), emit)
        over = False
        try:
            while not over:
                events = [await inbox.get()]
                while not inbox.empty():
                    events.append(inbox.get_nowait())
                over = not isinstance(events[-1], Delta)
                yield tuple(events)
        finally:
            if not over:  # whoever listened is gone
                self._continuing.cancel(request.id)


BODIES = {"encode": Encode, "prefill": Prefill, "decode": Decode}


def deploy(
    cluster: Cluster, apps: Sequence[str], plan: ReplicaSettings, replicas: Mapping[str, int]
) -> dict[str, Any]:
    """Start replicas, and wait until they are there.

    Args:
        cluster: Where.
        apps: Names of Serve's applications, in the order of `ROLES`.
        plan: What every replica is told.
        replicas: How many of each role.

    Returns:
        A handle per role; that of `decode` streams.

    Raises:
        MmfastError: One does not start.
    """
    from ray import serve

    have, count = cluster.resources(), sum(replicas.values())
    parts = share(have, count, plan.device, spare=0.1)  # for Serve's controller, and others there
    places = cluster.machines() if not parts["num_gpus"] else int(have["GPU"])
    plan = replace(plan, sharing=sharing(replicas["decode"], count, places))
    targets = []
    for role, app in zip(ROLES, apps, strict=True):
        deployment: Any = serve.deployment(
            BODIES[role],
            name=role,
            num_replicas=replicas[role],
            max_ongoing_requests=plan.slots if role == "decode" else 8,
            max_queued_requests=-1,  # the engine says when it is too much
            ray_actor_options=parts,
            health_check_period_s=1.0,
            health_check_timeout_s=30.0,  # a busy machine is not a dead one
            graceful_shutdown_timeout_s=2.0,
            graceful_shutdown_wait_loop_s=0.1,
        )
        targets.append(serve.RunTarget(deployment.bind(plan), name=app, route_prefix=None))
    try:
        with calm():
            handles = serve.run_many(targets)
    except RuntimeError as error:
        raise MmfastError(f"a replica does not start: {_reason(error)}") from None
    found = dict(zip(ROLES, handles, strict=True))
    found["decode"] = found["decode"].options(stream=True)
    return found


def _reason(error: Exception) -> str:
    """The line of a remote traceback that says what was wrong."""
    lines = re.findall(r"^\s*(?:[\w.]+\.)?(\w+Error: .+)$", str(error), re.M)
    return str(lines[-1] if lines else error).strip()[:300]
