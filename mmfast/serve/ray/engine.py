"""The engine on Ray: drives replicas from the server's process."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mmfast.caches.plan import call_plan
from mmfast.core.errors import MmfastError, SpecError, unknown
from mmfast.core.spec import is_auto, parse
from mmfast.decoding.speculation import check_kind, plan_decode
from mmfast.models.attention import check_attn
from mmfast.models.loading import EMBEDDED
from mmfast.planner.target import Target, automatic
from mmfast.prefill.plan import plan_prefill
from mmfast.serve.engine import base
from mmfast.serve.engine.encoder import early
from mmfast.serve.engine.model import check_form
from mmfast.serve.engine.request import check_storeless, checked
from mmfast.serve.ray.cluster import Cluster
from mmfast.serve.ray.deployments import ROLES, WHOLE, WORKER, ReplicaSettings, deploy
from mmfast.serve.ray.roles import RoleBoard, RoleController

# Figures of which the worst copy of an engine counts; others are added up.
WORST = ("decode_gap_ms", "chunk_ms", "kv_bytes_per_token", "checks_raised")
CHANCES = 2  # replicas that a request may lose before its first piece; one may be at fault itself


@dataclass(eq=False)
class RemoteStream:
    """A running request."""

    request: base.Request
    emit: base.Emit
    # process of each role, once decoding has begun
    workers: Mapping[str, int] = field(default_factory=dict)
    at: tuple[int, ...] = ()  # workers by number, one of each stage
    task: Any = None  # task that drives it
    began: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    losses: int = 0  # replicas that died on the way


async def drive(
    handles: Mapping[str, Any],
    stream: RemoteStream,
    reduce: str | None,
    board: RoleBoard | None = None,
) -> base.Event:
    """Emit the pieces of an answer and return its last event.

    A request whose replica is lost before the first piece is asked again, as nobody has seen any of
    its answer yet.
    """
    while True:
        try:
            last = await _attempt(handles, stream, reduce, board)
        except Exception as error:
            if not replica_died(error):
                return failure_of(error)
            last = None
        if last is not None:
            return last
        stream.losses += 1
        if stream.first or stream.losses == CHANCES:
            return _lost(stream)
        stream.workers = {}


async def _attempt(
    handles: Mapping[str, Any],
    stream: RemoteStream,
    reduce: str | None,
    board: RoleBoard | None = None,
) -> base.Event | None:
    """Send a request through the replicas; None where the answer breaks off."""
    request = stream.request
    if stream.losses:  # a replica that only seemed dead may still hold the name
        request = replace(request, id=f"{request.id}-{stream.losses}")
    if WHOLE in handles:
        responses = [handles[WHOLE].remote(request)]
    elif board is not None:
        responses = _sent(handles, board, stream, request, reduce)
    else:  # handles take each other's responses: results go from replica to replica
        embedded = handles["encode"].remote(request, reduce)
        piece = handles["prefill"].remote(embedded, request.sampling.max_tokens)
        chunks = handles["decode"].remote(replace(request, messages=()), piece)
        responses = [chunks, piece, embedded]
    last: base.Event | None = None
    try:
        async for chunk in responses[0]:
            if isinstance(chunk, dict):
                stream.workers = chunk
                continue
            for event in chunk:
                if not isinstance(event, base.Delta):
                    last = event
                else:
                    stream.first = stream.first or time.perf_counter()
                    stream.emit(event)
    finally:
        if board is not None:
            board.release(stream.at)
        if last is None:  # cancelled or failed: stop all replicas
            for response in responses:
                response.cancel()
    if isinstance(last, base.Finish):
        first = stream.first or time.perf_counter()
        ttft = (first - stream.began) * 1e3
        more = {"ttft_ms": ttft, "workers": stream.workers, "lost_replicas": stream.losses}
        return replace(last, trace={**last.trace, **more})
    return last


def _sent(
    handles: Mapping[str, Any],
    board: RoleBoard,
    stream: RemoteStream,
    request: base.Request,
    reduce: str | None,
) -> list[Any]:
    """Send a request through workers; those that encode share its pictures out among them (EPD)."""
    stream.at = encode, prefill, decode = board.choose()
    workers = [handles[f"{WORKER}-{number}"] for number in range(len(board.roles))]
    media = sum(isinstance(p, base.Media) for m in request.messages for p in m.content)
    sharing = board.encoders(encode, media)
    parts = [
        workers[number].part.remote(request, reduce, place, len(sharing))
        for place, number in enumerate(sharing if len(sharing) > 1 else ())
    ]
    embedded = workers[encode].encode.remote(request, reduce, *parts)
    piece = workers[prefill].prefill.remote(embedded, request.sampling.max_tokens)
    answer = workers[decode].options(stream=True).decode
    return [answer.remote(replace(request, messages=()), piece), piece, embedded, *parts]


def _lost(stream: RemoteStream) -> base.Failure:
    """Return the last event of an answer whose replica died."""
    which = f"{CHANCES} replicas in a row that worked on this request"
    if stream.first:
        which = f"the replica that worked on this answer (process {[*stream.workers.values()][-1]})"
    return base.Failure(f"{which} died; ask again", 503, "replica_lost")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that caused it, here or in a replica."""
    while error is not None:
        yield error
        error = getattr(error, "cause", None) or error.__cause__


def replica_died(error: BaseException) -> bool:
    """Return True if an error means that a replica, or what it had computed, is gone."""
    from ray import exceptions

    gone = (
        exceptions.RayActorError,
        exceptions.ObjectLostError,
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
    )
    return any(isinstance(each, gone) for each in _causes(error))


def failure_of(error: BaseException) -> base.Failure:
    """Turn an error of Ray into the last event of an answer."""
    from ray import exceptions
    from ray.serve.exceptions import BackPressureError

    for cause in _causes(error):
        if isinstance(cause, BackPressureError):
            return base.Failure("all replicas are busy; try again in a second", 503)
        if isinstance(cause, exceptions.TaskCancelledError):
            return base.CANCELLED
    base.LOG.error("a request failed", exc_info=error)  # its text may hold paths
    return base.Failure(f"the engine failed on this request ({type(error).__name__})")


def check_parts(
    reduce: str | None, cache: str | None, prefill: str | None, decode: str | None = None
) -> None:
    """Refuse specs that need the whole model, of which every worker runs a part (SpecError)."""
    fix = "start the server with --replicas, whose copies run all of it, or take inproc"
    if is_auto(reduce):
        raise SpecError(f"{reduce!r} plans every request on the whole model; {fix}")
    if not early(reduce):
        raise SpecError(
            f"{reduce!r} acts inside the model, which Ray runs in parts; name reducers at site "
            f"'pre', {fix}"
        )
    if cache:
        raise SpecError(f"cache {cache!r} acts inside the model, which Ray runs in parts; {fix}")
    if prefill:
        raise SpecError(f"prefill {prefill!r} needs a prompt in one piece; {fix}")
    if plan_decode(decode) is not None:
        raise SpecError(f"decode {decode!r} drafts from what a prompt's own worker knows; {fix}")


class RayEngine:
    """Answers requests on Ray; see `mmfast.serve.engine.base.Executor`.

    `encode`, `prefill` and `decode` count the replicas of each part of the model. Reducers act
    between vision tower and language model (site `pre`) then; methods that act inside the language
    model, or on its cache, raise `SpecError`. With `replicas`, that many copies of the whole engine
    answer, with all its methods, and there are no parts. With `workers`, that many processes hold
    the model, and which of them encode, prefill and decode follows the load (see `ray.roles`).

    The model must be on every machine. Options are those of the `Scheduler`; `slots` and `memory`
    are per replica that decodes. `cpus` are the cores of a local cluster (None counts them),
    `threads` those of torch in each replica.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        reduce: str | None = None,
        cache: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        slots: int = 16,
        context: int | None = None,
        chunk: int | None = 256,
        queue: int = 32,
        memory: str | int | None = None,
        name: str | None = None,
        encode: int = 1,
        prefill: int = 1,
        decode: int = 1,
        replicas: int | None = None,
        workers: int | None = None,
        address: str = "local",
        cpus: int | None = None,
        threads: int = 1,
        linger: float = 0.0,
        lora: Mapping[str, str] | None = None,
        weights: str | None = None,
        attn: str | None = None,
        prefill_spec: str | None = None,
        decode_spec: str | None = None,
    ) -> None:
        check_form(weights, lora)
        check_attn(attn)
        self.board = RoleBoard(workers) if workers else None
        parts = dict(zip(ROLES, (encode, prefill, decode), strict=True))
        single = {f"{WORKER}-{number}": 1 for number in range(workers or 0)}
        self.replicas: dict[str, int] = single or ({WHOLE: replicas} if replicas else parts)
        self._last = [*self.replicas][-1]  # the role that decodes
        self._check(reduce, cache, prefill_spec, decode_spec)
        self._reduce = reduce
        self.model = name or (EMBEDDED if model is None else str(model))
        self._most = slots * (workers or self.replicas[self._last]) + queue
        self._control = RoleController(self.board, slots) if self.board else None
        where = None if model is None else str(model)
        plan = ReplicaSettings(where, device, dtype, threads, slots, chunk, context, memory, linger)
        self._lora = dict(lora or {})
        plan = replace(plan, reduce=reduce, cache=cache, weights=weights, attn=attn)
        plan = replace(plan, lora=self._lora, prefill=prefill_spec, decode=decode_spec)
        self._streams: dict[str, RemoteStream] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._running, self._figures = dict(self.replicas), dict[str, float]()
        self._cluster = Cluster(address, cpus)
        self._app = f"mmfast-{secrets.token_hex(3)}"
        try:
            self._handles = deploy(self._cluster, self._apps, plan, self.replicas)
        except BaseException:
            self._cluster.close(self._apps)
            raise
        self._loop = asyncio.new_event_loop()
        self._over = threading.Event()
        self._threads = [_started(each) for each in (self._loop.run_forever, self._watch)]

    @property
    def _apps(self) -> list[str]:
        return [f"{self._app}-{role}" for role in self.replicas]

    def submit(self, request: base.Request, emit: base.Emit) -> None:
        """See `Executor.submit`."""
        mine = request.options.over(base.Options(self._reduce))
        self._check(mine.reduce, mine.cache, mine.prefill, mine.decode)
        check_storeless(request.options)
        if request.adapter is not None and request.adapter not in self._lora:
            raise MmfastError(unknown("adapter", request.adapter, [*self._lora]))
        if request.options.target_ttft_ms is not None and self._last != WHOLE:
            raise MmfastError("target_ttft_ms needs whole engines; start with --replicas")
        sampling = checked(request.sampling)
        stream = RemoteStream(replace(request, sampling=sampling), emit)
        with self._lock:
            if self._closed:
                raise MmfastError("the engine is closed; start another one")
            if request.id in self._streams:
                raise MmfastError(f"request id {request.id!r} is at work already; give another")
            if len(self._streams) >= self._most:
                raise base.BusyError(
                    f"{len(self._streams)} requests run or wait already; try again"
                )
            if not self._takes:
                raise base.BusyError(f"no {self._last} replica is ready; it is being started", 2.0)
            self._streams[request.id] = stream
            if self._control is not None:
                self._control.arrived(time.monotonic())
            self._loop.call_soon_threadsafe(self._begin, stream, mine.reduce)

    def cancel(self, request_id: str) -> None:
        """See `Executor.cancel`."""
        with self._lock:
            stream = self._streams.get(request_id)
        if stream is not None:
            self._loop.call_soon_threadsafe(self._stop, stream)

    def health(self) -> base.Health:
        """See `Executor.health`."""
        with self._lock:
            held = len(self._streams)
            running = sum(bool(each.workers) for each in self._streams.values())
        gauges = {f"workers_{role}": float(n) for role, n in self._running.items()} | self._figures
        if self.board is not None and self._control is not None:
            gauges = self._control.gauges() | {"workers_live": float(sum(self._running.values()))}
        ready = not self._closed and (self._takes if self.board else all(self._running.values()))
        return base.Health(ready, running, held - running, gauges)

    @property
    def _takes(self) -> bool:
        """A replica that decodes is ready."""
        running = self._running
        return any(running.values()) if self.board is not None else bool(running[self._last])

    def workers(self, request_id: str) -> Mapping[str, int]:
        """Return the processes of the replicas of a running answer, by role."""
        with self._lock:
            stream = self._streams.get(request_id)
        return {} if stream is None else stream.workers

    def close(self) -> None:
        """See `Executor.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._over.set()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        self._loop.close()
        self._cluster.close(self._apps)

    def _check(
        self, reduce: str | None, cache: str | None, prefill: str | None, decode: str | None
    ) -> None:
        """Refuse wrong specs, and those that need the whole model where it runs in parts."""
        parse(automatic(reduce, Target())[0]), call_plan(cache), plan_prefill(prefill)
        check_kind(plan_decode(decode))
        if self._last != WHOLE:
            check_parts(reduce, cache, prefill, decode)

    # --- the loop's thread --------------------------------------------------------------------

    def _begin(self, stream: RemoteStream, reduce: str | None) -> None:
        stream.task = self._loop.create_task(drive(self._handles, stream, reduce, self.board))
        # A callback, since a task that is cancelled before its start runs no code.
        stream.task.add_done_callback(partial(self._finish, stream))

    def _stop(self, stream: RemoteStream) -> None:
        if stream.task is not None:
            stream.task.cancel()

    def _finish(self, stream: RemoteStream, task: asyncio.Task[base.Event]) -> None:
        last: base.Event
        if task.cancelled():
            last = base.STOPPED if self._closed else base.CANCELLED
        else:
            error = task.exception()
            last = task.result() if error is None else failure_of(error)
        with self._lock:
            self._streams.pop(stream.request.id, None)
        stream.emit(last)

    async def _end(self) -> None:
        tasks = [each.task for each in self._streams.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- the watching thread ------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            with contextlib.suppress(Exception):  # the controller may be restarting
                self._count()
                self._change_roles()
                if self._running == self.replicas:
                    self._cluster.have_spare()
                self._ask_copies()

    def _change_roles(self) -> None:
        """Ask the workers what they have done, and follow the planner."""
        if self.board is None or self._control is None:
            return
        self.board.live = [bool(n) for n in self._running.values()]
        live = [h for h, n in zip(self._handles.values(), self._running.values(), strict=True) if n]
        figures = [each.figures.remote().result(timeout_s=10) for each in live]
        if changed := self._control.decide(figures, time.monotonic()):
            base.LOG.info("workers change their roles: %s", changed)

    def _ask_copies(self) -> None:
        """Ask copies of the whole engine for their figures; a lost one's are left out."""
        if self._last != WHOLE:
            return
        asked = self._handles[WHOLE].broadcast("figures")
        told = asked.results(timeout_s=2, return_exceptions=True)
        self._figures = joined([each for each in told if isinstance(each, dict)])

    def _count(self) -> None:
        from ray import serve

        known = serve.status().applications
        for role, app in zip(self.replicas, self._apps, strict=True):
            states: Any = known[app].deployments[role].replica_states if app in known else {}
            self._running[role] = int(states.get("RUNNING", 0))


def joined(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of several engines as those of one: their sum, or that of the worst."""
    values: dict[str, list[float]] = {}
    for each in figures:
        for name, value in each.items():
            values.setdefault(name, []).append(value)
    return {name: max(each) if name in WORST else sum(each) for name, each in values.items()}


def _started(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="mmfast-ray", daemon=True)
    thread.start()
    return thread
