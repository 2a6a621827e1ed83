"""Replies of `/v1/chat/completions`: one document, or chunks of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmfast.serve.engine.base import Finish
from mmfast.serve.http.replies import (
    AnswerMessage,
    Choice,
    Completion,
    PromptDetails,
    Transcribed,
    Usage,
)


@dataclass
class Reply:
    """The envelope of one answer.

    Attributes:
        id: Of the completion.
        model: As it was asked for.
        heard: What was understood of each sound of the request.
        seconds: Of those sounds.
        created: In seconds since 1970.
    """

    id: str
    model: str
    heard: list[str] = field(default_factory=list)
    seconds: float = 0.0
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self, finish: Finish) -> dict[str, Any]:
        """What was counted."""
        details = PromptDetails(
            cached_tokens=finish.cached_tokens,
            image_tokens=finish.trace.get("visual_tokens") or 0,
        )
        heard = Transcribed(sounds=len(self.heard), seconds=round(self.seconds, 3))
        found = Usage(
            prompt_tokens=finish.prompt_tokens,
            completion_tokens=finish.completion_tokens,
            total_tokens=finish.prompt_tokens + finish.completion_tokens,
            prompt_tokens_details=details,
            transcribed=heard if self.heard else None,
        ).model_dump(mode="json")
        if not self.heard:
            del found["transcribed"]
        return found

    def trace(self, finish: Finish) -> dict[str, Any]:
        """What it cost, and what was heard."""
        return {**finish.trace, **({"heard": self.heard} if self.heard else {})}

    def whole(self, text: str, finish: Finish) -> dict[str, Any]:
        """The answer in one."""
        message = AnswerMessage(content=text)
        found = Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[Choice(message=message, finish_reason=finish.reason)],
            mmfast=self.trace(finish),
        ).model_dump(mode="json")
        return {**found, "usage": self.usage(finish)}

    def chunk(
        self, delta: Mapping[str, Any], reason: str | None = None, **more: Any
    ) -> dict[str, Any]:
        """A piece of it."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head(), "choices": [choice], **more}

    def counted(self, finish: Finish) -> dict[str, Any]:
        """The chunk behind the last, which has no choice."""
        return {**self._head(), "choices": [], "usage": self.usage(finish)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }
