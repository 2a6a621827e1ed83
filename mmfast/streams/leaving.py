"""Which blocks of a stream stay: token-exact sinks, and otherwise whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.kv import Block
from mmfast.streams.buffers import RAW, VALUES, Buffer, Span
from mmfast.streams.places import Live

_EXACT = "sink"  # may split a block; all other policies keep or drop whole ones


def check_plan(plan: CachePlan | None) -> None:
    """Refuse what an endless stream cannot do.

    Raises:
        SpecError: A position policy keeps a share, or nothing but sinks; a policy merges bits.
    """
    if plan is None:
        return
    for spec in plan.position:
        if not isinstance(spec.budget, int):
            raise SpecError(
                f"'{plan}' keeps a share by {spec.method.name!r}, of a stream that has no end; "
                f"write a number of tokens, for example '{spec.method.name}:4096'"
            )
    if plan.position and all(spec.method.name == _EXACT for spec in plan.position):
        raise SpecError(
            f"'{plan}' keeps sinks and nothing of what is new; add a window, for example "
            f"'{plan}+window:4096'"
        )


def budget(plan: CachePlan | None) -> int:
    """Tokens that position policies let live; 0 where there is no bound."""
    specs = plan.position if plan is not None else ()
    return sum(int(spec.budget or 0) for spec in specs)


def staying(
    plan: CachePlan, blocks: Sequence[Live], known: dict[tuple[bytes, ...], list[int]]
) -> list[int]:
    """How many of its first tokens each block keeps: all, none, or a part that is sinks.

    Args:
        plan: Its position policies decide.
        blocks: Live blocks, the last of them new.
        known: The last answer, as a full stream asks the same thing with every frame.

    Raises:
        MmfastError: The new block does not fit.
    """
    sizes = [block.size for block in blocks]
    if sum(sizes) <= _smallest(plan):
        return sizes
    pattern = tuple(block.pattern for block in blocks)
    if pattern in known:
        return known[pattern]
    kinds = torch.cat([block.counted() for block in blocks])
    stands = plan.standing(kinds).split(sizes)
    sinks = tuple(spec for spec in plan.position if spec.method.name == _EXACT)
    exact = CachePlan(sinks).standing(kinds).split(sizes)
    whole = torch.stack([part.all() for part in stands]).tolist()
    firsts = torch.stack([part.sum() for part in exact]).tolist()
    stays = [n if all_ else int(s) for n, all_, s in zip(sizes, whole, firsts, strict=True)]
    if stays[-1] < sizes[-1]:
        raise MmfastError(
            f"a piece of {sizes[-1]} tokens does not fit into '{plan}'; give the window more "
            "tokens, or reduce frames and cut texts"
        )
    known.clear()
    known[pattern] = stays
    return stays


def _smallest(plan: CachePlan) -> int:
    return min(int(spec.budget or 0) for spec in plan.position)


def cut(block: Live, size: int) -> Live:
    """The block with only its first `size` tokens held."""
    if size >= block.size:
        return block
    held = tuple(each[:size] for each in block.held) or (torch.arange(size),)
    return replace(block, held=held, whole=False)


def spans(blocks: Sequence[Live], stays: Sequence[int], layer: int) -> list[Span]:
    """Ranges of a layer's buffer that stay."""
    found, at = [], 0
    for block, size in zip(blocks, stays, strict=True):
        held = block.size_at(layer)
        found.append((at, at + (held if size >= block.size else min(size, held))))
        at += held
    return found


def leaving(blocks: Sequence[Live], stays: Sequence[int], buffers: Sequence[Buffer]) -> list[Block]:
    """What leaves, with its keys before RoPE, in the order of time."""
    found = []
    ends = [0] * len(buffers)
    for block, size in zip(blocks, stays, strict=True):
        sizes = [block.size_at(layer) for layer in range(len(buffers))]
        if size < block.size:
            rows = [
                (end + min(size, held), end + held) for end, held in zip(ends, sizes, strict=True)
            ]
            found.append(_block(block, size, rows, buffers))
        ends = [end + held for end, held in zip(ends, sizes, strict=True)]
    return found


def _block(block: Live, first: int, rows: Sequence[Span], buffers: Sequence[Buffer]) -> Block:
    kept: list[Tensor | None] = []
    for layer in range(len(buffers)):
        held = block.tokens(layer)
        if held is None and first:
            held = torch.arange(block.n)
        kept.append(None if held is None else held[first:])
    return Block(
        block.number,
        block.kind,
        block.time,
        block.relative,
        torch.tensor(block.advance),
        tuple(b.read(RAW, *span).clone() for b, span in zip(buffers, rows, strict=True)),
        tuple(b.read(VALUES, *span).clone() for b, span in zip(buffers, rows, strict=True)),
        tuple(kept) if any(each is not None for each in kept) else (),
    )
