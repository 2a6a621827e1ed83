"""Attention of vision towers: eager, SDPA, and all segments of a packed tower in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.bench.encoder_jobs import check, compare, device, named
from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.ops.attention import segment_attention

ROUNDS = 7
# Windows of a 392 x 392 frame of Qwen2.5-VL in the order the tower has them, and of 448 x 448.
_UNEVEN = [64, 64, 64, 32] * 3 + [32, 32, 32, 16]
# Name, heads, head size, lengths of the segments of two frames.
SHAPES: dict[str, tuple[int, int, Sequence[int]]] = {
    "siglip frames": (16, 72, [729, 729]),
    "qwen2.5-vl windows, 392 px": (16, 80, _UNEVEN * 2),
    "qwen2.5-vl windows, 448 px": (16, 80, [64] * 32),
    "qwen2.5-vl whole frames": (16, 80, [784, 784]),
}


def rows(tick: Tick) -> list[Row]:
    """Rows of one block's attention per shape; `speedup` is over eager."""
    return [row for name in SHAPES for row in measure(name, ROUNDS, tick)]


def measure(name: str, rounds: int, tick: Tick) -> list[Row]:
    """Rows of one of `SHAPES`; on a GPU with sixteen times the frames."""
    tick(name, [*SHAPES].index(name), len(SHAPES))
    heads, width, lengths = SHAPES[name]
    where = device()
    lengths = [*lengths] * (16 if where.type == "cuda" else 1)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    gen = torch.Generator().manual_seed(0)
    size = (sum(lengths), heads, width)
    q, k, v = (torch.randn(size, generator=gen).to(where, dtype) for _ in range(3))
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=where)
    scale = width**-0.5
    jobs: dict[str, Callable[[], Tensor]] = {
        "eager, one by one": partial(_loop, _eager, q, k, v, lengths, scale),
        "sdpa, one by one": partial(_loop, _sdpa, q, k, v, lengths, scale),
        "together": partial(segment_attention, q, k, v, ends, scale=scale, longest=max(lengths)),
    }
    expected = jobs["eager, one by one"]()
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    extra = {job: {"difference": check(run(), expected, limit)} for job, run in jobs.items()}
    shared: Row = {"shape": name, "segments": len(lengths), "tokens": len(q), "heads": heads}
    shared |= {"head_dim": width, "dtype": str(dtype).removeprefix("torch.")}
    return named(compare(jobs, rounds, shared), extra)


def _loop(
    attend: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    scale: float,
) -> Tensor:
    """As stock towers do: split, attend to each segment, join; `[S, H, d]`."""
    heads = (x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v))
    parts = zip(*heads, strict=True)
    return torch.cat([attend(a, b, c, scale) for a, b, c in parts], 1)[0]


def _eager(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    weights = torch.softmax(q @ k.transpose(2, 3) * scale, -1, dtype=torch.float32).to(q.dtype)
    return (weights @ v).transpose(1, 2).contiguous()


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).contiguous()
