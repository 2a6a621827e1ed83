"""From tokens to text as they come: whole characters only, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mmfast.serve.engine.base import Reason, Sampling

_HALF = "\ufffd"  # what a tokenizer writes for half a character


class Writer:
    """The text of one answer.

    Args:
        tokenizer: Of the model.
        sampling: Longest answer and stop strings.
        ends: Token ids that end an answer.

    Attributes:
        over: Why the answer is over; None while it is not.
        count: Tokens so far.
    """

    def __init__(self, tokenizer: Any, sampling: Sampling, ends: Collection[int]) -> None:
        self._tokenizer, self._sampling, self._ends = tokenizer, sampling, ends
        self._tokens: list[int] = []
        self._start = self._read = 0  # tokens before `_start` are written; up to `_read` too
        self._held = ""  # may become a stop string
        self.over: Reason | None = None
        self.count = 0

    def push(self, token: int) -> str:
        """Take the next token; returns the text that is certain now, maybe none."""
        self.count += 1
        ended = token in self._ends
        if not ended:
            self._tokens.append(token)
        last = ended or self.count >= self._sampling.max_tokens
        text = self._held + self._decoded(last)
        for stop in self._sampling.stop:
            at = text.find(stop) if stop else -1
            if at >= 0:
                text, ended = text[:at], True
                last = True
        if last:
            self.over, self._held = "stop" if ended else "length", ""
            return text
        keep = max((_overlap(text, stop) for stop in self._sampling.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _decoded(self, last: bool) -> str:
        """What the new tokens add; half a character waits for its other half."""
        before = self._text(self._tokens[self._start : self._read])
        now = self._text(self._tokens[self._start :])
        if not last and now.endswith(_HALF):
            return ""
        # Some tokenizers write a space by what stands before: one written piece stays in sight.
        self._start, self._read = self._read, len(self._tokens)
        return now[len(before) :]

    def _text(self, tokens: list[int]) -> str:
        found: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return found


def _overlap(text: str, stop: str) -> int:
    """Letters at the end of `text` that may be the beginning of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-n:]):
            return n
    return 0
