"""Encoding, prefill and decoding of many requests in one batch, one unit of work at a time."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from mmfast.decoding.speculation import EXIT
from mmfast.serve.engine.decode import DecodeBatch, PausedAnswer, Said
from mmfast.serve.engine.encoder import MediaEncoder, Result, Steps, kept_tokens
from mmfast.serve.engine.kv.early import EarlyPrompt
from mmfast.serve.engine.kv.prefixes import Prefixes
from mmfast.serve.engine.model import chunk_work
from mmfast.serve.engine.prefill import Prefiller, PrefillJob, token_bytes
from mmfast.serve.engine.request import ActiveRequest
from mmfast.serve.engine.slots import Embedded, Filled

_END = object()
Made = tuple[ActiveRequest, Result]


class TowerQueue:
    """Requests that wait for embeddings, and the running call of the encoder."""

    def __init__(self, encoder: MediaEncoder) -> None:
        self.encoder = encoder
        self.waiting: dict[str, ActiveRequest] = {}
        self._call: tuple[Steps, list[ActiveRequest | None]] | None = None

    @property
    def answers(self) -> list[ActiveRequest]:
        """All requests that wait or are being encoded."""
        called = [answer for answer in self._call[1] if answer] if self._call else []
        return [*list(self.waiting.values()), *called]  # any thread may ask for health

    @property
    def running(self) -> bool:
        """True while a call of the encoder runs."""
        return self._call is not None

    def cancel(self, name: str) -> None:
        """Drop a request; a call without requests ends."""
        self.waiting.pop(name, None)
        batch = self._call[1] if self._call else []
        batch[:] = [None if each is not None and each.id == name else each for each in batch]
        if self._call is not None and not any(batch):
            self._call[0].close()
            self._call = None

    def texts(self) -> Iterator[Made]:
        """Embed the requests without media, which need no call of the tower."""
        for answer in list(self.waiting.values()):
            prepared = answer.prepared
            if prepared is not None and not prepared.media:
                del self.waiting[answer.id]
                yield answer, self.encoder.encode([prepared])[0]

    def step(self, budget: float | None) -> Made | None:
        """Run a slice of the call, which begins with all waiting requests; return a result.

        `budget` is in seconds; the call stops at the next block.
        """
        if self._call is None:
            fresh = [a for a in urgent(self.waiting.values()) if a.prepared is not None]
            for each in fresh:
                del self.waiting[each.id]
            prepared = [a.prepared for a in fresh if a.prepared is not None]
            self._call = self.encoder.steps(prepared), [*fresh]
        steps, batch = self._call
        self.encoder.slicer.budget = budget
        step = next(steps, _END)
        if step is _END:
            self._call = None
        elif isinstance(step, tuple):
            answer, batch[step[0]] = batch[step[0]], None
            return None if answer is None else (answer, step[1])
        return None


class RunningBatch:
    """Requests that are encoded, prefilled and decoded together."""

    def __init__(
        self,
        encoder: MediaEncoder,
        prefiller: Prefiller,
        decoder: DecodeBatch,
        limit: int,  # bytes of the keys and values of finished prompts to keep
        # receives the payer and the number of tokens of each piece of work
        served: Callable[[str, float], None],
    ) -> None:
        self.encoder, self.prefiller, self.decoder = encoder, prefiller, decoder
        self._served = served
        self.prefixes = Prefixes(limit)
        self.per_token = token_bytes(prefiller)
        self._tower = TowerQueue(encoder)
        self._jobs: dict[str, tuple[ActiveRequest, PrefillJob]] = {}
        self._running: dict[str, ActiveRequest] = {}
        # requests that give way to more urgent ones, with what was done for them so far
        self.paused: dict[str, tuple[ActiveRequest, PrefillJob | PausedAnswer | None]] = {}
        self._prefill_next = False
        self._decoded = False  # the last pass of prefill held a decoding step
        self.waited = False  # a running answer, here or elsewhere, waits for the unit of work
        self.pace = 0.02  # seconds of a chunk of prefill, a running mean
        # seconds between recent decoding steps, by the clock and of the engine's threads
        self.gaps: deque[tuple[float, float]] = deque(maxlen=4096)
        # tokens of recent passes of prefill, and their seconds by both clocks
        self.passes: deque[tuple[int, float, float]] = deque(maxlen=4096)
        self._stepped: tuple[float, float] | None = None

    @property
    def answers(self) -> list[ActiveRequest]:
        """All requests at work."""
        jobs = [answer for answer, _ in list(self._jobs.values())]  # any thread may ask for health
        paused = [answer for answer, _ in list(self.paused.values())]
        return [*self._tower.answers, *jobs, *list(self._running.values()), *paused]

    @property
    def coming(self) -> list[ActiveRequest]:
        """Requests without a token yet."""
        return [answer for answer in self.answers if answer.id not in self._running]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values of requests at work."""
        both = [*list(self._jobs.values()), *list(self.paused.values())]
        jobs = sum(held.nbytes for _, held in both if held is not None)
        return self.decoder.nbytes + jobs

    def start(self, answer: ActiveRequest) -> None:
        """Take a request in."""
        self._tower.waiting[answer.id] = answer

    def cancel(self, name: str) -> None:
        """Drop a request at any stage; its memory is free at once."""
        self._tower.cancel(name)
        self._jobs.pop(name, None)
        if isinstance(paused := self.paused.pop(name, (None, None))[1], PausedAnswer):
            self.decoder.drafts.release(paused.row)
        if self._running.pop(name, None) is not None:
            self.decoder.release(name)

    def pause(self, urgent: ActiveRequest) -> bool:
        """Let the least urgent request of the same account give way, which keeps what it has.

        False where none is less urgent than `urgent`, or can stop now (FlowPrefill, FastSwitch).
        """
        held = [*self._tower.waiting.values(), *(answer for answer, _ in self._jobs.values())]
        mine = [*self._running.values(), *held][::-1]  # of equal ones, the last to be begun
        for answer in sorted(mine, key=lambda each: each.priority):
            if answer.payer != urgent.payer or answer.priority >= urgent.priority:
                continue
            kept: PrefillJob | PausedAnswer | None = None
            if answer.id in self._running:
                if (kept := self.decoder.pause(answer.id)) is None:
                    continue
                del self._running[answer.id]
            elif self._tower.waiting.pop(answer.id, None) is None:
                kept = self._jobs.pop(answer.id)[1]
            self.paused[answer.id] = answer, kept
            return True
        return False

    def resume(self, first: ActiveRequest | None) -> bool:
        """Go on with the most urgent paused request, unless `first` of its account goes before."""
        for answer, kept in sorted(self.paused.values(), key=lambda both: -both[0].priority):
            if first and answer.payer == first.payer and answer.priority < first.priority:
                continue
            del self.paused[answer.id]
            if kept is None:
                self._tower.waiting[answer.id] = answer
            elif isinstance(kept, PrefillJob):
                self._jobs[answer.id] = answer, kept
            else:
                self.decoder.resume(kept)
                self._running[answer.id] = answer
            return True
        return False

    # --- one unit of work ---------------------------------------------------------------------

    def work(self) -> bool:
        """Do a slice of the tower or a chunk of prefill, in turns, or what ends one of them.

        Returns True if another unit may follow before a decoding step: never after a pass.
        """
        if read := self._read():
            self._finish(*read[0])
            return True
        for answer, found in self._tower.texts():
            self._encoded(answer, found)
        encodes = self._tower.waiting or self._tower.running
        if encodes and not (self._jobs and self._prefill_next):
            self._prefill_next = True
            self._encode()
            return True
        self._prefill_next = False
        self._prefill()
        return False

    def unit(self, waited: bool) -> None:
        """Do one unit of work on prompts; `waited` if answers, here or elsewhere, wait for it."""
        self.waited, start, slicer = waited, time.perf_counter(), self.encoder.slicer
        work = chunk_work(self.prefiller.model, self.prefiller.chunk)
        slicer.allow(0.7 * self.pace if waited else None, work)
        # Small units share a step: each step costs as much as a few of them.
        while self.work():
            if time.perf_counter() - start > self.pace / 3 or slicer.done > work / 3:
                break

    def decode(self) -> None:
        """Decode one token of every running answer, unless the last pass of prefill did."""
        decoded, self._decoded = self._decoded, False
        if self._running and not decoded:
            self._push(self.decoder.rounds())

    def _push(self, rounds: Iterator[list[Said]]) -> None:
        """Send the tokens of a step: one of every answer, then those behind drafts that stand."""
        for number, found in enumerate(rounds):
            if not number:
                self._timed()
            self._say(found)

    def _timed(self) -> None:
        now = time.perf_counter(), time.thread_time() + self.encoder.slicer.worked
        if self._stepped is not None:
            self.gaps.append((now[0] - self._stepped[0], now[1] - self._stepped[1]))
        self._stepped = now

    def _say(self, found: Sequence[Said]) -> None:
        for payer, tokens in Counter(self._running[str(key)].payer for key, _ in found).items():
            self._served(payer, tokens)
        for key, token in found:
            answer = self._running[str(key)]
            try:
                if isinstance(token, Exception):
                    raise token
                if not answer.push(token):
                    self._release(answer)
            except Exception as error:  # of this answer alone
                self._fail(answer, error)

    def _encode(self) -> None:
        # A slice ends at the first block after its budget, with that block at about a chunk;
        # without running answers the tower need not stop before there is a pass of prefill.
        start, budget = time.perf_counter(), 0.7 * self.pace if self.waited else None
        while self._tower.running or self._tower.waiting:
            made = self._tower.step(budget)
            if made is None:
                return
            self._encoded(*made)
            left = sum(job.left for _, job in self._jobs.values())
            spent = time.perf_counter() - start
            if left >= self.prefiller.chunk or (self.waited and spent > 0.35 * self.pace):
                return

    def _encoded(self, answer: ActiveRequest, found: Result) -> None:
        if isinstance(found, Exception):
            self._fail(answer, found)
            return
        answer.prepared, most = None, found.length + answer.sampling.max_tokens
        answer.piece = found.length
        prefix = None
        if found.recipe is None and self.prefiller.keeps_prefixes:
            answer.reserve = most
        if (rest := self.prefiller.rereads(found)) is not None:
            prefix = self.prefixes.find(answer.request.tenant, found.blocks, found.length, rest)
        try:
            job = self.prefiller.job(found, most, prefix)
        except Exception as error:
            self._fail(answer, error)
            return
        if answer.drafts is not None and answer.drafts.plan.kind == EXIT and job.policy is None:
            job.early = EarlyPrompt(self.decoder.lane, job.done, found.length)
        answer.cached = max(found.reused, job.reused)
        self._jobs[answer.id] = answer, job

    def _prefill(self) -> None:
        self.prefiller.slice = 0.7 * self.pace if self.waited else None
        order = [self._jobs[each.id] for each in urgent(a for a, _ in self._jobs.values())]
        if not (plan := self.prefiller.plan([job for _, job in order], self.waited)):
            self._fail_broken()
            return
        owners = {job: answer for answer, job in order}
        fuses, logits = self.decoder.joins and self.decoder.reads, None
        try:
            logits = self._pass(plan, owners, fuses)
        except Exception as failed:  # run one by one, only the broken prompts fail
            for key in self.decoder.unrepeatable():
                self._fail(self._running[str(key)], failed)
            self.decode()
            self._decoded = True
            for job, n in plan:
                try:
                    self._pass([(job, n)], owners)
                except Exception as error:
                    self._fail(owners[job], error)
        if logits is not None:
            self._push(self.decoder.end(logits))
            self._decoded = True
        self._fail_broken()
        for answer, job in self._read():
            # Copying a long prompt to its row takes as long as a pass: a unit of its own.
            if job.prompt.length <= self.prefiller.chunk or not self.waited:
                self._begin(answer, job)

    def _read(self) -> list[tuple[ActiveRequest, PrefillJob]]:
        return [(answer, job) for answer, job in self._jobs.values() if job.logits is not None]

    def _fail_broken(self) -> None:
        for answer, job in list(self._jobs.values()):
            if job.error is not None:
                self._fail(answer, job.error)

    def _finish(self, answer: ActiveRequest, job: PrefillJob) -> None:
        """Let policies act on a prompt that has been read; after the last layer, answer."""
        try:
            done = self.prefiller.settled(job)
        except Exception as error:
            self._fail(answer, error)
        else:
            if done:
                self._begin(answer, job)

    def _pass(
        self,
        plan: Sequence[tuple[PrefillJob, int]],
        owners: dict[PrefillJob, ActiveRequest],
        fuses: bool = False,
    ) -> Tensor | None:
        """Run one pass of prefill; return the logits of a decoding step that is part of it.

        An exception leaves all jobs unchanged.
        """
        work = sum(self.prefiller.cost(job, n) for job, n in plan)
        start, worked = time.perf_counter(), time.thread_time()
        logits = self.prefiller.run_with(plan, self.decoder) if fuses else None
        if not fuses:
            self.prefiller.run(plan)
        ms = (time.perf_counter() - start) * 1e3
        total = sum(n for _, n in plan)
        self.passes.append((total, ms / 1e3, time.thread_time() - worked))
        if work > self.prefiller.chunk // 2:  # scaled to a whole chunk
            self.pace += 0.2 * (ms / 1e3 * self.prefiller.chunk / work - self.pace)
            self.pace *= self.prefiller.fit(self.pace)
        for job, n in plan:
            owners[job].prefill_ms += ms * n / total
            self._served(owners[job].payer, n)
        return logits

    def _begin(self, answer: ActiveRequest, job: PrefillJob) -> None:
        del self._jobs[answer.id]
        prompt = job.prompt
        try:
            filled = self.prefiller.result(job)
            if (kv := job.prefix()) is not None:
                self.prefixes.put(answer.request.tenant, prompt.blocks, kv)
            answer.read = _trace(prompt), prompt.whole_length
            token = self.decoder.first(filled, answer.sampling)
            if answer.push(token):
                self.join(answer, filled, token)
            else:
                answer.complete()
        except Exception as error:
            self._fail(answer, error)

    def join(self, answer: ActiveRequest, filled: Filled, token: int) -> None:
        """Decode an answer with the others from now on, after its first token."""
        if not self._running:
            self._stepped = None  # no answer waited for this step
        self.decoder.admit(answer.id, filled, token, answer.sampling, answer.drafts)
        answer.steps = None if filled.row is None else filled.row.trace
        self._running[answer.id] = answer

    def _release(self, answer: ActiveRequest) -> None:
        self._running.pop(answer.id, None)
        self.decoder.release(answer.id)
        answer.complete()

    def _fail(self, answer: ActiveRequest, error: Exception) -> None:
        self.cancel(answer.id)
        answer.fail(error)


def urgent(answers: Iterable[ActiveRequest]) -> list[ActiveRequest]:
    """Return the most urgent requests of each account, in their order; the others wait."""
    most, held = dict[str, int](), list(answers)
    for answer in held:
        most[answer.payer] = max(most.get(answer.payer, answer.priority), answer.priority)
    return [answer for answer in held if answer.priority == most[answer.payer]]


def _trace(prompt: Embedded) -> dict[str, Any]:
    """Return the entries of the trace of a prompt that has been read."""
    if prompt.recipe is None:
        return prompt.trace
    trace = prompt.recipe.trace
    kept = kept_tokens(prompt.visual_tokens, trace)
    return {**prompt.trace, **trace.to_dict(), "kept_tokens": kept}
