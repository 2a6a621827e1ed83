"""Operations behind selection and eviction, at the size of 32 frames and a 7B decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmfast.bench import selection_textbooks as textbooks
from mmfast.core.reduction import gather_rows
from mmfast.ops.attention import attend
from mmfast.ops.attention_column_sums import attention_column_sums
from mmfast.ops.video import static_windows


@dataclass(frozen=True)
class SelectionJob:
    """Two ways to the same result.

    Attributes:
        ours: The fast way.
        textbook: The papers' way.
        same: Whether their results agree.
        memory: Whether to measure how much memory each takes while it runs.
    """

    ours: Callable[[], Any]
    textbook: Callable[[], Any]
    same: Callable[[Any, Any], bool]
    memory: bool = False


@dataclass(frozen=True)
class OpCase:
    """One operation; `build` makes its inputs when its turn comes."""

    name: str
    method: str
    n: int
    d: int
    budget: int | None
    build: Callable[[], SelectionJob]

    def job(self) -> SelectionJob:
        """Inputs and both ways."""
        return self.build()

    def fields(self) -> dict[str, Any]:
        """What a row says of the case."""
        sizes = {"n": self.n, "d": self.d, "budget": self.budget}
        return {"case": self.name, "method": self.method, **sizes}


def segmentation(frames: int, places: int, tau: float = 0.8) -> SelectionJob:
    """Windows of still places: shots of 16 frames in which one place in 25 flickers."""
    generator = torch.Generator().manual_seed(0)
    alike = 0.7 + 0.3 * torch.rand(frames - 1, places, generator=generator).sqrt()
    alike[torch.rand(frames - 1, places, generator=generator) < 0.04] = 0.5
    alike[15::16] = 0.3
    longest = 1024
    return SelectionJob(
        lambda: static_windows(alike > tau, longest),
        lambda: textbooks.windows(alike, tau, longest),
        lambda a, b: bool(a == b),
    )


def importance(
    heads: int, kv_heads: int, length: int, width: int, share: float = 0.25
) -> SelectionJob:
    """Attention and what every key receives of it."""
    generator = torch.Generator().manual_seed(0)
    make = partial(torch.randn, generator=generator)
    query = make(1, heads, length, width)
    key, value = make(1, kv_heads, length, width), make(1, kv_heads, length, width)

    def same(ours: tuple[Tensor, Tensor], textbook: tuple[Tensor, Tensor]) -> bool:
        kept = [
            scores.topk(int(share * length)).indices.sort().values for _, scores in (ours, textbook)
        ]
        close = all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, textbook, strict=True)
        )
        return close and kept[0].equal(kept[1])

    return SelectionJob(
        lambda: _importance(query, key, value),
        lambda: textbooks.importance(query, key, value),
        same,
        memory=True,
    )


def _importance(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    output, lse = attend(query, key, value, causal=True)
    sums = attention_column_sums(query, key, lse, causal=True)
    return output, sums / query.shape[1:3].numel()


def head_gather(heads: int, length: int, kept: int, width: int) -> SelectionJob:
    """The entries that each head of a KV cache keeps for itself."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, heads, length, width, generator=generator)
    order = torch.rand(heads, length, generator=generator).argsort()
    index = order[:, :kept].sort().values
    return SelectionJob(
        lambda: gather_rows(states, index[None]),
        lambda: textbooks.head_gather(states, index),
        torch.equal,
    )


OPS = (
    OpCase(
        "holitom segmentation, 128 frames x 196",
        "holitom_windows",
        128,
        196,
        None,
        partial(segmentation, 128, 196),
    ),
    OpCase(
        "attention with importance, 2,880 tokens, 28 / 4 heads x 128",
        "importance",
        2880,
        128,
        720,
        partial(importance, 28, 4, 2880, 128),
    ),
    OpCase(
        "attention with importance, 2,880 tokens, 32 heads x 128",
        "importance",
        2880,
        128,
        720,
        partial(importance, 32, 32, 2880, 128),
    ),
    OpCase(
        "KV gather per head, 1,584 of 6,336, 4 heads x 128",
        "head_gather",
        6336,
        128,
        1584,
        partial(head_gather, 4, 6336, 1584, 128),
    ),
)
