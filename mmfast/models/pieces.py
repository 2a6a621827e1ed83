"""Which features the placeholders of one call stand for: all of them, repeats, or a chunk."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mmfast.models.records import Record

# (item of the record, first and last + 1 of its tokens), in the order of the placeholders.
Piece = tuple[int, int, int]


def pieces(record: Record, counts: list[int]) -> Iterator[Piece]:
    """The features behind the placeholders of a batch, row by row.

    Beams repeat the items of a sample, and a chunk of a chunked prefill brings a part of them.

    Args:
        record: The features.
        counts: Placeholders per batch row.
    """
    found, total = sum(counts), record.total
    if found == total:
        yield from ((i, 0, each.length) for i, each in enumerate(record.layouts))
    elif found > total:
        yield from _repeated(record, counts, found // total)
    else:
        yield from _chunk(record, counts)


def _repeated(record: Record, counts: list[int], times: int) -> Iterator[Piece]:
    index = 0
    for row in range(0, len(counts), times):
        start, left = index, counts[row]
        while left > 0 and index < len(record.layouts):
            left -= record.layouts[index].length
            index += 1
        for _ in range(times):
            yield from ((i, 0, record.layouts[i].length) for i in range(start, index))


def _chunk(record: Record, counts: list[int]) -> Iterator[Piece]:
    items, rows = len(record.layouts), len(counts)
    for row, left in enumerate(counts):
        skip = record.progress.get(row, 0)
        record.progress[row] = skip + left
        # Samples have equally many items each, and the beams of a sample share them.
        first = row * items // rows
        for index in range(first, max(first + 1, (row + 1) * items // rows)):
            length = record.layouts[index].length
            start, skip = min(skip, length), max(0, skip - length)
            stop = min(length, start + left)
            left -= stop - start
            if stop > start:
                yield index, start, stop


def is_chunk(record: Record, output: object, counts: list[int]) -> bool:
    """Whether `output` is the next slice of the recorded features, as chunked prefill cuts them."""
    if record.output() is None or sum(counts) >= record.total:
        return False
    before = dict(record.progress)
    places = [_span(record, *piece) for piece in _chunk(record, counts)]
    record.progress.clear()
    record.progress.update(before)
    whole = flat(record.output())
    mine = torch.cat([whole[start:stop] for start, stop in places])
    theirs = flat(output)
    return mine.shape == theirs.shape and torch.equal(mine, theirs)


def flat(output: object) -> Tensor:
    """All features of an encoder output, `[tokens, D]`."""
    features = output.pooler_output  # type: ignore[attr-defined]
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in features])


def _span(record: Record, index: int, start: int, stop: int) -> tuple[int, int]:
    at = sum(each.length for each in record.layouts[:index])
    return at + start, at + stop
