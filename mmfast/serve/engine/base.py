"""What every engine takes and gives: requests, events, and the protocol between them.

All of it is data that can be pickled, so that the same request runs in this process, in another
one, or on a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from mmfast.core.errors import MmfastError
from mmfast.models.prompt import Shot

Role = Literal["system", "user", "assistant"]
Reason = Literal["stop", "length"]


@dataclass(frozen=True)
class Media:
    """A decoded image or clip, and the name under which work on it can be used again.

    Attributes:
        shot: The pixels.
        key: Hash of the content and of how it was sampled.
    """

    shot: Shot
    key: str


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: Who says it.
        content: Texts and media in order.
    """

    role: Role
    content: tuple[str | Media, ...]


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen.

    Attributes:
        max_tokens: Longest answer in tokens.
        temperature: 0 is greedy.
        top_p: Share of the probability that is drawn from.
        seed: Of the draws; None draws a new one.
        stop: Texts that end the answer and are not part of it.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """The `mmfast` part of a request.

    Attributes:
        reduce: Spec string of reducers; None takes the server's.
        cache: Spec string of cache policies; None takes the server's.
        target_ttft_ms: The planner picks the reducers, instead of `reduce`.
    """

    reduce: str | None = None
    cache: str | None = None
    target_ttft_ms: float | None = None


@dataclass(frozen=True)
class Request:
    """One answer that somebody waits for.

    Attributes:
        id: Unique among those that run.
        messages: The conversation, the last message the user's.
        sampling: How tokens are chosen.
        options: What is reduced, and how far.
        tenant: Whose request it is: results are reused within a tenant only.
        priority: Higher goes first, among those of its payer.
        account: Who pays for the work, of whom each has a fair share; None is the tenant.
    """

    id: str
    messages: tuple[Message, ...]
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    options: Options = field(default_factory=Options)
    tenant: str = ""
    priority: int = 0
    account: str | None = None

    @property
    def payer(self) -> str:
        """Whose share of the machine it takes."""
        return self.tenant if self.account is None else self.account


@dataclass(frozen=True)
class Delta:
    """A piece of the answer.

    Attributes:
        text: Never half a character.
        tokens: Tokens it took.
    """

    text: str
    tokens: int = 1


@dataclass(frozen=True)
class Finish:
    """The answer is over.

    Attributes:
        reason: Why.
        prompt_tokens: Of the prompt as the model would have got it, visual tokens included.
        completion_tokens: Of the answer.
        cached_tokens: Of the prompt, those whose work was reused.
        trace: `Trace.to_dict()`, with `visual_tokens`, `kept_tokens`, `ttft_ms` beside its rows.
    """

    reason: Reason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    trace: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """The answer ended without being over.

    Attributes:
        message: One line for the user.
        status: As in HTTP: 4xx the request's fault, 499 cancelled, 5xx the engine's.
        kind: `invalid_request_error`, `model_error`, `server_error`, `busy`, `cancelled` or
            `replica_lost`.
    """

    message: str
    status: int = 500
    kind: str = "server_error"


Event = Delta | Finish | Failure
Emit = Callable[[Event], None]  # called from the engine's thread; must not block


class BusyError(MmfastError):
    """The engine takes no more requests now.

    Args:
        message: One line for the user.
        retry_after: Seconds after which it is worth trying again.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Health:
    """How an engine is.

    Attributes:
        ready: It takes requests.
        running: Requests that are being answered.
        waiting: Requests that wait.
        gauges: Further figures by name, such as `kv_bytes`, `kv_bytes_limit`, `cache_hits`.
    """

    ready: bool
    running: int = 0
    waiting: int = 0
    gauges: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Executor(Protocol):
    """Answers requests."""

    model: str  # the name it goes by

    def submit(self, request: Request, emit: Emit) -> None:
        """Answer a request; exactly one `Finish` or `Failure` comes last.

        Raises:
            BusyError: No room now.
            MmfastError: The request can never be answered: wrong spec, too long, empty.
        """

    def cancel(self, request_id: str) -> None:
        """Stop answering; what it held is free at once. Unknown ids are none of its business."""

    def health(self) -> Health:
        """How it is, at once."""

    def close(self) -> None:
        """Stop; what still runs fails."""
