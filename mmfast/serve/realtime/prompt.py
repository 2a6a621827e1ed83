"""The prompt of a response: the turns that fit, the instructions, and speech as it was said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.core.speech import Turn
from mmfast.serve.realtime.brain import Brain, BrainQuestion
from mmfast.serve.realtime.conversation import ConversationItem
from mmfast.serve.realtime.errors import EventError
from mmfast.serve.realtime.response import Response
from mmfast.serve.realtime.service import SessionLimits

HEARD_TOKENS = 25 / 16000  # of the embedded model's tower, a sample


def question_of(
    response: Response,
    items: Sequence[ConversationItem],
    brain: Brain,
    limits: SessionLimits,
    options: dict[str, Any],
) -> BrainQuestion | None:
    """Return the question that a response answers, or None where nothing was said.

    All speech among `items` has a transcript, unless the model answers speech itself. The tokens of
    the question are counted in `response`. `EventError`: there is nothing to answer, or not even
    the last turn fits.
    """
    before, settings = list(items), response.settings
    pcm = _speech(before, response) if brain.native else None
    found, instructions = turns(before), joined_instructions(before, settings["instructions"])
    if pcm is None and (not found or found[-1].role != "user"):
        if items and items[-1].spoken:
            return None  # a cough, or a long silence
        # "greet the user": a response without a question takes its own instructions as one
        found, instructions = (*found, _asked(settings["asked"])), ""
    limit = settings["max_output_tokens"]
    if found or instructions:
        answer = 1 if limit == "inf" else limit
        found = fitting(found, instructions, brain.count, limits, answer)
    spent = response.spent
    spent.text_in = sum(brain.count(t) for t in (instructions, *(u.text for u in found)) if t)
    spent.audio_in = 0 if pcm is None else round(len(pcm) * HEARD_TOKENS)
    spent.image_in = int(brain.figures().get("tokens", 0))
    most = limits.tokens if limit == "inf" else limit
    if limits.context is not None:
        most = min(most, limits.context - spent.text_in)
    return BrainQuestion(found, pcm, instructions, response.aloud, options, most)


def _speech(items: list[ConversationItem], response: Response) -> Tensor | None:
    """Return the sound of the user's last turn, whose items are taken from the list."""
    parts: list[Tensor] = []
    while items and items[-1].spoken:
        item = items.pop()
        response.asks.insert(0, item)
        parts = [part.pcm for part in item.parts if part.pcm is not None] + parts
    return torch.cat(parts) if parts else None


def _asked(instructions: str) -> Turn:
    """Return the instructions of a response as a question; `EventError` if there are none."""
    if not instructions.strip():
        raise EventError(
            "there is nothing to answer; create an item of the user, commit sound, or give "
            "response.instructions",
            "nothing_to_answer",
        )
    return Turn("user", instructions)


def turns(items: Iterable[ConversationItem]) -> tuple[Turn, ...]:
    """Return the turns of the dialogue, oldest first, without those of which nothing was heard.

    Speech that a pause has divided into two turns is joined again.
    """
    found: list[Turn] = []
    spoken = False  # whether the last turn was said by the user
    for item in items:
        text = item.text
        if item.role == "system" or not text:
            continue
        if item.spoken and spoken:
            found[-1] = Turn("user", f"{found[-1].text} {text}")
        else:
            found.append(Turn("assistant" if item.role == "assistant" else "user", text))
        spoken = item.spoken
    return tuple(found)


def joined_instructions(items: Iterable[ConversationItem], instructions: str) -> str:
    """Join the session's instructions and those in the conversation."""
    texts = (instructions, *(item.text for item in items if item.role == "system"))
    return "\n\n".join(text for text in texts if text.strip())


def fitting(
    found: tuple[Turn, ...],
    instructions: str,
    count: Callable[[str], int],
    limits: SessionLimits,
    answer: int,
) -> tuple[Turn, ...]:
    """Return the newest turns that fit beside the instructions and an answer.

    `count` counts the tokens of a text; `answer` is the most tokens of the answer. If not even the
    last turn fits, `EventError` is raised.
    """
    found = _newest(found, limits.text, instructions, len, "letters")
    if limits.context is None:
        return found
    unit = f"tokens beside an answer of {answer}"
    return _newest(found, limits.context - answer, instructions, count, unit)


def _newest(
    found: tuple[Turn, ...], most: int, instructions: str, size: Callable[[str], int], unit: str
) -> tuple[Turn, ...]:
    left, count = most - (size(instructions) if instructions else 0), 0
    for turn in reversed(found):
        left -= size(turn.text)
        if left < 0:
            break
        count += 1
    if left < 0 and not count:
        text = f"what is to be answered has over {most:,} {unit}; say less, or tell less"
        raise EventError(text, "context_length_exceeded")
    return found[len(found) - count :]
