"""Layers of a depth transformer: weights shared by all codebooks, or one set per codebook."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class StepLinear(nn.Module):
    """A linear map without bias whose weights may differ from codebook to codebook.

    Args:
        wide: Width in.
        out: Width out.
        steps: Codebooks with weights of their own; 0 shares one set.
    """

    weight: Tensor

    def __init__(self, wide: int, out: int, steps: int = 0) -> None:
        super().__init__()
        shape = (steps, out, wide) if steps else (out, wide)
        self.weight = nn.Parameter(torch.empty(shape))
        nn.init.normal_(self.weight, std=wide**-0.5)

    def forward(self, x: Tensor, at: int) -> Tensor:
        """`[B, n, wide]` of the codebooks at, at + 1, … to `[B, n, out]`."""
        if self.weight.dim() == 2:
            return F.linear(x, self.weight)
        count = x.shape[1]
        if count == 1:
            return F.linear(x, self.weight[at])
        weight = self.weight[at : at + count]  # a view: no weights are copied
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


class Norm(nn.Module):
    """Root mean square norm."""

    weight: Tensor

    def __init__(self, wide: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(wide))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D]` to `[..., D]`."""
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class DepthLayer(nn.Module):
    """Pre-norm attention over the codebooks so far, then a gated feed-forward.

    Args:
        dim: Width.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        ffn: Inner width of the feed-forward.
        steps: Codebooks with weights of their own; 0 shares one set.
        eps: Of the norms.
    """

    def __init__(
        self, dim: int, heads: int, kv_heads: int, head_dim: int, ffn: int, steps: int, eps: float
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.norm_in, self.norm_out = Norm(dim, eps), Norm(dim, eps)
        self.q = StepLinear(dim, heads * head_dim, steps)
        self.k = StepLinear(dim, kv_heads * head_dim, steps)
        self.v = StepLinear(dim, kv_heads * head_dim, steps)
        self.o = StepLinear(heads * head_dim, dim, steps)
        self.gate = StepLinear(dim, ffn, steps)
        self.up = StepLinear(dim, ffn, steps)
        self.down = StepLinear(ffn, dim, steps)

    def forward(
        self,
        x: Tensor,
        at: int,
        cache: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        turn: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """`[B, n, D]` at codebooks at, at + 1, …; writes keys and values `[B, H, P, d]` in place.

        Args:
            x: Input.
            at: First place.
            cache: Keys and values of the places before; what stands behind is overwritten.
            mask: `[n, at + n]` bool, or None where n is 1 or at is 0.
            turn: Cosines and sines `[n, d]` of the places, or None.
        """
        y = self.norm_in(x)
        q, k, v = (self._split(part(y, at)) for part in (self.q, self.k, self.v))
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        if cache is not None:
            end = at + x.shape[1]
            cache[0][:, :, at:end], cache[1][:, :, at:end] = k, v
            k, v = cache[0][:, :, :end], cache[1][:, :, :end]
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and x.shape[1] > 1,
            enable_gqa=self.kv_heads != self.heads,
        )
        x = x + self.o(y.transpose(1, 2).flatten(2), at)
        y = self.norm_out(x)
        deep: Tensor = self.down(F.silu(self.gate(y, at)) * self.up(y, at), at)
        return x + deep

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H, n, d]
        return heads


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE: `[..., n, d]` by cosines and sines `[..., n, d]`."""
    low, high = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat([-high, low], dim=-1) * turn[1]
