"""Ways to what every key receives of the attention: the textbook's, a library's and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from mmfast.ops.attention import attend
from mmfast.ops.attention_column_sums import attention_column_sums


@dataclass(frozen=True)
class Case:
    """Attention of `items` sequences of `length` tokens."""

    name: str
    items: int
    heads: int
    shared: int  # heads of keys
    length: int
    width: int
    causal: bool
    goal_ms: float | None = None  # of ours on an H200

    @property
    def flops(self) -> float:
        """Of the logits once: half of the matrix where tokens only look back."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 2.0 * self.items * self.heads * pairs * self.width


@dataclass(frozen=True)
class Inputs:
    """Queries `[B, H, L, D]`, keys and values `[B, Hkv, L, D]`, log-sum-exp `[B, H, L]`."""

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    lse: Tensor


def inputs(case: Case, kind: torch.dtype, device: str) -> Inputs:
    """Random queries, keys and values, laid out as a model's projections leave them."""

    def make(heads: int) -> Tensor:
        shape = (case.items, case.length, heads, case.width)
        return torch.randn(shape, device=device).to(kind).transpose(1, 2)

    query, key, value = make(case.heads), make(case.shared), make(case.shared)
    return Inputs(case, query, key, value, _levels(case, query, key))


def _levels(case: Case, query: Tensor, key: Tensor) -> Tensor:
    if query.is_cuda:
        from mmfast.kernels.attention_column_sums import log_sum_exp

        found: Tensor = log_sum_exp(query, key, case.width**-0.5, case.causal)
        return found
    level = attend(query, key, key, None, case.causal)[1]
    assert level is not None
    return level


def ours(given: Inputs) -> Tensor:
    """Our column sums, the log-sum-exp known."""
    return attention_column_sums(given.query, given.key, given.lse, causal=given.case.causal)


def ours_alone(given: Inputs) -> Tensor:
    """Our column sums, the log-sum-exp still to be found."""
    return attention_column_sums(given.query, given.key, causal=given.case.causal)


def attention_and_ours(given: Inputs) -> Tensor:
    """The output as sdpa gives it, and our column sums."""
    _, lse = attend(given.query, given.key, given.value, None, given.case.causal)
    return attention_column_sums(given.query, given.key, lse, causal=given.case.causal)


def attention(given: Inputs) -> Tensor:
    """The output alone."""
    return F.scaled_dot_product_attention(
        given.query, given.key, given.value, is_causal=given.case.causal, enable_gqa=True
    )


def eager(given: Inputs) -> Tensor:
    """Eager attention: output, and the column sums of its weights."""
    weights = _weights(given)
    torch.matmul(weights, _per_head(given.value, given.case))
    return weights.sum((1, 2), dtype=torch.float32)


def eager_weights(given: Inputs) -> Tensor:
    """The weights of eager attention and their column sums, without the output."""
    return _weights(given).sum((1, 2), dtype=torch.float32)


def _per_head(x: Tensor, case: Case) -> Tensor:
    return x.repeat_interleave(case.heads // case.shared, dim=1)


def _weights(given: Inputs) -> Tensor:
    case, query = given.case, given.query
    logits = query @ _per_head(given.key, case).transpose(2, 3) * case.width**-0.5
    if case.causal:
        hidden = logits.new_full((case.length, case.length), torch.finfo(logits.dtype).min)
        logits = logits + hidden.triu(1)
    weights: Tensor = logits.softmax(-1, dtype=torch.float32).to(query.dtype)
    return weights


def swapped(given: Inputs, compiled: bool = True) -> Callable[[], Tensor]:
    """FlexAttention with queries and keys in each other's place.

    Its log-sum-exp is then the logarithm of the column sums. Grouped keys have to be repeated,
    values of width 16 are carried along for nothing.
    """
    case, lse = given.case, given.lse

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s - lse[b, h, kv]

    def later(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv >= q

    device, n = given.query.device.type, case.length
    mask = create_block_mask(later, None, None, n, n, device=device) if case.causal else None
    keys = _per_head(given.key, case)
    nothing = given.query.new_zeros(case.items, case.heads, n, 16)
    flex: Callable[..., Any] = flex_attention
    if compiled:
        flex = torch.compile(flex_attention, dynamic=False)

    def run() -> Tensor:
        _, more = flex(keys, given.query, nothing, score, mask, return_aux=AuxRequest(lse=True))
        sums: Tensor = more.lse.exp().sum(1)
        return sums

    return run
