"""An answer as it is written: token by token from a branch of the stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from mmfast.core.errors import MmfastError
from mmfast.core.trace import Trace
from mmfast.streams.drafts import DraftedTokens, StreamDrafter

_BROKEN = "\ufffd"  # a character whose bytes are not all there yet


class Sampler:
    """Chooses tokens: the likeliest, or at random with a temperature above 0.

    Ids in `blocked` are never chosen: a model must not write placeholders of media. `top_p` keeps
    the likeliest tokens that together have so much probability. A `penalty` above 1 makes tokens
    less likely that were said before. MmfastError: a value out of range.
    """

    def __init__(
        self,
        blocked: Collection[int] = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        penalty: float = 1.0,
    ) -> None:
        numbers = all(isinstance(each, Real) for each in (temperature, top_p))
        if not numbers or not 0 <= temperature < float("inf") or not 0 < top_p <= 1:
            raise MmfastError(
                f"temperature={temperature!r}, top_p={top_p!r} cannot be sampled with; give a "
                "temperature of at least 0 and top_p in (0, 1]"
            )
        self.blocked = torch.tensor(sorted(blocked), dtype=torch.int64)
        self.temperature, self.top_p = temperature, top_p
        self._repeated = RepetitionPenaltyLogitsProcessor(float(penalty))
        self.random = torch.Generator()
        if seed is not None:
            if not isinstance(seed, int) or not 0 <= seed < 2**63:
                raise MmfastError(f"seed={seed!r} is not allowed; give a number from 0 to 2**63-1")
            self.random.manual_seed(seed)

    def allowed(self, logits: Tensor) -> Tensor:
        """Logits `[V]` float32 on the CPU without the blocked ids."""
        return logits.float().cpu().index_fill(0, self.blocked, -torch.inf)

    def __call__(self, logits: Tensor, said: Sequence[int] = ()) -> int:
        """The next token's id, behind the tokens `said`."""
        allowed = self.allowed(logits)
        if said:
            allowed = self._repeated(torch.tensor([said]), allowed[None])[0]
        if not self.temperature:
            return int(allowed.argmax())
        shares, ids = (allowed / self.temperature).softmax(-1).sort(descending=True)
        before = shares.cumsum(-1) - shares
        shares = shares.masked_fill(before >= self.top_p, 0)
        return int(ids[torch.multinomial(shares, 1, generator=self.random)])


def stop_ids(model: Any) -> set[int]:
    """Token ids that end an answer."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    return set(ends) if isinstance(ends, list) else set() if ends is None else {ends}


def recalled_frames(branch: Any) -> list[RecalledFrame]:
    """Frames that a branch of a stream has read again."""
    frames, readers = sorted(branch.frames.items()), branch.readers
    return [RecalledFrame(number, time, len(readers[number])) for number, time in frames]


class Letters:
    """Token ids to text, never a part of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = ""

    def add(self, id: int) -> str:
        """Return the text that a token adds; "" while a character is not complete."""
        self._ids.append(id)
        text = self._text()
        if text.endswith(_BROKEN):
            return ""
        delta, self._given = text[len(self._given) :], text
        return delta

    def end(self) -> str:
        """Return the rest, broken characters included."""
        return self._text()[len(self._given) :]

    def _text(self) -> str:
        # the whole answer each time: how a token reads may depend on all before it
        text: str = self._tokenizer.decode(
            self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


@dataclass(frozen=True)
class RecalledFrame:
    """A frame that had left the live window and was read again for a question.

    `number` is its number in the archive, `time` its seconds on the stream's clock, `layers` how
    many layers of the model read it.
    """

    number: int
    time: float | None
    layers: int


class Reply(Iterator[str]):
    """Text deltas of one answer; joined they are its text. Leave it early as you like.

    `trace` has rows `question` (prefill) and, when it has ended, `generate`; before it `recall`
    where the memory chooses anew on the way: how often layers did, and how often that changed what
    they read (its time is in `generate`), and behind it `draft`, of drafts proposed and accepted,
    where the answer has any. `ttft_ms` and `ms` count milliseconds from the question
    to the first token and to the end. `finished` is `stop` (the model ended it), `length`, `closed`
    (left early), or None before. `recalled` are the frames that were read again from the archive so
    far, by time.
    """

    def __init__(
        self,
        branch: Any,
        logits: Tensor | None,
        *,
        tokenizer: Any,
        sampler: Sampler | None,
        stops: Collection[int],
        limit: int,
        trace: Trace,
        started: float,
        ended: Callable[[Reply], None],
        prompt: Sequence[int] = (),
        drafter: StreamDrafter | None = None,
    ) -> None:
        self.branch = branch  # of the stream, a `mmfast.streams.engine.Branch`
        self.trace = trace
        self.recalled: list[RecalledFrame] = [] if branch is None else recalled_frames(branch)
        self.ids: list[int] = []
        self.ttft_ms = 0.0
        self.ms: float | None = None
        self.finished: str | None = None
        self._logits: Tensor | None = logits
        self._drafted = DraftedTokens(branch, drafter, limit)
        self.tokenizer, self._letters, self._sampler = tokenizer, Letters(tokenizer), sampler
        self._stops, self._limit = stops, limit
        self._started, self._ended, self._prompt = started, ended, prompt
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._parts)

    def __next__(self) -> str:
        while self.finished is None:
            delta = self._next()
            if delta:
                self._parts.append(delta)
                return delta
        raise StopIteration

    def _next(self) -> str:
        if len(self.ids) >= self._limit:
            return self._end("length")
        assert self._sampler is not None
        chosen = self._sampler(self._next_logits(), [*self._prompt, *self.ids])
        if not self.ids:
            self.ttft_ms = self._passed()
        if chosen in self._stops:
            return self._end("stop")
        self.ids.append(chosen)
        return self._letters.add(chosen)

    def _next_logits(self) -> Tensor:
        """The last token is fed when the next is wanted, so that its text is not held up."""
        logits, self._logits = self._logits, None
        if logits is None:
            logits = self._drafted.behind(self.ids)
            if self.branch.every:
                self.recalled = recalled_frames(self.branch)
        return logits

    def _end(self, finished: str) -> str:
        self._drafted.settle(self.ids)
        self.finished, self.ms = finished, self._passed()
        if self.branch.every:
            name = f"every={self.branch.every}"
            self.trace.add("recall", self.branch.choices, self.branch.changes, 0.0, name)
        self.trace.add("generate", 1, len(self.ids), self.ms - self.ttft_ms)
        if (drafter := self._drafted.drafter) is not None:
            made, stood, ms = drafter.proposed, drafter.accepted, drafter.seconds * 1e3
            self.trace.add("draft", made, stood, ms, drafter.plan.text)
        delta = self._letters.end()
        self._ended(self)
        self.branch = None  # its buffers are as large as the window
        return delta

    def _passed(self) -> float:
        return (time.perf_counter() - self._started) * 1e3

    def keep(self) -> None:
        """Append question and answer to the stream; called when it ends."""
        for token in self.ids[self._drafted.fed :]:  # the last one, where no next was wanted
            self.branch.token(token)
        self.branch.keep()

    def read(self) -> str:
        """The whole answer."""
        for _ in self:
            pass
        return self.text.strip()

    def close(self) -> None:
        """End it here; a remembered exchange holds what was said so far."""
        if self.finished is None:
            self._parts.append(self._end("closed"))

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return self.text


class ToldReply(Reply):
    """An answer whose text is known as a whole, such as one from the history of a stream."""

    def __init__(
        self, told: str, *, trace: Trace, started: float, ended: Callable[[Reply], None]
    ) -> None:
        """Give this text as one delta."""
        way: dict[str, Any] = {"trace": trace, "started": started, "ended": ended}
        super().__init__(None, None, tokenizer=None, sampler=None, stops=(), limit=1, **way)
        self._told = told

    def _next(self) -> str:
        if self._parts:
            return self._end("stop")
        self.ttft_ms = self._passed()
        return self._told

    def _end(self, finished: str) -> str:
        self.finished, self.ms = finished, self._passed()
        self._ended(self)
        return ""
