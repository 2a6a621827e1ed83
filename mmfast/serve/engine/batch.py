"""The batched lane: encode, prefill and decode of many requests, one unit of work at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from mmfast.serve.engine.decode import DecodeBatch
from mmfast.serve.engine.encoder import MediaEncoder, Result, Steps
from mmfast.serve.engine.prefill import Prefiller, PrefillJob, Prefixes, token_bytes
from mmfast.serve.engine.request import ActiveRequest

_END = object()
Made = tuple[ActiveRequest, Result]


class TowerQueue:
    """Requests that wait for embeddings, and the call that makes them.

    Args:
        encoder: Makes embeddings.
    """

    def __init__(self, encoder: MediaEncoder) -> None:
        self.encoder = encoder
        self._waiting: dict[str, ActiveRequest] = {}
        self._call: tuple[Steps, list[ActiveRequest | None]] | None = None

    @property
    def answers(self) -> list[ActiveRequest]:
        """All requests that are here."""
        called = [answer for answer in self._call[1] if answer] if self._call else []
        return [*list(self._waiting.values()), *called]  # health is of any thread

    @property
    def under_way(self) -> bool:
        """Whether a call is under way."""
        return self._call is not None

    @property
    def waits(self) -> bool:
        """Whether somebody waits for the next call."""
        return bool(self._waiting)

    def add(self, answer: ActiveRequest) -> None:
        """Take a request in."""
        self._waiting[answer.id] = answer

    def cancel(self, name: str) -> ActiveRequest | None:
        """Let a request go; a call that is nobody's any more ends."""
        answer = self._waiting.pop(name, None)
        batch = self._call[1] if self._call else []
        for i, each in enumerate(batch):
            if each is not None and each.id == name:
                answer, batch[i] = each, None
        if self._call is not None and not any(batch):
            self._call[0].close()
            self._call = None
        return answer

    def texts(self) -> Iterator[Made]:
        """Requests without media: they need no tower, and wait for nobody's call of it."""
        for answer in list(self._waiting.values()):
            prepared = answer.prepared
            if prepared is not None and not prepared.media:
                del self._waiting[answer.id]
                yield answer, self.encoder.encode([prepared])[0]

    def step(self, budget: float | None) -> Made | None:
        """A slice of the call, which begins with all that wait; what became of one of them.

        Args:
            budget: Seconds after which the call stops at the next block; None never stops it.
        """
        if self._call is None:
            fresh = [a for a in self._waiting.values() if a.prepared is not None]
            self._waiting.clear()
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
    """Requests at work.

    Args:
        encoder: Makes embeddings.
        prefiller: Makes keys and values.
        decoder: Makes tokens.
        limit: Bytes of finished prompts that are kept.
        served: Told the tenant and how many tokens of work it was given.

    Attributes:
        prefixes: Beginnings of prompts that can be used again.
        pace: Seconds of a chunk of prefill, as it was lately.
        gaps: Seconds between decoding steps of late, by the clock and of the engine's threads.
        passes: Tokens of passes of prefill of late, and their seconds by both clocks.
    """

    def __init__(
        self,
        encoder: MediaEncoder,
        prefiller: Prefiller,
        decoder: DecodeBatch,
        limit: int,
        served: Callable[[str, float], None],
    ) -> None:
        self.encoder, self.prefiller, self.decoder = encoder, prefiller, decoder
        self._served = served
        self.prefixes = Prefixes(limit)
        self.per_token = token_bytes(prefiller)
        self._tower = TowerQueue(encoder)
        self._jobs: dict[str, tuple[ActiveRequest, PrefillJob]] = {}
        self._running: dict[str, ActiveRequest] = {}
        self._prefill_next = False
        self.pace = 0.02  # seconds of a chunk
        self.gaps: deque[tuple[float, float]] = deque(maxlen=4096)
        self.passes: deque[tuple[int, float, float]] = deque(maxlen=4096)
        self._stepped: tuple[float, float] | None = None

    @property
    def answers(self) -> list[ActiveRequest]:
        """All requests at work."""
        jobs = [answer for answer, _ in list(self._jobs.values())]  # health is of any thread
        return [*self._tower.answers, *jobs, *list(self._running.values())]

    @property
    def coming(self) -> list[ActiveRequest]:
        """Requests that have no token yet."""
        return [answer for answer in self.answers if answer.id not in self._running]

    @property
    def encoding(self) -> bool:
        """Whether a call of the tower is under way."""
        return self._tower.under_way

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values of requests at work."""
        jobs = sum(job.nbytes for _, job in list(self._jobs.values()))
        return self.decoder.slots.nbytes + jobs

    def start(self, answer: ActiveRequest) -> None:
        """Take a request in."""
        self._tower.add(answer)

    def cancel(self, name: str) -> ActiveRequest | None:
        """Let a request go, whatever is done with it; its memory is free at once."""
        answer = self._tower.cancel(name)
        if name in self._jobs:
            answer = self._jobs.pop(name)[0]
        if name in self._running:
            answer = self._running.pop(name)
            self.decoder.release(name)
        return answer

    # --- one unit of work ---------------------------------------------------------------------

    def work(self, new: bool = True) -> bool:
        """A slice of the tower or a chunk of prefill, in turns, or what ends one.

        Args:
            new: The tower may be called anew.

        Returns:
            Whether another unit may follow without a decoding step: never behind a pass.
        """
        if read := self._read():
            self._begin(*read[0])
            return True
        for answer, found in self._tower.texts():
            self._encoded(answer, found)
        encodes = (self._tower.waits and new) or self._tower.under_way
        if encodes and not (self._jobs and self._prefill_next):
            self._prefill_next = True
            self._encode()
            return True
        self._prefill_next = False
        self._prefill()
        return False

    def decode(self) -> bool:
        """One token for every running answer; whether there was any."""
        if not self._running:
            return False
        found = self.decoder.step()
        now = time.perf_counter(), time.thread_time() + self.encoder.slicer.worked
        if self._stepped is not None:
            self.gaps.append((now[0] - self._stepped[0], now[1] - self._stepped[1]))
        self._stepped = now
        for key, token in found:
            answer = self._running[str(key)]
            self._served(answer.payer, 1)
            try:
                if isinstance(token, Exception):
                    raise token
                if not answer.push(token):
                    self._release(answer)
            except Exception as error:  # of this answer alone
                self._fail(answer, error)
        return True

    def clear(self) -> list[ActiveRequest]:
        """Let everything go; the requests it was."""
        gone = self.answers
        for answer in gone:
            self.cancel(answer.id)
        return gone

    def _encode(self) -> None:
        # With nobody to wait for it, the tower need not stop.
        # A slice ends at the first block behind its time: with that block it is about a chunk.
        made = self._tower.step(0.7 * self.pace if self._running else None)
        if made is not None:
            self._encoded(*made)

    def _encoded(self, answer: ActiveRequest, found: Result) -> None:
        if isinstance(found, Exception):
            self._fail(answer, found)
            return
        answer.prepared = None
        answer.reserve = found.length + answer.sampling.max_tokens
        prefix = self.prefixes.find(answer.request.tenant, found.blocks, found.length)
        job = PrefillJob(found, prefix)
        answer.cached = max(found.reused, job.reused)
        self._jobs[answer.id] = answer, job

    def _prefill(self) -> None:
        order = sorted(self._jobs.values(), key=lambda both: -both[0].priority)
        if not (plan := self.prefiller.plan([job for _, job in order], bool(self._running))):
            return
        owners = {job: answer for answer, job in order}
        try:
            self._pass(plan, owners)
        except Exception:  # one of them is broken: alone, only that one fails
            for job, n in plan:
                try:
                    self._pass([(job, n)], owners)
                except Exception as error:
                    self._fail(owners[job], error)
        for answer, job in self._read():
            # Copying a long prompt to its row takes as long as a pass: a unit of its own.
            if job.prompt.length <= self.prefiller.chunk or not self._running:
                self._begin(answer, job)

    def _read(self) -> list[tuple[ActiveRequest, PrefillJob]]:
        """Prompts that are read, and wait to begin."""
        return [(answer, job) for answer, job in self._jobs.values() if not job.left]

    def _pass(
        self, plan: Sequence[tuple[PrefillJob, int]], owners: dict[PrefillJob, ActiveRequest]
    ) -> None:
        """One pass of prefill; nothing has happened where it raises."""
        work = sum(self.prefiller.cost(job, n) for job, n in plan)
        start, worked = time.perf_counter(), time.thread_time()
        self.prefiller.run(plan)
        ms = (time.perf_counter() - start) * 1e3
        total = sum(n for _, n in plan)
        self.passes.append((total, ms / 1e3, time.thread_time() - worked))
        if work > self.prefiller.chunk // 2:  # what a whole chunk takes here and now
            self.pace += 0.2 * (ms / 1e3 * self.prefiller.chunk / work - self.pace)
        for job, n in plan:
            owners[job].prefill_ms += ms * n / total
            self._served(owners[job].payer, n)

    def _begin(self, answer: ActiveRequest, job: PrefillJob) -> None:
        """From prefill to decoding."""
        del self._jobs[answer.id]
        prompt, filled = job.prompt, self.prefiller.result(job)
        answer.read = prompt.told, prompt.whole_length
        self.prefixes.put(answer.request.tenant, prompt.blocks, filled.kv)
        if not self._running:
            self._stepped = None  # nobody waited until now
        self._running[answer.id] = answer
        try:
            token = self.decoder.first(filled, answer.sampling)
            if answer.push(token):
                self.decoder.admit(answer.id, filled, token, answer.sampling)
            else:
                self._release(answer)
        except Exception as error:
            self._fail(answer, error)

    def _release(self, answer: ActiveRequest) -> None:
        self._running.pop(answer.id, None)
        self.decoder.release(answer.id)
        if answer.broken or answer.read is None:
            answer.over = True
            return
        answer.finish(*answer.read)

    def _fail(self, answer: ActiveRequest, error: Exception) -> None:
        self.cancel(answer.id)
        answer.fail(error)
