"""How much of a conversation a model gets to read: the newest of it, within the server's limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mmfast.core.speech import Turn
from mmfast.serve.realtime.errors import EventError

if TYPE_CHECKING:
    from mmfast.serve.realtime.service import Limits


def fitting(
    found: tuple[Turn, ...],
    instructions: str,
    count: Callable[[str], int],
    limits: Limits,
    answer: int,
) -> tuple[Turn, ...]:
    """The newest turns that fit beside the instructions and an answer.

    Args:
        found: All turns, oldest first.
        instructions: What the model is told to be.
        count: Tokens of a text.
        limits: Of letters, and of tokens where the server names any.
        answer: Tokens that the answer may have.

    Raises:
        EventError: Not even the last turn fits.
    """
    found = _newest(found, limits.text, instructions, len, "letters")
    if limits.context is None:
        return found
    unit = f"tokens beside an answer of {answer}"
    return _newest(found, limits.context - answer, instructions, count, unit)


def _newest(
    found: tuple[Turn, ...], most: int, told: str, size: Callable[[str], int], unit: str
) -> tuple[Turn, ...]:
    left, count = most - (size(told) if told else 0), 0
    for turn in reversed(found):
        left -= size(turn.text)
        if left < 0:
            break
        count += 1
    if left < 0 and not count:
        text = f"what is to be answered has over {most:,} {unit}; say less, or tell less"
        raise EventError(text, "context_length_exceeded")
    return found[len(found) - count :]
