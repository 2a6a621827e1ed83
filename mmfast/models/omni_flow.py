"""Qwen2.5-Omni's flow on a stream: codes to mel frames, block by block.

A transformer gives the direction in which noise flows to a mel spectrogram, at every stage of a
Runge-Kutta solver. Its layers see their own block of frames, a few of them one block back, a few
one block ahead. What lies back is kept, exactly: keys and values of the last block, for every
stage. What lies ahead must have come: with `ahead` blocks of it the flow of a block is off by what
the blocks behind those would have said, less the more there are, and nothing once `ahead` reaches
stages x layers that look ahead. Paper: arXiv 2503.20215, section 2.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Past = dict[int, tuple[Tensor, Tensor]]  # layer -> keys and values [B, H, block, d]
Slope = Callable[[Tensor, Tensor], Tensor]  # of time and place


class Guide(NamedTuple):
    """What holds for all of a stream: `[B, 1, ·]`, the unguided row second."""

    speaker: Tensor
    timbre: Tensor


class Flow:
    """The solver over a window of frames.

    Args:
        model: A `Qwen2_5OmniToken2WavDiTModel`.
        num_steps, guidance_scale, sway_coefficient: As in the stock `sample`.
    """

    def __init__(
        self,
        model: Any,
        num_steps: int = 10,
        guidance_scale: float = 0.5,
        sway_coefficient: float | None = -1.0,
    ) -> None:
        self.model, self.scale = model, guidance_scale
        self.guided = guidance_scale >= 1e-5
        times = torch.linspace(0, 1, num_steps)
        if sway_coefficient is not None:
            times = times + sway_coefficient * (torch.cos(torch.pi / 2 * times) - 1 + times)
        self.times = times
        self.stages = 4 * (num_steps - 1)  # passes of the transformer per window
        self.reach = self.stages * sum(b.look_ahead_block for b in model.transformer_blocks)

    def guide(self, conditioning: Tensor, reference: Tensor) -> Guide:
        """A voice: its vector `[1, E]` and a mel spectrogram of it `[1, n, mel]`."""
        timbre = self.model.input_embed.spk_encoder
        if not self.guided:
            return Guide(conditioning[:, None], timbre(reference)[:, None])
        none = torch.zeros_like(reference)
        rows = torch.cat([conditioning, torch.zeros_like(conditioning)])
        return Guide(rows[:, None], timbre(torch.cat([reference, none]))[:, None])

    def solve(
        self, noise: Tensor, codes: Tensor, guide: Guide, past: list[Past] | None
    ) -> tuple[Tensor, list[Past]]:
        """Noise `[1, n, mel]` over whole blocks (the last may be short) to mel frames.

        Args:
            noise: Where the flow starts.
            codes: `[1, n / repeats]`.
            guide: The voice.
            past: For every stage, what the layers said of the block before; None: there is none.

        Returns:
            Mel frames `[1, n, mel]`, and for every stage keys and values of the first block.
        """
        kept: list[Past] = []
        words = self.model.text_embed(codes)
        if self.guided:
            words = torch.cat([words, self.model.text_embed(codes, drop_code=True)])

        def slope(t: Tensor, x: Tensor) -> Tensor:
            before = past[len(kept)] if past is not None else {}
            out, own = self._transform(x, words, guide, t.to(x), before)
            kept.append(own)
            if not self.guided:
                return out
            with_voice, without = out.chunk(2)
            return with_voice + (with_voice - without) * self.scale

        x = noise
        for start, stop in zip(self.times[:-1], self.times[1:], strict=True):
            x = x + _runge_kutta(slope, start, stop, x)
        return x, kept

    def _transform(
        self, x: Tensor, words: Tensor, guide: Guide, time: Tensor, before: Past
    ) -> tuple[Tensor, Past]:
        """One pass of the transformer, and what its layers would say back to the next block."""
        model, size = self.model, self.model.block_size
        n = x.shape[1]
        rows = len(words)
        embedded = model.time_embed(time.repeat(rows))
        parts = (x.expand(rows, -1, -1), *(each.expand(-1, n, -1) for each in guide[1:]), words)
        hidden = model.input_embed.proj(torch.cat([*parts, guide.speaker.expand(-1, n, -1)], -1))
        turn = model.rotary_embed(hidden, torch.arange(size + n, device=x.device)[None])
        block = torch.arange(size + n, device=x.device) // size
        away = block[None] - block[size:, None]  # [n, size + n]
        own: Past = {}
        for i, layer in enumerate(model.transformer_blocks):
            old = before.get(i)
            seen = (away >= -layer.look_backward_block) & (away <= layer.look_ahead_block)
            hidden, keys = _layer(layer, hidden, embedded, turn, seen, old, size)
            if layer.look_backward_block:
                own[i] = (keys[0][:, :, :size], keys[1][:, :, :size])
        return model.proj_out(model.norm_out(hidden, embedded)), own


def _layer(
    layer: Any,
    x: Tensor,
    time: Tensor,
    turn: tuple[Tensor, Tensor],
    seen: Tensor,
    old: tuple[Tensor, Tensor] | None,
    size: int,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One layer over a window, with the block before it where that is kept."""
    attn = layer.attn
    normed, gate, shift, scale, gate_mlp = layer.attn_norm(x, emb=time)
    heads = (*x.shape[:2], attn.heads, -1)
    q, k, v = (f(normed).view(heads).transpose(1, 2) for f in (attn.to_q, attn.to_k, attn.to_v))
    keys, values, first = k, v, size
    if old is not None:
        keys, values, first = torch.cat([old[0], k], 2), torch.cat([old[1], v], 2), 0
    cos, sin = turn
    out = functional.scaled_dot_product_attention(
        _turn_first(q, cos[:, size:], sin[:, size:]),
        _turn_first(keys, cos[:, first:], sin[:, first:]),
        values,
        attn_mask=seen[:, first:],
    )
    out = attn.to_out[0](out.transpose(1, 2).flatten(2))
    x = x + gate[:, None] * out
    normed = layer.ff_norm(x) * (1 + scale[:, None]) + shift[:, None]
    return x + gate_mlp[:, None] * layer.ff(normed), (k, v)


def _turn_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the first head alone, as the checkpoint was trained; pairs interleave."""
    head = x[:, :1]
    pairs = torch.cat([head[..., 0::2], head[..., 1::2]], -1)
    a, b = pairs.chunk(2, -1)
    turned = pairs * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]
    return torch.cat([turned, x[:, 1:]], 1)


def _runge_kutta(slope: Slope, start: Tensor, stop: Tensor, x: Tensor) -> Tensor:
    """One step of the 3/8 rule: four slopes."""
    step = stop - start
    k1 = slope(start, x)
    k2 = slope(start + step / 3, x + step * k1 / 3)
    k3 = slope(start + step * 2 / 3, x + step * (k2 - k1 / 3))
    k4 = slope(stop, x + step * (k1 - k2 + k3))
    return (k1 + 3 * (k2 + k3) + k4) * step / 8
