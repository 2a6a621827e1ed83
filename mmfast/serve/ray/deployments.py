"""Replicas of Ray Serve: encode, prefill and decode apart, or copies of the whole engine.

Apart, a request passes one replica of each role: encode computes embeddings, prefill keys and
values with the logits of the first token, decode the answer, in one batch with the others of its
replica. Results lie in Ray's object store, go straight to the next replica, and outlive the replica
that made them. An error of a request travels the same way, as a `Failure`.

A copy of the engine is a `Scheduler` in a replica of its own, so that all its methods are possible.
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.core.errors import MmfastError, ModelError
from mmfast.models.quiet import quiet
from mmfast.serve.engine.adapters import load_adapters
from mmfast.serve.engine.base import Delta, Event, Failure, Request, failure
from mmfast.serve.engine.model import load_packed
from mmfast.serve.engine.rules import check_ids
from mmfast.serve.engine.slots import moved
from mmfast.serve.ray.cluster import Cluster, calm, share, sharing
from mmfast.serve.ray.roles import StageFigures

ROLES = ("encode", "prefill", "decode")
WHOLE = "answer"  # role of a replica with the whole engine
WORKER = "worker"  # one whose role may change; a number follows
ROUTER = "mmfast.serve.ray.router.LeastRequestsRouter"


@dataclass(frozen=True, eq=False)
class Parcel:
    """A pickled value whose tensors and arrays lie apart, as Ray carries arrays without copying."""

    body: bytes
    arrays: tuple[np.ndarray[Any, Any], ...]


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays of their bytes, since numpy knows no bfloat16."""

    def reducer_override(self, value: Any) -> Any:
        """See `pickle.Pickler`."""
        if type(value) is not Tensor and type(value) is not torch.nn.Parameter:
            return NotImplemented
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (flat.numpy(), value.dtype, tuple(value.shape))


def _tensor(flat: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(flat).view(dtype).reshape(shape)


def wrap(value: Any) -> Parcel:
    """Pickle a value; tensors of a device are copied to the CPU (see `moved`)."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, 5, buffer_callback=buffers.append).dump(value)
    return Parcel(file.getvalue(), tuple(np.frombuffer(each.raw(), np.uint8) for each in buffers))


def unwrap(parcel: Parcel) -> Any:
    """Return the value of a parcel; its tensors are copies, since Ray's memory is read-only."""
    return pickle.loads(parcel.body, buffers=[bytearray(each) for each in parcel.arrays])


@dataclass(frozen=True)
class ReplicaSettings:
    """Settings of every replica."""

    model: str | None = None
    device: str | None = None
    dtype: str = "auto"
    threads: int = 1  # threads of torch in each replica; 0 leaves the number unchanged
    slots: int = 16  # most answers at once in one decode replica
    chunk: int | None = 256  # most tokens of one prefill pass; see `Prefiller`
    context: int | None = None  # longest prompt and answer in tokens; None takes the model's
    # bytes of keys and values in one decode replica, as for the `Scheduler`
    memory: str | int | None = None
    linger: float = 0.0  # seconds by which encode and prefill delay each result, to test faults
    sharing: int = 1  # replicas with answers that share the free memory of a device
    reduce: str | None = None  # specs of a whole engine for requests that name none
    cache: str | None = None
    lora: Mapping[str, str] = field(default_factory=dict)  # folders of adapters by name
    weights: str | None = None  # form of packed weights
    attn: str | None = None  # attention back end
    prefill: str | None = None  # spec of a whole engine's sparse prefill
    decode: str | None = None  # spec of a whole engine's draft and verify

    def settle(self) -> None:
        """Set up the process of a replica."""
        quiet()
        if self.threads:
            torch.set_num_threads(self.threads)

    def load(self) -> tuple[Any, Any]:
        """Set up the process, and load the model and its processor."""
        self.settle()
        given = self.model, self.device, self.dtype
        model, processor = load_packed(*given, self.weights, self.lora, self.attn)
        load_adapters(model, self.lora)
        return model, processor


@dataclass(frozen=True, eq=False)
class StageResult:
    """The result of one role for the next."""

    parcel: Parcel  # `Embedded`, or `PromptPiece`
    workers: dict[str, int]  # process of each role so far


class EncodeReplica:
    """Encodes media, and reduces and embeds prompts."""

    def __init__(self, plan: ReplicaSettings, loaded: tuple[Any, Any] | None = None) -> None:
        from mmfast.serve.engine.encoder import MediaEncoder
        from mmfast.serve.engine.stages import EncodeStage

        model, processor = loaded or plan.load()
        self._device = model.device
        self._stage, self._linger = EncodeStage(MediaEncoder(model, processor)), plan.linger

    async def part(
        self, request: Request, reduce: str | None, number: int, parts: int
    ) -> Parcel | None:
        """Return the features of a part of the media; None where the whole will fail, too."""
        try:
            prepared = await asyncio.to_thread(self._stage.encoder.prepare, request, reduce)
            return wrap(await asyncio.wrap_future(self._stage.part(prepared, number, parts)))
        except Exception:  # the encoder that embeds meets it again, and tells
            return None

    async def __call__(
        self, request: Request, reduce: str | None, *given: Parcel | None
    ) -> StageResult | Failure:
        """Return the embeddings of a request; `given` are parts that others have encoded."""
        try:
            encoder = self._stage.encoder
            check_ids(request.sampling, len(encoder.processor.tokenizer))
            prepared = await asyncio.to_thread(encoder.prepare, request, reduce)
        except Exception as error:
            return _refusal(error, request)
        try:
            parts = [moved(unwrap(part), self._device) for part in given if part is not None]
            features = {key: value for part in parts for key, value in part.items()}
            embedded = await asyncio.wrap_future(self._stage.encode(prepared, features))
        except Exception as error:
            return failure(error, request.id)
        await asyncio.sleep(self._linger)
        return StageResult(wrap(embedded), {"encode": os.getpid()})


def _refusal(error: Exception, request: Request) -> Failure:
    """Return the failure of a request that was not begun."""
    if isinstance(error, ModelError):  # the model takes no such media
        return Failure(str(error), 400, "invalid_request_error")
    return failure(error, request.id)


class PrefillReplica:
    """Computes the keys and values of prompts."""

    def __init__(self, plan: ReplicaSettings, loaded: tuple[Any, Any] | None = None) -> None:
        from mmfast.serve.engine.prefill import Prefiller
        from mmfast.serve.engine.request import context_of
        from mmfast.serve.engine.stages import PrefillStage

        model, _ = loaded or plan.load()
        self._device = model.device
        context = plan.context or context_of(model)
        self._stage = PrefillStage(Prefiller(model, plan.chunk), context)
        self._linger = plan.linger

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

    def __init__(self, plan: ReplicaSettings, loaded: tuple[Any, Any] | None = None) -> None:
        from mmfast.serve.engine.decode import DecodeBatch
        from mmfast.serve.engine.slots import kv_limit
        from mmfast.serve.engine.stages import DecodeStage

        model, processor = loaded or plan.load()
        self._device = model.device
        limit = kv_limit(plan.memory, self._device, plan.sharing)
        self._stage = DecodeStage(DecodeBatch(model, plan.slots), processor.tokenizer, limit)

    async def __call__(
        self, request: Request, given: StageResult | Failure
    ) -> AsyncGenerator[dict[str, int] | tuple[Event, ...]]:
        """Yield the processes of the request, then its events as they come."""
        if isinstance(given, Failure):
            yield (given,)
            return
        yield {**given.workers, "decode": os.getpid()}
        inbox = _Inbox()
        try:
            self._stage.add(request, moved(unwrap(given.parcel), self._device), inbox.put)
        except Exception as error:
            yield (_refusal(error, request),)
            return
        async with aclosing(inbox.batches(request.id, self._stage.cancel)) as batches:
            async for events in batches:
                yield events


class WorkerReplica:
    """Encodes, computes keys and values, and decodes, whatever is sent here.

    The stages share the weights, and no hooks, so each of them may be at work on its own requests.
    """

    def __init__(self, plan: ReplicaSettings) -> None:
        from mmfast.models.loading import twin_model

        model, processor = plan.load()
        self._encode = EncodeReplica(plan, (model, processor))
        self._prefill = PrefillReplica(plan, (twin_model(model), processor))
        self._decode = DecodeReplica(plan, (twin_model(model), processor))
        self._done = [0, 0, 0]

    async def part(
        self, request: Request, reduce: str | None, number: int, parts: int
    ) -> Parcel | None:
        """See `EncodeReplica.part`."""
        return await self._encode.part(request, reduce, number, parts)

    async def encode(
        self, request: Request, reduce: str | None, *given: Parcel | None
    ) -> StageResult | Failure:
        """See `EncodeReplica`."""
        found = await self._encode(request, reduce, *given)
        self._done[0] += 1
        return found

    async def prefill(self, given: StageResult | Failure, answer: int) -> StageResult | Failure:
        """See `PrefillReplica`."""
        found = await self._prefill(given, answer)
        self._done[1] += 1
        return found

    async def decode(
        self, request: Request, given: StageResult | Failure
    ) -> AsyncIterator[dict[str, int] | tuple[Event, ...]]:
        """See `DecodeReplica`."""
        async with aclosing(self._decode(request, given)) as answer:
            async for events in answer:
                yield events
        self._done[2] += 1

    def figures(self) -> StageFigures:
        """Return what was done so far."""
        stages = self._encode._stage, self._prefill._stage
        decode = self._decode._stage
        seconds = (*(each.busy for each in stages), decode.steps[2])
        return StageFigures(seconds, tuple(self._done), tuple(decode.steps))


class AnswerReplica:
    """Answers requests with a `Scheduler`; the engine limits its queue."""

    def __init__(self, plan: ReplicaSettings) -> None:
        from mmfast.serve.engine.scheduler import Scheduler

        plan.settle()
        names = (
            "reduce",
            "cache",
            "device",
            "dtype",
            "slots",
            "context",
            "chunk",
            "memory",
            "lora",
            "weights",
            "attn",
            "prefill",
            "decode",
        )
        options = {name: getattr(plan, name) for name in names}
        # A request that was cancelled holds its place here for a moment longer than on Ray.
        self._engine = Scheduler(plan.model, queue=plan.slots, sharing=plan.sharing, **options)

    async def __call__(self, request: Request) -> AsyncIterator[dict[str, int] | tuple[Event, ...]]:
        """Yield the process of the request, then its events as they come."""
        inbox, cancel = _Inbox(), self._engine.cancel
        submit = asyncio.to_thread(self._engine.submit, request, inbox.put)
        submitted = asyncio.ensure_future(submit)
        try:
            await asyncio.shield(submitted)
        except asyncio.CancelledError:  # the caller is gone, but the thread goes on
            submitted.add_done_callback(lambda done: done.exception() or cancel(request.id))
            raise
        except Exception as error:
            yield (_refusal(error, request),)
            return
        yield {WHOLE: os.getpid()}
        async with aclosing(inbox.batches(request.id, cancel)) as batches:
            async for events in batches:
                yield events

    def figures(self) -> dict[str, float]:
        """Return the figures of its engine, as `Health` has them."""
        return dict(self._engine.health().gauges)


class _Inbox:
    """Events of a request, from the thread of an engine to the loop of a replica."""

    def __init__(self) -> None:
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def put(self, event: Event) -> None:
        """Take an event, from any thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def batches(
        self, name: str, cancel: Callable[[str], None]
    ) -> AsyncGenerator[tuple[Event, ...]]:
        """Yield events until the last one; a caller that is gone cancels the request `name`."""
        over = False
        try:
            while not over:
                events = [await self._events.get()]
                while not self._events.empty():
                    events.append(self._events.get_nowait())
                over = not isinstance(events[-1], Delta)
                yield tuple(events)
        finally:
            if not over:
                cancel(name)


BODIES: dict[str, Any] = {
    "encode": EncodeReplica,
    "prefill": PrefillReplica,
    "decode": DecodeReplica,
}
BODIES |= {WHOLE: AnswerReplica, WORKER: WorkerReplica}


def deploy(
    cluster: Cluster, apps: Sequence[str], plan: ReplicaSettings, replicas: Mapping[str, int]
) -> dict[str, Any]:
    """Start replicas and wait until they are ready; return a handle per role, or per worker.

    `apps` are the names of the applications of Ray Serve in the order of `replicas`. The handle of
    the last role streams. A replica that does not start raises `MmfastError`.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    routing: dict[str, Any] = {"request_router_class": ROUTER}
    have, count = cluster.resources(), sum(replicas.values())
    parts = share(have, count, plan.device, spare=0.1)  # leaves room for the controller
    places = cluster.machines() if not parts["num_gpus"] else int(have["GPU"])
    last = [*replicas][-1]
    works = last.startswith(WORKER)
    plan = replace(plan, sharing=sharing(count if works else replicas[last], count, places))
    targets = []
    for role, app in zip(replicas, apps, strict=True):
        deployment: Any = serve.deployment(
            BODIES[role.partition("-")[0]],
            name=role,
            num_replicas=replicas[role],
            max_ongoing_requests=4 * plan.slots if works else plan.slots if role == last else 8,
            max_queued_requests=-1,  # the engine limits the queue
            request_router_config=RequestRouterConfig(**routing),
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
    found = dict(zip(replicas, handles, strict=True))
    if not works:
        found[last] = found[last].options(stream=True)
    return found


def _reason(error: Exception) -> str:
    """Return the line of a remote traceback that names the error."""
    lines = re.findall(r"^\s*(?:[\w.]+\.)?(\w+Error: .+)$", str(error), re.M)
    return str(lines[-1] if lines else error).strip()[:300]
