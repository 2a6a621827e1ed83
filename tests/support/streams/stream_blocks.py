"""Blocks, quotas and archives that the tests of stored blocks share."""

from __future__ import annotations

from typing import Any

import torch

from mmfast.core.kv import KVBlock
from mmfast.core.registry import get
from mmfast.streams.archive.archive import Archive
from mmfast.streams.archive.tiers import TierQuotas

LAYERS, HEADS, WIDTH, TOKENS = 3, 2, 8, 5


def block(
    number: int, *, tokens: int = TOKENS, dtype: torch.dtype = torch.float32, cut: bool = False
) -> KVBlock:
    """A block whose contents follow from its number; `cut`: layers hold different tokens."""
    rng = torch.Generator().manual_seed(number)
    counts = [max(0, tokens - layer) if cut else tokens for layer in range(LAYERS)]
    shape = [(HEADS, n, WIDTH) for n in counts]
    return KVBlock(
        number=number,
        kind="frame",
        time=number / 4,
        relative=torch.arange(tokens).repeat(3, 1) * torch.tensor([[0], [1], [2]]),
        advance=torch.tensor([1, 0, 0]),
        keys=tuple(torch.randn(s, generator=rng).to(dtype) for s in shape),
        values=tuple(torch.randn(s, generator=rng).to(dtype) for s in shape),
        kept=tuple(torch.arange(tokens)[tokens - n :] for n in counts) if cut else (),
    )


ONE = block(0).nbytes + 8 * (3 * TOKENS + 3)  # bytes of a stored block with its positions


def archive(name: str = "rekv", budget: Any = 3, **options: Any) -> Archive:
    """An archive of small blocks; options are quotas and `store`."""
    store = options.pop("store", None)
    return Archive(get(name, "cache").fn(budget), LAYERS, "cpu", TierQuotas.of(**options), store)


def same(found: Any, original: KVBlock, layer: int) -> bool:
    """Whether a part is bit for bit what was put in, as a whole."""
    return (
        torch.equal(found.keys[0], original.keys[layer])
        and torch.equal(found.values[0], original.values[layer])
        and torch.equal(found.relative, original.positions(layer))
        and torch.equal(found.advance, original.advance)
    )
