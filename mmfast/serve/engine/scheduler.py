"""The engine of this process: many requests on one stock model, batched as they come."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from mmfast.caches.plan import call_plan
from mmfast.core.errors import MmfastError
from mmfast.core.spec import parse
from mmfast.models.loading import EMBEDDED, load
from mmfast.planner.target import check_alone, make_target
from mmfast.serve.engine.base import (
    BusyError,
    Emit,
    Failure,
    Health,
    Options,
    Request,
    SamplingOptions,
)
from mmfast.serve.engine.decode import Writer
from mmfast.serve.engine.encoder import MediaEncoder, early
from mmfast.serve.engine.failures import LOG
from mmfast.serve.engine.lanes import Lanes
from mmfast.serve.engine.request import ActiveRequest, checked, context_of, fitting
from mmfast.serve.engine.slots import kv_limit


class QueueEntry(Protocol):
    """What a queue needs to know."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def payer(self) -> str:
        """Whose share it takes."""

    @property
    def priority(self) -> int:
        """Higher goes first."""


T = TypeVar("T", bound=QueueEntry)


class FairQueue(Generic[T]):
    """Requests that wait.

    Work is counted in tokens. A payer that comes anew starts level with the one that had least
    among those at work, so that nobody saves up turns.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, T] = OrderedDict()
        self.served: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, item: T, active: Iterable[str] = ()) -> None:
        """Let one wait; `active` are the payers at work."""
        present = {*active, *(each.payer for each in self._waiting.values())}
        if item.payer not in present:
            floor = min((self.served.get(name, 0.0) for name in present), default=0.0)
            self.served[item.payer] = max(self.served.get(item.payer, 0.0), floor)
        self._waiting[item.id] = item

    def peek(self) -> T | None:
        """Who goes next."""
        if not self._waiting:
            return None
        order = enumerate(self._waiting.values())
        return min(order, key=lambda p: (self.served.get(p[1].payer, 0.0), -p[1].priority, p[0]))[1]

    def remove(self, name: str) -> T | None:
        """Take one out by name; None where it does not wait."""
        return self._waiting.pop(name, None)

    def count(self, payer: str, tokens: float, active: Callable[[], Iterable[str]] = tuple) -> None:
        """A payer was given work of so many tokens; `active` tells the payers at work."""
        self.served[payer] = self.served.get(payer, 0.0) + tokens
        if len(self.served) > 4096:  # payers that left; those at work stay
            keep = {*active(), *(each.payer for each in self._waiting.values()), payer}
            self.served = {name: had for name, had in self.served.items() if name in keep}


class Scheduler:
    """Answers requests; see `mmfast.serve.engine.base.Executor`.

    One thread owns the model. Every round it does one unit of work on prompts, a call of the
    vision tower or a chunk of prefill, and then one decoding step for all running answers, so no
    answer waits longer than a unit. Two things are longer: the prompt of a request whose specs act
    inside the model or on its cache is read in one piece, in a lane of its own, and the first
    request with a latency target has the device measured.

    Args:
        model: Checkpoint directory, hub id, `(model, processor)` pair, or None (embedded).
        reduce: Spec string of reducers for requests that name none.
        cache: Spec string of cache policies for requests that name none.
        device: `cpu`, `cuda`, `cuda:1`; None takes CUDA where there is one.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        slots: Requests that are answered at once.
        context: Longest prompt and answer in tokens; None takes the model's.
        chunk: Tokens of prompts between two decoding steps.
        queue: Requests that may wait; one more raises `BusyError`.
        memory: Bytes of keys and values: `"2GB"`; None measures what is free.
        sharing: Engines on the device, among which what is free is shared out.
        name: What the model is called.
        encoder: Makes the encoder of a model, a processor and bytes to keep results in.

    Raises:
        SpecError: `reduce` or `cache` is wrong.
        ModelError: The model cannot be loaded.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        reduce: str | None = None,
        cache: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        slots: int = 16,
        context: int | None = None,
        chunk: int = 256,
        queue: int = 32,
        memory: str | int | None = None,
        sharing: int = 1,
        name: str | None = None,
        encoder: Callable[[Any, Any, int], MediaEncoder] = MediaEncoder,
    ) -> None:
        parse(reduce), call_plan(cache)
        stock, processor = load(model, device, dtype)
        self.model = name or (EMBEDDED if model is None else str(model))
        limit = kv_limit(memory, stock.device, sharing)
        self._queue: FairQueue[ActiveRequest] = FairQueue()
        self._most, self._slots = slots + queue, slots
        self.context = context or context_of(stock)
        kept = encoder(stock, processor, min(limit // 4, 256 << 20))
        self._lanes = Lanes(kept, slots, chunk, limit, self._served, model)
        self._default = Options(reduce, cache)
        self._lanes.check(self._answer(Request("", ()), print, SamplingOptions()))
        self._wake = threading.Condition()
        self._known: dict[str, ActiveRequest | None] = {}
        self._new: deque[ActiveRequest] = deque()
        self._gone: set[str] = set()
        self._closed = False
        self._pace, self._ended = 0.1, time.perf_counter()  # seconds between two ends
        self._thread = threading.Thread(target=self._run, name="mmfast-engine", daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------

    def submit(self, request: Request, emit: Emit) -> None:
        """See `Executor.submit`."""
        sampling = checked(request.sampling)
        with self._wake:
            self._open(request)
            self._known[request.id] = None  # its place, while it is prepared
        try:
            answer = self._prepared(request, emit, sampling)
        except BaseException:
            with self._wake:
                self._known.pop(request.id, None)
                self._gone.discard(request.id)
            raise
        with self._wake:
            if self._closed:
                self._known.pop(request.id, None)
                raise MmfastError("the engine is closed; start another one")
            self._known[request.id] = answer
            self._new.append(answer)
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """See `Executor.cancel`."""
        with self._wake:
            if request_id in self._known:
                self._gone.add(request_id)
                self._wake.notify()

    def health(self) -> Health:
        """See `Executor.health`."""
        with self._wake:
            running = len(self._lanes.answers)
            waiting = len(self._known) - running
            ready = not self._closed and self._thread.is_alive()
        return Health(ready, running, max(0, waiting), self._lanes.gauges())

    def close(self) -> None:
        """See `Executor.close`."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _open(self, request: Request) -> None:
        """Refuse what cannot come in now."""
        if self._closed:
            raise MmfastError("the engine is closed; start another one")
        known = {name: a for name, a in self._known.items() if a is None or not a.over}
        if request.id in known:
            raise MmfastError(f"request id {request.id!r} is at work already; give another")
        if len(known) >= self._most:
            wait = min(30.0, max(0.1, self._pace))
            raise BusyError(
                f"{len(known)} requests run or wait already; try again in {wait:.1f} s", wait
            )

    def _answer(self, request: Request, emit: Emit, sampling: SamplingOptions) -> ActiveRequest:
        """A request with the engine's own options where it has none."""
        answer, mine = ActiveRequest(request, emit, sampling), request.options
        answer.cache = self._default.cache if mine.cache is None else mine.cache
        answer.target = mine.target_ttft_ms
        if mine.target_ttft_ms is not None:
            check_alone(make_target(mine.target_ttft_ms), mine.reduce)
        else:
            answer.reduce = self._default.reduce if mine.reduce is None else mine.reduce
        return answer

    def _prepared(self, request: Request, emit: Emit, sampling: SamplingOptions) -> ActiveRequest:
        answer, lanes = self._answer(request, emit, sampling), self._lanes
        lanes.check(answer)
        prepared = lanes.encoder.prepare(request, answer.reduce if early(answer.reduce) else None)
        most = fitting(prepared.length, sampling.max_tokens, self.context)
        # What was shown is in the inputs now; nobody looks at it again.
        answer.request = replace(request, messages=())
        answer.prepared, answer.reserve = prepared, most
        lanes.check_fits(answer)
        answer.writer = Writer(lanes.processor.tokenizer, sampling, lanes.chooser.ends)
        return answer

    # --- the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._new or self._leaving() or self._busy()):
                    self._wake.wait()
                    self._ended = time.perf_counter()
                if self._closed:
                    break
                self._take()
            try:
                self._round()
            except Exception as error:  # what is not one request's fault ends all that run
                LOG.exception("the engine failed")
                for answer in self._lanes.clear():
                    answer.fail(error, logged=True)
            self._tidy()
        self._end_all()

    def _busy(self) -> bool:
        return bool(self._lanes.answers) or len(self._queue) > 0

    def _leaving(self) -> bool:
        """Whether a request that is here was cancelled; one that is being prepared comes later."""
        return any(self._known.get(name, self) is not None for name in self._gone)

    def _take(self) -> None:
        """What other threads brought; called with the lock."""
        while self._new:
            answer = self._new.popleft()
            self._queue.push(answer, self._payers())
        for name in tuple(self._gone):
            answer_or_place = self._known.get(name)
            if name not in self._known:
                self._gone.discard(name)
            if answer_or_place is None:
                continue  # still being prepared, or over
            self._gone.discard(name)
            self._queue.remove(name)
            self._lanes.cancel(name)
            answer_or_place.end(Failure("cancelled", 499, "cancelled"))

    def _payers(self) -> set[str]:
        return {each.payer for each in self._lanes.answers}

    def _served(self, payer: str, tokens: float) -> None:
        self._queue.count(payer, tokens, self._payers)

    def _round(self) -> None:
        while (first := self._queue.peek()) is not None and self._lanes.fits(first):
            self._queue.remove(first.id)
            self._lanes.start(first)
        self._lanes.round()

    def _tidy(self) -> None:
        """Forget what is over."""
        with self._wake:
            over = [name for name, a in self._known.items() if a and a.over]
            for name in over:
                del self._known[name]
        if over:
            now = time.perf_counter()
            self._pace += 0.2 * ((now - self._ended) / len(over) - self._pace)
            self._ended = now

    def _end_all(self) -> None:
        self._lanes.clear()
        self._lanes.encoder.slicer.close()
        with self._wake:
            left = [answer for answer in self._known.values() if answer is not None]
            self._known.clear()
        for answer in left:
            answer.end(Failure("the engine is closed", 503))
