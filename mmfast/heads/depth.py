"""Depth transformer over the codebooks of a frame, Moshi (arXiv 2410.00037) and CSM.

And decoder layers along time for heads that remember: RoPE, keys and values as a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.kv import KVBlock
from mmfast.core.registry import register
from mmfast.heads.code_base import Choose, CodeEmbed, CodeState, Wide, likeliest, width_of
from mmfast.ops.attention import rotate
from mmfast.ops.codebooks import CodeLoss, check_delays, code_loss
from mmfast.ops.stream_cache import RowBuffer, StepPlaces, advance, within


class StepLinear(nn.Module):
    """A linear map without bias; with `steps` > 0 each codebook has weights of its own."""

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


class DepthLayer(nn.Module):
    """Attention over the codebooks so far, then a gated feed-forward; `steps` as `StepLinear`."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int, head_dim: int, ffn: int, steps: int, eps: float
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.norm_in, self.norm_out = nn.RMSNorm(dim, eps), nn.RMSNorm(dim, eps)
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
        cache: RowBuffer | None,
        mask: Tensor | None,
        turn: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Map `[B, n, D]` at codebooks at, at + 1, …; the `cache` is written in place.

        What stands in it behind place `at` is overwritten. `mask` is `[n, at + n]` bool, or None
        where n is 1 or at is 0; `turn` holds cosines and sines `[n, d]` of the places, or None.
        """
        y = self.norm_in(x)
        q, k, v = (self._split(part(y, at)) for part in (self.q, self.k, self.v))
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        if cache is not None:
            end = at + x.shape[1]
            cache.write(k, v, at=at)
            k, v = cache.read(0, 0, end), cache.read(1, 0, end)
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


@dataclass(frozen=True)
class DepthShape:
    """Sizes and kind of a depth transformer.

    Args:
        hidden: Width of the backbone's hidden state.
        codes, size: Codebooks that it predicts, and entries of each.
        first: Values of the token that comes before the first code (a text token, or the code
            that the backbone itself predicts).
        dim, layers, heads, ffn: Sizes of the transformer; `ffn` is the feed-forward's inner width.
        kv_heads: Key and value heads; None for as many as query heads.
        head_dim: Width of a head; None for dim / heads.
        per_step: Weights of their own for every codebook (Moshi), else shared (CSM).
        prepend: The hidden state is a place of its own in front (CSM), else it is added to every
            place (Moshi).
        blank: Rows per codebook for "no code" (delays leave some empty), behind its entries.
        final_norm: A norm in front of the output heads; `eps` is that of all norms.
        theta: Base of RoPE over the places; 0 for none.
    """

    hidden: int
    codes: int
    size: int
    first: int
    dim: int
    layers: int
    heads: int
    ffn: int
    kv_heads: int | None = None
    head_dim: int | None = None
    per_step: bool = True
    prepend: bool = False
    blank: int = 0
    final_norm: bool = False
    eps: float = 1e-8
    theta: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of the embedding per codebook."""
        return self.size + self.blank

    @property
    def places(self) -> int:
        """Places of a full pass."""
        return self.codes + int(self.prepend)


@dataclass(frozen=True, eq=False)
class Frame:
    """Working memory of one frame: written in place, of no use when the frame is done.

    `z` `[B, D]` is the backbone's hidden state; `layers` are buffers of P places.
    """

    z: Tensor
    layers: list[RowBuffer]


class DepthCore(nn.Module):
    """Causal transformer along the codebooks of a frame, conditioned on one hidden state."""

    cos: Tensor
    sin: Tensor
    causal: Tensor
    offsets: Tensor
    embed: nn.Embedding

    def __init__(self, shape: DepthShape) -> None:
        super().__init__()
        self.shape = shape
        self.tables: list[Tensor] | None = None  # embeddings of a stock model, one per place
        self.embed_in: StepLinear | None = None  # where embeddings are of the backbone's width
        steps = shape.codes if shape.per_step else 0
        kv = shape.kv_heads or shape.heads
        wide = shape.head_dim or shape.dim // shape.heads
        self.project = StepLinear(shape.hidden, shape.dim, 0 if shape.prepend else steps)
        rows = shape.first + (shape.codes - 1) * shape.rows  # the last code is never an input
        self.embed = nn.Embedding(rows, shape.dim)
        self.layers = nn.ModuleList(
            DepthLayer(shape.dim, shape.heads, kv, wide, shape.ffn, steps, shape.eps)
            for _ in range(shape.layers)
        )
        self.norm = nn.RMSNorm(shape.dim, shape.eps) if shape.final_norm else None
        self.heads = StepLinear(shape.dim, shape.size, shape.codes)
        self.set_places(wide)

    @property
    def codes(self) -> int:
        """K, the codes it predicts."""
        return self.shape.codes

    @property
    def size(self) -> int:
        """V, entries per codebook."""
        return self.shape.size

    def set_places(self, wide: int) -> None:
        """Compute what depends on places alone; `wide` is the width of a head."""
        shape, places = self.shape, torch.arange(self.shape.places)
        causal = places[:, None] >= places
        rate = shape.theta ** -(torch.arange(0, wide, 2) / wide) if shape.theta else torch.ones(0)
        angle = (places[:, None] * rate).repeat(1, 2)
        steps = torch.arange(shape.codes)
        offsets = torch.where(steps > 0, shape.first + (steps - 1) * shape.rows, 0)
        for name, value in (
            ("causal", causal),
            ("cos", angle.cos()),
            ("sin", angle.sin()),
            ("offsets", offsets),
        ):
            self.register_buffer(name, value, persistent=False)

    def begin(self, z: Tensor) -> Frame:
        """Working memory for frames of hidden states `[B, D]`."""
        layer: DepthLayer = self.layers[0]  # type: ignore[assignment]
        shape = (2, len(z), layer.kv_heads, self.shape.places, layer.head_dim)
        return Frame(z, [RowBuffer(data=z.new_empty(shape)) for _ in self.layers])

    def run(self, frame: Frame, tokens: Tensor, at: int) -> Tensor:
        """Run one pass: logits `[B, n, V]` of the codes at, at + 1, ….

        `tokens` `[B, n]` are those in front of these codes; in front of code 0 stands the first
        token of the frame. Keys and values behind place `at` are forgotten.
        """
        return self._run(frame.z, tokens, at, frame.layers)

    def whole(self, z: Tensor, tokens: Tensor) -> Tensor:
        """Teacher-forced logits `[B, K, V]` of hidden states `[B, D]`, tokens `[B, K]`."""
        return self._run(z, tokens, 0, None)

    def _run(self, z: Tensor, tokens: Tensor, at: int, caches: list[RowBuffer] | None) -> Tensor:
        x, start = self._input(z, tokens, at)
        end = start + x.shape[1]
        mask = self.causal[start:end, :end] if start and x.shape[1] > 1 else None
        turn = (self.cos[start:end], self.sin[start:end]) if self.cos.numel() else None
        for index, layer in enumerate(self.layers):
            x = layer(x, start, caches[index] if caches else None, mask, turn)
        x = x[:, -tokens.shape[1] :]
        logits: Tensor = self.heads(x if self.norm is None else self.norm(x), at)
        return logits

    def _input(self, z: Tensor, tokens: Tensor, at: int) -> tuple[Tensor, int]:
        x = self._embed(tokens, at)
        if not self.shape.prepend:
            wide = z[:, None].expand(-1, tokens.shape[1], -1)
            return x + self.project(wide, at), at
        if at:
            return x, at + 1
        return torch.cat([self.project(z[:, None], 0), x], dim=1), 0

    def _embed(self, tokens: Tensor, at: int) -> Tensor:
        count = tokens.shape[1]
        if self.tables is None:
            x: Tensor = self.embed(tokens + self.offsets[at : at + count])
        else:
            rows = [F.embedding(tokens[:, i], self.tables[at + i]) for i in range(count)]
            x = torch.stack(rows, dim=1)  # [B, n, D]
        if self.embed_in is not None:
            x = self.embed_in(x, 0)
        return x


@register("depth", kind="head", paper="2410.00037", needs=("hidden",), sites=("codebooks",))
class DepthHead(DepthCore):
    """Codebooks of a frame one after the other, by a small transformer (Moshi, CSM).

    One pass over all codebooks trains it and verifies drafts; `decoding.codebooks` drafts all codes
    at once and keeps the output exact. The arguments are those of `DepthShape`, by `kind` too;
    `hidden` may be the backbone. `delays` are steps that each codebook lags, None for none; code V
    (`size`) stands for "none" where a delay leaves a gap.
    """

    def __init__(
        self,
        hidden: int | Wide,
        codes: int,
        size: int,
        *,
        first: int = 1,
        delays: Sequence[int] | None = None,
        dim: int = 256,
        layers: int = 2,
        heads: int = 4,
        ffn: int = 512,
        **kind: Any,
    ) -> None:
        super().__init__(
            DepthShape(
                hidden=width_of(hidden),
                codes=codes,
                size=size,
                first=first,
                dim=dim,
                layers=layers,
                heads=heads,
                ffn=ffn,
                blank=1,
                **kind,
            )
        )
        self.delays = check_delays(delays or [0] * codes, codes)
        sizes = {"dim": dim, "layers": layers, "heads": heads, "ffn": ffn}
        self.config = {
            "head": "depth", "codes": codes, "size": size, "first": first,
            "delays": list(self.delays), **sizes, **kind,
        }  # fmt: skip
        self.inputs = CodeEmbed(codes, size, width_of(hidden))

    def init_state(self, batch: int = 1) -> CodeState:
        """Before the first frame: a drafter that copies finds code 0."""
        blank = torch.zeros(batch, 1, self.codes, dtype=torch.long, device=self.causal.device)
        return CodeState(blank)

    @torch.no_grad()
    def draft(
        self,
        state: CodeState,
        hidden: Tensor,
        first: Tensor | None = None,
        choose: Choose = likeliest,
    ) -> tuple[CodeState, Tensor]:
        """Draft the codes `[B, K]` of the next step, code by code; returns the next state too.

        `hidden` `[B, D]` is the backbone's, `first` `[B]` the token in front, None: none. `choose`
        picks a code from logits `[B, V]`.
        """
        frame = self.begin(hidden)
        token = self.fronts(hidden) if first is None else first
        codes = []
        for at in range(self.codes):
            token = choose(self.run(frame, token[:, None], at)[:, 0])
            codes.append(token)
        found = torch.stack(codes, dim=1)
        return CodeState(torch.cat([state.codes, found[:, None]], dim=1)[:, -16:]), found

    def crop(self, state: CodeState, frames: int) -> CodeState:
        """Forget the last frames, 15 at most; nothing else is remembered of them."""
        return CodeState(state.codes[:, : max(state.codes.shape[1] - frames, 1)])

    def fronts(self, hidden: Tensor) -> Tensor:
        """`[B]`: the token in front of the codes where there is no text."""
        return torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)

    def loss(self, hidden: Tensor, codes: Tensor, first: Tensor | None = None) -> CodeLoss:
        """Teacher-forced loss, in one pass over all codebooks of all steps.

        `hidden` `[B, T, D]` stands at the step whose codes it is to say; `codes` `[B, T, K]` are
        delayed already, V or -100 where there is none; `first` `[B, T]` are tokens in front, None:
        none.
        """
        flat, target = hidden.flatten(0, 1), codes.flatten(0, 1)
        front = self.fronts(flat) if first is None else first.flatten()
        known = target.where((target >= 0) & (target < self.size), self.size)
        tokens = torch.cat([front[:, None], known[:, :-1]], dim=1)  # [B T, K]
        return code_loss(self.whole(flat, tokens), target)


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
