"""Places for visual tokens in a prompt: as many as will be kept."""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.core.errors import MmfastError


def recount(
    ids: Sequence[int], counts: Sequence[int], *, video: int, start: int, end: int
) -> list[int]:
    """A prompt with other numbers of places per frame.

    A frame is a run of video tokens, of any length, between a start and an end token; what lies
    between these tokens for an image, and the text around all of them, stays.

    Args:
        ids: Tokens of the prompt.
        counts: New number of places of each frame, in order.
        video: The token that stands for a place.
        start: The token before a frame.
        end: The token after it.

    Raises:
        MmfastError: There are more or fewer frames than counts.
    """
    out: list[int] = []
    rest, at, frames = list(counts), 0, 0
    while at < len(ids):
        out.append(ids[at])
        at += 1
        if out[-1] != start:
            continue
        stop = at
        while stop < len(ids) and ids[stop] == video:
            stop += 1
        if stop == len(ids) or ids[stop] != end:
            continue  # an image, or text
        frames += 1
        out += [video] * (rest.pop(0) if rest else 0)
        at = stop
    if frames != len(counts):
        raise MmfastError(
            f"the prompt has {frames} frames where {len(counts)} were expected: this vLLM lays "
            "videos out in a way that mmfast does not know; use the version that its notes name"
        )
    return out


def lumped(count: int, frames: int) -> list[int]:
    """Places per frame of a pruned video: vLLM puts all of them into the first frame.

    They only reserve room; where each frame's tokens end up is settled with the embeddings.
    """
    return [count] + [0] * (frames - 1)
