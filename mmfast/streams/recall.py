"""Stored tokens come back in one layer: rotated to places between the sinks and the window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmfast.streams.archive import Part
from mmfast.streams.buffers import Buffer
from mmfast.streams.places import Live, Start, highest, walk
from mmfast.streams.turning import Turner


def recall(
    turner: Turner,
    layer: int,
    buffer: Buffer,
    blocks: Sequence[Live],
    parts: Sequence[Part],
    question: Live,
) -> None:
    """Put stored tokens into the buffer of one layer, and what is older to its new place.

    Places are those of a prompt of sinks, stored blocks, window and question. All layers share
    the places of the question, and layers may read different amounts, so the prompt is laid out
    from its end: sinks move away from the window, and the window stays where it is. Attention
    only sees distances.

    Args:
        turner: Rotates the layer's keys.
        layer: Which layer.
        buffer: Of the layer, at the moment all of `blocks`.
        blocks: Live blocks.
        parts: Stored ones, in the order of time.
        question: What asks; where it stands is fixed.
    """
    at = _opening(blocks)
    stored = _as_blocks(parts)
    starts = walk([*_sinks(blocks[:at], parts), *stored, *blocks[at:], question], turner.axes)
    shift = tuple(a - b for a, b in zip(question.start, starts[-1], strict=True))
    starts = [tuple(a + b for a, b in zip(start, shift, strict=True)) for start in starts]
    turner.move_layer(layer, buffer, blocks, [*starts[:at], *starts[at + len(parts) : -1]])
    places = zip(stored, starts[at : at + len(parts)], strict=True)
    where = torch.cat([block.positions(layer, start) for block, start in places], 1)
    keys = _side_by_side([part.keys for part in parts], buffer)
    values = _side_by_side([part.values for part in parts], buffer)
    buffer.write(keys, turner.rotate(layer, keys, where), values)
    buffer.length += keys.shape[1]


def _opening(blocks: Sequence[Live]) -> int:
    """How many blocks stand before everything that has left: the sinks."""
    for i, block in enumerate(blocks):
        if block.number != i:
            return i
        if not block.whole:
            return i + 1
    return len(blocks)


def _sinks(blocks: Sequence[Live], parts: Sequence[Part]) -> list[Live]:
    """Sinks for the walk: the rest of one that was cut stands where it stood, not behind it."""
    sinks = list(blocks)
    if sinks and not sinks[-1].whole and sinks[-1].number == parts[0].number:
        sinks[-1] = replace(sinks[-1], advance=(0,) * len(sinks[-1].advance))
    return sinks


def _as_blocks(parts: Sequence[Part]) -> list[Live]:
    """Stored parts as blocks, to see where they belong."""
    sizes = [part.relative.shape[1] for part in parts]
    relatives = torch.cat([part.relative for part in parts], 1).cpu().split(sizes, 1)
    advances = torch.stack([part.advance for part in parts]).tolist()  # one wait for the device
    rows = zip(parts, relatives, advances, strict=True)
    return [_as_block(part.number, relative, tuple(advance)) for part, relative, advance in rows]


def _as_block(number: int, relative: Tensor, advance: Start) -> Live:
    axes, n = relative.shape
    # Text counts on all axes alike, so it starts on all of them at the same position.
    level = axes > 1 and len(set(advance)) == 1 and bool((relative == relative[:1]).all())
    top, kinds = highest(relative, advance), torch.zeros(n, dtype=torch.int64)
    return Live(number, "text", None, relative, advance, False, level, top, kinds, (0,) * axes)


def _side_by_side(rows: Sequence[Tensor], buffer: Buffer) -> Tensor:
    assert buffer.data is not None
    return torch.cat([row.to(buffer.data.device, buffer.data.dtype) for row in rows], 1)
