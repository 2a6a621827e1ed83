"""Which features the placeholders of one call stand for: all of them, repeats, or a chunk."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.records import Record

# (item of the record, first and last + 1 of its tokens), in the order of the placeholders.
Piece = tuple[int, int, int]


def whole_pieces(record: Record, counts: list[int]) -> list[Piece]:
    """All features of a record, row by row; beams repeat the items of a sample.

    Args:
        record: The features.
        counts: Placeholders per batch row.

    Raises:
        ModelError: They do not fit each other; stock models check this of images and clips only.
    """
    lengths = [each.length for each in record.layouts]
    times = max(1, sum(counts) // max(1, sum(lengths)))
    found, index, wrong = [], 0, False
    for row in range(0, len(counts), times):
        start, left = index, counts[row]
        while left > 0 and index < len(lengths):
            left -= lengths[index]
            index += 1
        found += [(i, 0, lengths[i]) for i in range(start, index)] * times
        wrong = wrong or left != 0
    if wrong or index < len(lengths):
        raise ModelError(
            f"{sum(lengths)} features of kind {record.kind!r} do not fit {sum(counts)} "
            "placeholders; give the ids and media of one call of the processor"
        )
    return found


def chunk_pieces(record: Record, counts: list[int], features: Tensor) -> list[Piece] | None:
    """The part of a record that a chunk of a chunked prefill brings.

    Stock code cuts the features without saying where, and batch rows may hold any number of
    items, so the place is found by comparing.

    Args:
        record: What was encoded last.
        counts: Placeholders per batch row in this chunk.
        features: The chunk's features `[sum(counts), D]`.

    Returns:
        The pieces, or None where the features are not a slice of the record.
    """
    whole = record.flat()
    if whole is None or whole.shape[1:] != features.shape[1:]:
        return None
    bounds = [0, *accumulate(each.length for each in record.layouts)]
    ends, found = dict(record.ends), []
    for row, mine in enumerate(features.split(counts)):
        if not len(mine):
            continue
        starts = [ends.get(row, 0), *bounds[:-1]]  # on from the last chunk, or a new prompt
        fits = (s for s in starts if torch.equal(whole[s : s + len(mine)], mine))
        start = next(fits, None)
        if start is None:
            return None
        if start != ends.get(row):
            record.plans.clear()
        ends[row] = start + len(mine)
        found += _items(bounds, start, ends[row])
    record.ends = ends
    return found


def _items(bounds: list[int], start: int, stop: int) -> list[Piece]:
    """Split the span `start:stop` of all features at the bounds of the items."""
    return [
        (i, max(start, low) - low, min(stop, high) - low)
        for i, (low, high) in enumerate(pairwise(bounds))
        if max(start, low) < min(stop, high)
    ]
