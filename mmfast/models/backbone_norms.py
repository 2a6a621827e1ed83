"""RMS norms in few operations, and what can be joined with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def lean_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """A stock RMS norm in five operations."""
    bare, weight = bare_norm(norm), norm.weight.detach()
    return lambda x: bare(x).mul_(weight)


def bare_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """The norm without its weight, which the next product has taken in."""
    eps = torch.tensor(norm.variance_epsilon, dtype=norm.weight.dtype)
    share, length_of, addcmul = 1 / norm.weight.numel(), torch.linalg.vector_norm, torch.addcmul

    def normed(x: Tensor) -> Tensor:
        length = length_of(x, dim=-1, keepdim=True)
        return x * addcmul(eps, length, length, value=share).rsqrt_()

    return normed


def lean_entry(norms: Sequence[Any], linear: Any) -> Callable[[Tensor], Tensor]:
    """A linear layer on inputs `[.., k D]` side by side, each normed: all of them at once."""
    bare, parts = bare_norm(norms[0]), len(norms)
    scale = torch.cat([norm.weight.detach() for norm in norms])
    weight = (linear.weight.detach() * scale).t().contiguous()

    def enter(x: Tensor) -> Tensor:
        normed = bare(x.view(-1, parts, x.shape[-1] // parts)).view(-1, x.shape[-1])
        return normed.mm(weight).view(*x.shape[:-1], -1)

    return enter


def stock_entry(norms: Sequence[Any], linear: Any) -> Callable[[Tensor], Tensor]:
    """The same with the modules themselves."""

    def enter(x: Tensor) -> Tensor:
        pieces = x.chunk(len(norms), -1)
        joined = [norm(piece) for norm, piece in zip(norms, pieces, strict=True)]
        return F.linear(torch.cat(joined, -1), linear.weight)

    return enter


def head_norm(attention: Any, queries: int, keys: int) -> Callable[[Tensor], Tensor] | None:
    """The norms of queries and keys as one, where the layer has them."""
    if not hasattr(attention, "q_norm"):
        return None
    q, k = attention.q_norm, attention.k_norm
    weight = torch.cat((q.weight.expand(queries, -1), k.weight.expand(keys, -1))).detach()
    eps = torch.tensor(q.variance_epsilon, dtype=weight.dtype)

    def normed(x: Tensor) -> Tensor:  # [B, n, queries + keys, d]
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_() * weight

    return normed
