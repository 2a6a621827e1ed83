"""Decoder layers along time for heads that remember: RoPE, keys and values as a value."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.kv import KVBlock
from mmfast.ops.attention import rotate
from mmfast.ops.stream_cache import StepPlaces, advance, within


class TimeLayer(nn.Module):
    """Pre-norm attention over what is seen, then a gated feed-forward."""

    def __init__(self, dim: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_out = nn.RMSNorm(dim, 1e-6), nn.RMSNorm(dim, 1e-6)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        past: tuple[Tensor, Tensor] | None,
        sees: Tensor,
        turn: tuple[Tensor, Tensor],
        lift: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run one step: `[B, n, D]`, and all keys and values `[B, H, N, d]`.

        `past` are keys and values `[B, H, N - n, d]` of before, `sees` is `[B, 1, n, N]` bool,
        `turn` cosines and sines `[B, 1, n, d]` of the places, `lift` `[n, d]` is added to queries
        and keys.
        """
        mixed = self.qkv(self.norm_in(x))
        q, k, v = rearrange(mixed, "b n (part h d) -> part b h n d", part=3, h=self.heads)
        if lift is not None:
            q, k = q + lift, k + lift
        q, k = rotate(q, *turn), rotate(k, *turn)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        x = x + self.o(rearrange(y, "b h n d -> b n (h d)"))
        gate, up = self.up(self.norm_out(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up), k, v


class TimeStack(nn.Module):
    """Some layers along time; with 0 layers nothing changes.

    A token looks back to `window` places of `width` tokens, its own included; None for all.
    """

    rates: Tensor

    def __init__(
        self,
        dim: int,
        layers: int,
        heads: int,
        ffn: int,
        *,
        window: int | None = None,
        width: int = 1,
        theta: float = 10000.0,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TimeLayer(dim, heads, ffn) for _ in range(layers))
        self.window, self.width = window, width
        wide = dim // heads
        rates = theta ** -(torch.arange(0, wide, 2) / wide)
        self.register_buffer("rates", rates, persistent=False)

    def forward(
        self, state: KVBlock, x: Tensor, lift: Tensor | None = None
    ) -> tuple[KVBlock, Tensor]:
        """The next tokens `[B, n, D]`, or all of them at once behind an empty state."""
        step = advance(state, x.shape[1], None, self.window, self.width)
        turn = self._turn(step, x)
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            past = (state.keys[index], state.values[index]) if state.keys else None
            x, k, v = layer(x, past, step.sees[:, None], turn, lift)
            keys.append(k)
            values.append(v)
        state = KVBlock(tuple(keys), tuple(values), step.known, step.seen)
        return within(state, self.window, self.width), x

    def _turn(self, step: StepPlaces, x: Tensor) -> tuple[Tensor, Tensor]:
        # In float64: a stream of days still turns by the right angle.
        angle = (step.place.clamp(min=0)[:, None, :, None] * self.rates.double()).repeat(1, 1, 1, 2)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)
