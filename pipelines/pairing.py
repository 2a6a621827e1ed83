"""Which media go with which questions."""

from __future__ import annotations

from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.models.prompt import check_question


def pair_up(media: Any, question: Any, images: bool = False) -> tuple[list[tuple[Any, str]], bool]:
    """Pair media with questions; says whether the caller asked for a list.

    Of clips, a list of arrays or PIL images with ONE question is one clip given as frames; a list
    of paths or bytes, or a list of questions, means several inputs. Of images, a list is always
    several inputs and a tuple one, with all its images in the prompt.

    Args:
        media: What the caller gave.
        question: A question or a list of them.
        images: Media are images.

    Raises:
        MmfastError: Lists of different lengths, an empty list, or an empty question.
    """
    many = _many_images(media) if images else _many_clips(media, question)
    if isinstance(question, (list, tuple)):
        items = list(media) if many else [media] * len(question)
        if len(items) != len(question) or not items:
            raise MmfastError(
                f"{len(items)} media and {len(question)} questions; give one question per media"
            )
        return [(m, check_question(q)) for m, q in zip(items, question, strict=True)], True
    text = check_question(question)
    if many and media:
        return [(m, text) for m in media], True
    return [(media, text)], False


def _many_images(media: Any) -> bool:
    """Whether each element is an input; rows of numbers are an image written as a list."""
    return isinstance(media, list) and not any(isinstance(m, list) for m in media)


def _many_clips(media: Any, question: Any) -> bool:
    if not isinstance(media, (list, tuple)) or not media:
        return False
    questions = len(question) if isinstance(question, (list, tuple)) else 1
    if all(
        isinstance(m, (str, bytes)) or hasattr(m, "__fspath__") or hasattr(m, "read") for m in media
    ):
        return True
    # Arrays of rank 4 are clips; images and rank-3 arrays are frames of one clip unless there is
    # exactly one question for each.
    return getattr(media[0], "ndim", 3) != 3 or len(media) == questions
