"""Requests, events and the protocol of engines, with the failures that an answer can end in.

Requests and events are plain data that can be pickled, so that one request runs in this process,
in another one, or on a cluster.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from mmfast.core.errors import MmfastError, ModelError
from mmfast.decoding.speculation import OFF
from mmfast.models.prompt import Shot

LOG = logging.getLogger("mmfast.serve")
Role = Literal["system", "user", "assistant", "tool"]
Reason = Literal["stop", "length"]


@dataclass(frozen=True)
class Media:
    """A decoded image or clip; `key` hashes its content and sampling, for reuse of results.

    `note` says what of it was not read.
    """

    shot: Shot
    key: str
    note: str = ""


@dataclass(frozen=True)
class Message:
    """One message of a conversation: its role, and its texts and media in order."""

    role: Role
    content: tuple[str | Media, ...]
    # what else the chat template reads of it: `tool_calls`, `tool_call_id`, `name`
    more: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # on what was not heard of the sounds that its texts were

    @property
    def chat(self) -> dict[str, Any]:
        """The message as `chat_inputs` takes it."""
        content = [part.shot if isinstance(part, Media) else part for part in self.content]
        return {**self.more, "role": self.role, "content": content}


@dataclass(frozen=True)
class SamplingOptions:
    """Options of choosing tokens."""

    max_tokens: int = 64
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # share of the probability mass to draw from
    seed: int | None = None  # seed of the draws; None draws a new one
    stop: tuple[str, ...] = ()  # texts that end the answer and are not part of it
    top_k: int = 0  # most likely tokens to draw from; 0 takes all
    min_p: float = 0.0  # least probability of a token as a share of the likeliest
    repetition_penalty: float | None = None  # of prompt and answer; None takes the model's
    presence_penalty: float = 0.0  # taken from the logits of tokens of the answer, once
    frequency_penalty: float = 0.0  # and for every time they occur
    logit_bias: tuple[tuple[int, float], ...] = ()  # tokens, and what is added to their logits
    min_tokens: int = 0  # tokens before the answer may end
    ignore_eos: bool = False  # the model's own ends do not end the answer
    stop_token_ids: tuple[int, ...] = ()  # further tokens that end the answer
    logprobs: int | None = None  # likeliest tokens to report beside each token of the answer
    grammar: str | None = None  # grammar of llguidance that the answer follows
    rules: Any = field(default=None, compare=False, repr=False)  # state of one answer's choices


@dataclass(frozen=True)
class TokenChance:
    """A token of an answer, with its log-probability and the likeliest tokens in its place."""

    token: bytes
    chance: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True)
class Options:
    """The `mmfast` part of a request; None takes the spec of the server, `none` takes none.

    For `target_ttft_ms`, the time to the first token, the planner picks the reducers.
    """

    reduce: str | None = None
    cache: str | None = None
    target_ttft_ms: float | None = None
    prefill: str | None = None
    decode: str | None = None
    reuse: str | None = None
    modules: tuple[str, ...] = ()  # of the engine's schema, before the question
    arguments: Mapping[str, str] = field(default_factory=dict)  # of their parameters
    raw: str | tuple[int, ...] | None = None  # a prompt that replaces the chat template's
    # arguments of the chat template, such as `tools`, and of the processor
    template: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)

    def over(self, default: Options) -> Options:
        """Return these options with the specs that hold on a server with those of `default`."""
        found = dict[str, str | None]()
        for name in ("reduce", "cache", "prefill", "decode"):
            own = getattr(self, name)
            spec = getattr(default, name) if own is None else own
            found[name] = None if spec == OFF else spec
        return replace(self, **found)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Request:
    """One request for an answer."""

    id: str  # unique among the running requests
    messages: tuple[Message, ...]
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    options: Options = field(default_factory=Options)
    tenant: str = ""  # owner of the request; results are reused within a tenant only
    priority: int = 0  # higher goes first among the requests of one account
    # account whose fair share the work counts against; None is the tenant
    account: str | None = None
    adapter: str | None = None  # name of a LoRA adapter; None is the model alone

    @property
    def payer(self) -> str:
        """The account, or the tenant where no account is given."""
        return self.tenant if self.account is None else self.account


@dataclass(frozen=True)
class Delta:
    """A piece of the answer: text in whole characters, and the tokens it took."""

    text: str
    tokens: int = 1
    logprobs: tuple[TokenChance, ...] = ()
    prompt_tokens: int = 0  # as in `Finish`; 0 where it is not known yet


@dataclass(frozen=True)
class Finish:
    """The end of a complete answer."""

    reason: Reason  # `stop` or `length`
    prompt_tokens: int  # tokens of the prompt before reduction, visual tokens included
    completion_tokens: int
    cached_tokens: int = 0  # tokens of the prompt for which earlier work was reused
    # `Trace.to_dict()` with `visual_tokens`, `kept_tokens` and `ttft_ms`
    trace: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """The end of an answer that cannot be completed."""

    message: str  # one line for the user
    # HTTP status: 4xx for a wrong request, 499 for a cancelled one, 5xx for the engine
    status: int = 500
    # `invalid_request_error`, `model_error`, `server_error`, `busy`, `cancelled` or `replica_lost`
    kind: str = "server_error"


Event = Delta | Finish | Failure
Emit = Callable[[Event], None]  # called from the engine's thread; must not block
CANCELLED = Failure("cancelled", 499, "cancelled")
STOPPED = Failure("the server stops", 503)


class BusyError(MmfastError):
    """The engine has no room now; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoTokenError(ModelError):
    """The logits of the model are not finite, so no token can be chosen."""


def failure(error: BaseException, request: str = "", logged: bool = False) -> Failure:
    """Turn an exception into the last event of an answer.

    The text of an `MmfastError` is sent to the user. Any other text may hold paths or data of
    others; it goes to the log alone, unless `logged` says that it is there already.
    """
    if isinstance(error, BusyError):
        return Failure(str(error), 503, "busy")
    if isinstance(error, MmfastError) and not isinstance(error, ModelError):
        return Failure(str(error), 400, "invalid_request_error")
    if not logged:
        LOG.error("request %s failed", request, exc_info=error)
    if isinstance(error, NoTokenError):
        text = "the model gave NaN or infinite logits, so no token can be chosen"
        return Failure(f"{text}; ask something else", 500, "model_error")
    if isinstance(error, ModelError):
        text = "the model failed on this request; the server's log says why"
        return Failure(text, 500, "model_error")
    return Failure(f"the engine failed on this request ({type(error).__name__})")


@dataclass(frozen=True)
class Health:
    """State of an engine."""

    ready: bool
    running: int = 0
    waiting: int = 0
    # further figures by name, such as `kv_bytes`, `kv_bytes_limit`, `cache_hits`
    gauges: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Executor(Protocol):
    """An engine that answers requests."""

    model: str  # name of the model in the API

    def submit(self, request: Request, emit: Emit) -> None:
        """Answer a request; exactly one `Finish` or `Failure` comes last.

        Raises `BusyError` if there is no room now, and `MmfastError` if the request can never be
        answered.
        """

    def cancel(self, request_id: str) -> None:
        """Stop answering and free the memory of the request; an unknown id is ignored."""

    def health(self) -> Health:
        """Report the state without waiting."""

    def close(self) -> None:
        """Stop; running requests fail."""


class Echo:
    """An engine without a model: repeats the words of the last message, and images by kind."""

    model = "echo"

    def submit(self, request: Request, emit: Emit) -> None:
        """See `Executor.submit`."""
        threading.Thread(target=self._answer, args=(request, emit), daemon=True).start()

    def _answer(self, request: Request, emit: Emit) -> None:
        parts = request.messages[-1].content
        words = [
            word
            for part in parts
            for word in ([f"<{part.shot.kind}>"] if isinstance(part, Media) else part.split())
        ]
        words_out = words[: request.sampling.max_tokens]
        for i, word in enumerate(words_out):
            emit(Delta(" " * (i > 0) + word))
        reason: Reason = "stop" if len(words_out) == len(words) else "length"
        emit(Finish(reason, len(words), len(words_out)))

    def cancel(self, request_id: str) -> None:
        """See `Executor.cancel`; an answer is over at once."""

    def health(self) -> Health:
        """See `Executor.health`."""
        return Health(True)

    def close(self) -> None:
        """See `Executor.close`."""
