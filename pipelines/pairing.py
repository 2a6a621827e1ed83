"""Which media go with which questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.models.prompt import check_question


def pair_up(media: Any, question: Any) -> tuple[list[tuple[Any, str]], bool]:
    """Pair media with questions; says whether the caller asked for a list.

    A list of arrays or PIL images with ONE question is one clip given as frames; a list of
    paths or bytes, or a list of questions, means several inputs.

    Raises:
        MmfastError: Lists of different lengths, an empty list, or an empty question.
    """
    if isinstance(question, (list, tuple)):
        several = isinstance(media, (list, tuple)) and not _is_frames(media, len(question))
        items = list(media) if several else [media] * len(question)
        if len(items) != len(question) or not items:
            raise MmfastError(
                f"{len(items)} media and {len(question)} questions; give one question per media"
            )
        return [(m, check_question(q)) for m, q in zip(items, question, strict=True)], True
    text = check_question(question)
    if isinstance(media, (list, tuple)) and media and not _is_frames(media, 1):
        return [(m, text) for m in media], True
    return [(media, text)], False


def _is_frames(media: Sequence[Any], questions: int) -> bool:
    if all(
        isinstance(m, (str, bytes)) or hasattr(m, "__fspath__") or hasattr(m, "read") for m in media
    ):
        return False
    # Arrays of rank 4 are clips; images and rank-3 arrays are frames of one clip unless there is
    # exactly one question for each.
    return getattr(media[0], "ndim", 3) == 3 and len(media) != questions
