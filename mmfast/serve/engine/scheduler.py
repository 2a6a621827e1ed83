"""The engine in this process: continuous batching of requests on one stock model."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from mmfast.caches.plan import call_plan
from mmfast.core.errors import MmfastError, unknown
from mmfast.core.registry import MEDIA
from mmfast.core.spec import is_auto, parse
from mmfast.decoding.speculation import plan_decode
from mmfast.models.loading import EMBEDDED, twin
from mmfast.models.prompt import scope_note_of
from mmfast.models.reduction.record import features_given
from mmfast.planner.target import Target, automatic, check_alone, make_target
from mmfast.prefill.plan import plan_prefill
from mmfast.serve.engine.adapters import load_adapters
from mmfast.serve.engine.base import (
    CANCELLED,
    LOG,
    BusyError,
    Emit,
    Failure,
    Health,
    Media,
    Options,
    Request,
    SamplingOptions,
)
from mmfast.serve.engine.checks import unchecked
from mmfast.serve.engine.decode import Writer
from mmfast.serve.engine.encoder import MediaEncoder
from mmfast.serve.engine.model import load_packed
from mmfast.serve.engine.request import ActiveRequest, checked, context_of, fitting
from mmfast.serve.engine.reuse import ServedReuse
from mmfast.serve.engine.runner import ModelRunner
from mmfast.serve.engine.slots import kv_limit
from mmfast.streams.reuse.plan import check_beside, parse_reuse
from mmfast.streams.reuse.schema import PromptSchema
from mmfast.streams.reuse.store import ReuseStore, store_of

GATHER = 0.05  # seconds that an idle engine waits for requests that are being prepared
LULL = 0.002  # seconds after which no more of several requests is expected


class QueueEntry(Protocol):
    """An entry of the queue."""

    @property
    def id(self) -> str:
        """Name of the entry."""

    @property
    def payer(self) -> str:
        """Account whose share the work counts against."""

    @property
    def priority(self) -> int:
        """Higher goes first."""


T = TypeVar("T", bound=QueueEntry)


class FairQueue(Generic[T]):
    """A queue in which each account gets a fair share of the work, counted in tokens.

    An account that comes back starts level with the account that had least among those at work,
    so turns cannot be saved up. `lengths` are the mean tokens of an answer of each account.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, T] = OrderedDict()
        self.served: dict[str, float] = {}
        self.lengths: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, item: T, active: Iterable[str] = ()) -> None:
        """Add an entry; `active` are the accounts at work."""
        present = {*active, *(each.payer for each in self._waiting.values())}
        if item.payer not in present:
            floor = min((self.served.get(name, 0.0) for name in present), default=0.0)
            self.served[item.payer] = max(self.served.get(item.payer, 0.0), floor)
        self._waiting[item.id] = item

    def peek(
        self, cost: Callable[[T], float] = lambda entry: 0.0, running: Iterable[T] = ()
    ) -> T | None:
        """Return the next entry, which stays in the queue.

        An account is charged in advance with the `cost` in tokens of its requests that run, and of
        the one that is its next.
        """
        due, first = dict(self.served), dict[str, T]()
        for entry in running:
            due[entry.payer] = due.get(entry.payer, 0.0) + cost(entry)
        for entry in self._waiting.values():
            if entry.payer not in first or entry.priority > first[entry.payer].priority:
                first[entry.payer] = entry
        return min(first.values(), key=lambda e: due.get(e.payer, 0.0) + cost(e), default=None)

    def answered(self, payer: str, tokens: int) -> None:
        """Learn the length of a complete answer of an account."""
        mean = self.lengths.get(payer, float(tokens))
        self.lengths[payer] = mean + 0.2 * (tokens - mean)

    def remove(self, name: str) -> T | None:
        """Remove an entry by name; return None if it is not here."""
        return self._waiting.pop(name, None)

    def count(self, payer: str, tokens: float, active: Callable[[], Iterable[str]] = tuple) -> None:
        """Count work of an account in tokens; `active` returns the accounts at work."""
        self.served[payer] = self.served.get(payer, 0.0) + tokens
        if len(self.served) > 4096:  # forget accounts that have left
            keep = {*active(), *(each.payer for each in self._waiting.values()), payer}
            self.served = {name: had for name, had in self.served.items() if name in keep}
            self.lengths = {name: had for name, had in self.lengths.items() if name in keep}


class Scheduler:
    """Answers requests; see `mmfast.serve.engine.base.Executor`.

    One thread owns the model. In every round it does one unit of work on prompts, a slice of the
    vision tower or a chunk of prefill, and then one decoding step of all running answers, so no
    answer waits longer than a unit. One thing takes longer: the first request that is planned has
    the device measured.

    `model` is a checkpoint directory, a hub id, a `(model, processor)` pair, or None (embedded).
    `reduce`, `cache`, `prefill` and `decode` are for requests that name none. At most `slots`
    requests are answered at once; beyond `queue` waiting ones, `BusyError` is raised. `chunk` is in
    tokens of prompts between two decoding steps (None: 256, up to 2,048 where that takes a moment),
    `context` the longest prompt and answer in tokens (None: the model's). `memory` bounds keys and
    values, such as `"2GB"`; None takes a share of the free memory, which `sharing` engines divide.
    `lora` are folders of adapters by name, for requests that name one. `weights` packs those of a
    model loaded here (`"int8"`, `"fastest"`), and `attn` names its attention back end, as in
    pipelines. `reuse` keeps what media cost for later requests, as in pipelines (`"blend:0.15"`),
    in `store`: a `ReuseStore`, a folder, or None for main memory.
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
        chunk: int | None = None,
        queue: int = 32,
        memory: str | int | None = None,
        sharing: int = 1,
        name: str | None = None,
        lora: Mapping[str, str] | None = None,
        weights: str | None = None,
        attn: str | None = None,
        prefill: str | None = None,
        decode: str | None = None,
        reuse: str | None = None,
        store: ReuseStore | str | Path | None = None,
        modules: PromptSchema | str | Path | None = None,
    ) -> None:
        kept_plan, sparse = parse_reuse(reuse), plan_prefill(prefill)
        specs = parse(automatic(reduce, Target(), cache)[0])
        check_beside(kept_plan, specs, call_plan(cache), prefill=sparse)
        if kept_plan is None and store is not None:
            raise MmfastError("store= keeps nothing without reuse=; give reuse='prefix' too")
        stock, processor = load_packed(model, device, dtype, weights, lora, attn)
        # the same weights for others in this process, whose hooks do not act on the engine
        self.pair = twin(stock, processor)
        self._adapters = load_adapters(stock, lora or {})
        self.model = name or (EMBEDDED if model is None else str(model))
        self._embedded = model is None
        limit = kv_limit(memory, stock.device, sharing)
        self._queue: FairQueue[ActiveRequest] = FairQueue()
        self._most, self._slots = slots + queue, slots
        self.context = context or context_of(stock)
        kept = MediaEncoder(stock, processor, min(limit // 4, 256 << 20))
        again: ServedReuse | None = None
        if kept_plan is not None:
            again = ServedReuse(stock, processor, kept_plan, store_of(store), modules)
        elif modules is not None:
            raise MmfastError("modules= are kept nowhere without reuse=; give reuse='prefix' too")
        how = model, again, plan_decode(decode)
        self._runner = ModelRunner(kept, slots, chunk, limit, self._served, *how)
        self._default = Options(reduce, cache, prefill=prefill, decode=decode)
        self._runner.check(self._answer(Request("", ()), print, SamplingOptions()))
        self._wake = threading.Condition()
        self._known: dict[str, ActiveRequest | None] = {}
        self._new: deque[ActiveRequest] = deque()
        self._cancelled: set[str] = set()
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
            self._known[request.id] = None  # holds its place while it is prepared
        try:
            answer = self._prepared(request, emit, sampling)
        except BaseException:
            with self._wake:
                self._known.pop(request.id, None)
                self._cancelled.discard(request.id)
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
                self._cancelled.add(request_id)
                self._wake.notify()

    def health(self) -> Health:
        """See `Executor.health`."""
        with self._wake:
            running = len(self._runner.answers)
            waiting = len(self._known) - running
            ready = not self._closed and self._thread.is_alive()
        return Health(ready, running, max(0, waiting), self._runner.gauges())

    def close(self) -> None:
        """See `Executor.close`."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _open(self, request: Request) -> None:
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
        """Return a request with the engine's specs where it names no other, or `none`."""
        answer, mine = ActiveRequest(request, emit, sampling), request.options
        own = mine.over(self._default)
        answer.cache, answer.prefill, answer.decode = own.cache, own.prefill, own.decode
        target, reduce = make_target(mine.target_ttft_ms), own.reduce
        if target and not is_auto(reduce):
            check_alone(target, mine.reduce)
            reduce = None
        answer.reduce, answer.target = automatic(reduce, target)
        if answer.target.check is not None and (odd := unchecked(answer)):
            why = f"reduce={reduce!r} does not check answers under {odd}"
            if mine.reduce is not None:
                raise MmfastError(f"{why}; leave that out, or drop the check")
            answer.notes.append(why)
            answer.target = replace(answer.target, check=None)
        return answer

    def _prepared(self, request: Request, emit: Emit, sampling: SamplingOptions) -> ActiveRequest:
        if request.adapter not in (None, *self._adapters.keys):
            raise MmfastError(unknown("adapter", str(request.adapter), self._adapters.keys))
        answer, runner = self._answer(request, emit, sampling), self._runner
        runner.check(answer)
        prepared = runner.encoder.prepare(request)
        length = prepared.length + runner.ahead(answer)
        fitting(length, sampling.max_tokens, self.context)
        if self._embedded and (note := _scope_note(request)):
            answer.notes.append(note)
        # The inputs hold all that is needed of the messages, which can be large.
        answer.request = replace(request, messages=())
        answer.prepared, answer.length = prepared, length
        if not features_given(prepared.inputs) and answer.modules is None:
            kept = [] if is_auto(answer.reduce) else parse(answer.reduce)  # those of text have
            answer.reduce = "+".join(str(spec) for spec in kept if spec.tokens != MEDIA) or None
        runner.route(answer)
        runner.check_fits(answer)
        answer.writer = Writer(runner.processor.tokenizer, sampling, runner.chooser.ends)
        return answer

    # --- the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._new or self._any_cancelled() or self._busy()):
                    self._wake.wait()
                    self._ended = time.perf_counter()
                if not self._runner.answers:
                    self._gather()
                if self._closed:
                    break
                self._take()
            try:
                self._round()
            except Exception as error:  # an error of no single request ends all that run
                LOG.exception("the engine failed")
                for answer in self._runner.clear():
                    answer.fail(error, logged=True)
            self._tidy()
        self._end_all()

    def _gather(self) -> None:
        """Wait for requests that are being prepared, so that a first pass takes them along.

        The processor's Python code and the model's would slow each other down.
        """
        until = time.perf_counter() + GATHER
        while not self._closed and (left := until - time.perf_counter()) > 0:
            if None in self._known.values():
                self._wake.wait(left)
            elif len(self._new) < 2 or self._lull():
                return

    def _lull(self) -> bool:
        """Wait as long as the next request may take to prepare; True if none comes."""
        last = self._new[-1].prepared if self._new else None
        seconds = LULL if last is None else max(LULL, 1.5e-3 * last.ms)
        return not self._wake.wait(seconds) and None not in self._known.values()

    def _busy(self) -> bool:
        return bool(self._runner.answers) or len(self._queue) > 0 or self._runner.checks.busy

    def _any_cancelled(self) -> bool:
        return any(self._known.get(name, self) is not None for name in self._cancelled)

    def _take(self) -> None:
        """Take new and cancelled requests; called with the lock."""
        while self._new:
            answer = self._new.popleft()
            answer.queued = time.perf_counter()
            self._queue.push(answer, self._payers())
        for name in tuple(self._cancelled):
            answer_or_place = self._known.get(name)
            if name not in self._known:
                self._cancelled.discard(name)
            if answer_or_place is None:
                continue  # still being prepared, or over
            self._cancelled.discard(name)
            self._queue.remove(name)
            self._runner.cancel(name)
            answer_or_place.end(CANCELLED)

    def _payers(self) -> set[str]:
        return {each.payer for each in self._runner.answers}

    def _served(self, payer: str, tokens: float) -> None:
        self._queue.count(payer, tokens, self._payers)

    def _cost(self, answer: ActiveRequest) -> float:
        """Return the tokens that a request is still expected to take: its prompt and its answer.

        The prompt counts with all its visual tokens until it has been read, the answer as long as
        those of its account were so far, and as `max_tokens` before any of them has ended.
        """
        most, done = answer.sampling.max_tokens, answer.writer.count if answer.writer else 0
        mean = min(most, self._queue.lengths.get(answer.payer, most))
        return (answer.length if answer.read is None else 0) + max(0.0, mean - done)

    def _round(self) -> None:
        while True:
            first = self._queue.peek(self._cost, self._runner.answers)
            self._runner.resume(first)
            if first is None or not self._runner.fits(first):
                break
            self._queue.remove(first.id)
            first.waited_ms = (time.perf_counter() - first.queued) * 1e3
            self._runner.start(first)
        self._runner.round()

    def _tidy(self) -> None:
        with self._wake:
            over = [name for name, a in self._known.items() if a and a.over]
            for answer in [self._known.pop(name) for name in over]:
                if answer is not None and answer.writer is not None and answer.writer.over:
                    self._queue.answered(answer.payer, answer.writer.count)
        if over:
            now = time.perf_counter()
            self._pace += 0.2 * ((now - self._ended) / len(over) - self._pace)
            self._ended = now

    def _end_all(self) -> None:
        self._runner.close()
        self._adapters.close()
        with self._wake:
            left = [answer for answer in self._known.values() if answer is not None]
            self._known.clear()
        for answer in left:
            answer.end(Failure("the engine is closed", 503))


def _scope_note(request: Request) -> str:
    """Return one line on what of a request the embedded model was never trained on, or ""."""
    asked = [message.content for message in request.messages if message.role == "user"]
    shown = [[part.shot if isinstance(part, Media) else part for part in each] for each in asked]
    return scope_note_of(shown)
