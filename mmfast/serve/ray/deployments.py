"""Encode, prefill and decode as deployments of Ray Serve, each with its number of replicas.

A request passes one replica of each: encode computes embeddings, prefill keys and values with the
logits of the first token, decode the answer, in one batch with the others of its replica. Results
lie in Ray's object store, go straight to the next replica, and outlive the replica that made them.
An error of a request travels the same way, as a `Failure`.
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
from mmfast.serve.engine.base import Delta, Event, Failure, Request, failure
from mmfast.serve.engine.processes.messages import Parcel, unwrap, wrap
from mmfast.serve.engine.slots import moved
from mmfast.serve.ray.cluster import Cluster, calm, share, sharing

ROLES = ("encode", "prefill", "decode")


@dataclass(frozen=True)
class ReplicaSettings:
    """Settings of every replica."""

    model: str | None = None
    device: str | None = None
    dtype: str = "auto"
    threads: int = 1  # threads of torch in each replica; 0 leaves the number unchanged
    slots: int = 16  # most answers at once in one decode replica
    chunk: int = 256  # most tokens of one prefill pass
    context: int | None = None  # longest prompt and answer in tokens; None takes the model's
    # bytes of keys and values in one decode replica, as for the `Scheduler`
    memory: str | int | None = None
    linger: float = 0.0  # seconds by which encode and prefill delay each result, to test faults
    sharing: int = 1  # decode replicas that share the free memory of a device

    def load(self) -> tuple[Any, Any]:
        """Load the model and its processor."""
        import torch

        quiet()
        if self.threads:
            torch.set_num_threads(self.threads)
        return load(self.model, self.device, self.dtype)


@dataclass(frozen=True, eq=False)
class StageResult:
    """The result of one role for the next."""

    parcel: Parcel  # `Embedded`, or `PromptPiece`
    workers: dict[str, int]  # process of each role so far


class EncodeReplica:
    """Encodes media, and reduces and embeds prompts."""

    def __init__(self, plan: ReplicaSettings) -> None:
        from mmfast.serve.engine.encoder import MediaEncoder
        from mmfast.serve.engine.stages import EncodeStage

        self._stage, self._linger = EncodeStage(MediaEncoder(*plan.load())), plan.linger

    async def __call__(self, request: Request, reduce: str | None) -> StageResult | Failure:
        """Return the embeddings of a request."""
        try:
            prepare = self._stage.encoder.prepare
            prepared = await asyncio.to_thread(prepare, request, reduce)
        except ModelError as error:  # the model takes no such media
            return Failure(str(error), 400, "invalid_request_error")
        except Exception as error:
            return failure(error, request.id)
        try:
            embedded = await asyncio.wrap_future(self._stage.encode(prepared))
        except Exception as error:
            return failure(error, request.id)
        await asyncio.sleep(self._linger)
        return StageResult(wrap(embedded), {"encode": os.getpid()})


class PrefillReplica:
    """Computes the keys and values of prompts."""

    def __init__(self, plan: ReplicaSettings) -> None:
        from mmfast.serve.engine.prefill import Prefiller
        from mmfast.serve.engine.request import context_of
        from mmfast.serve.engine.stages import PrefillStage

        model, _ = plan.load()
        self._device = model.device
        context = plan.context or context_of(model)
        self._stage, self._linger = (
            PrefillStage(Prefiller(model, plan.chunk), context),
            plan.linger,
        )

    async def __call__(self, given: StageResult | Failure, answer: int) -> StageResult | Failure:
        """Return the keys and values of a prompt; `answer` is the longest answer in tokens."""
        if isinstance(given, Failure):
            return given
        try:
            future = self._stage.fill(moved(unwrap(given.parcel), self._device), answer)
            piece = await asyncio.wrap_future(future)
        except Exception as error:
            return failure(error)
        await asyncio.sleep(self._linger)
        return StageResult(wrap(piece), {**given.workers, "prefill": os.getpid()})


class DecodeReplica:
    """Decodes answers."""

    def __init__(self, plan: ReplicaSettings) -> None:
        from mmfast.serve.engine.decode import DecodeBatch
        from mmfast.serve.engine.slots import kv_limit
        from mmfast.serve.engine.stages import DecodeStage

        model, processor = plan.load()
        self._device = model.device
        limit = kv_limit(plan.memory, self._device, plan.sharing)
        self._stage = DecodeStage(DecodeBatch(model, plan.slots), processor.tokenizer, limit)

    async def __call__(
        self, request: Request, given: StageResult | Failure
    ) -> AsyncIterator[dict[str, int] | tuple[Event, ...]]:
        """Yield the processes of the request, then its events as they come."""
        if isinstance(given, Failure):
            yield (given,)
            return
        yield {**given.workers, "decode": os.getpid()}
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, event)

        self._stage.add(request, moved(unwrap(given.parcel), self._device), emit)
        over = False
        try:
            while not over:
                events = [await inbox.get()]
                while not inbox.empty():
                    events.append(inbox.get_nowait())
                over = not isinstance(events[-1], Delta)
                yield tuple(events)
        finally:
            if not over:  # the caller is gone
                self._stage.cancel(request.id)


BODIES = {"encode": EncodeReplica, "prefill": PrefillReplica, "decode": DecodeReplica}


def deploy(
    cluster: Cluster, apps: Sequence[str], plan: ReplicaSettings, replicas: Mapping[str, int]
) -> dict[str, Any]:
    """Start replicas and wait until they are ready; return a handle per role.

    `apps` are the names of the applications of Ray Serve in the order of `ROLES`. The handle of
    `decode` streams. A replica that does not start raises `MmfastError`.
    """
    from ray import serve

    have, count = cluster.resources(), sum(replicas.values())
    parts = share(have, count, plan.device, spare=0.1)  # leaves room for the controller
    places = cluster.machines() if not parts["num_gpus"] else int(have["GPU"])
    plan = replace(plan, sharing=sharing(replicas["decode"], count, places))
    targets = []
    for role, app in zip(ROLES, apps, strict=True):
        deployment: Any = serve.deployment(
            BODIES[role],
            name=role,
            num_replicas=replicas[role],
            max_ongoing_requests=plan.slots if role == "decode" else 8,
            max_queued_requests=-1,  # the engine limits the queue
            ray_actor_options=parts,
            health_check_period_s=1.0,
            health_check_timeout_s=30.0,  # a busy replica may answer late
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
    """Return the line of a remote traceback that names the error."""
    lines = re.findall(r"^\s*(?:[\w.]+\.)?(\w+Error: .+)$", str(error), re.M)
    return str(lines[-1] if lines else error).strip()[:300]
