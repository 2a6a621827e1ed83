"""The network of a depth transformer: one pass over any stretch of the codebooks of a frame."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.heads.depth_layers import DepthLayer, Norm, StepLinear


@dataclass(frozen=True)
class DepthShape:
    """Sizes and kind of a depth transformer.

    Args:
        hidden: Width of the backbone's hidden state.
        codes: Codebooks it predicts.
        size: Entries per codebook.
        first: Values of the token that comes before the first code (a text token, or the code
            that the backbone itself predicts).
        dim: Width.
        layers: Depth.
        heads: Query heads.
        kv_heads: Key and value heads; None for as many as query heads.
        head_dim: Width of a head; None for dim / heads.
        ffn: Inner width of the feed-forward.
        per_step: Weights of their own for every codebook (Moshi), else shared (CSM).
        prepend: The hidden state is a place of its own in front (CSM), else it is added to every
            place (Moshi).
        blank: Rows per codebook for "no code" (delays leave some empty), behind its entries.
        final_norm: A norm in front of the output heads.
        eps: Of the norms.
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
    """Working memory of one frame: written in place, worthless when the frame is done.

    Attributes:
        z: `[B, D]` hidden state of the backbone.
        keys: Per layer `[B, H, P, d]`.
        values: Per layer `[B, H, P, d]`.
    """

    z: Tensor
    keys: list[Tensor]
    values: list[Tensor]


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
        self.norm = Norm(shape.dim, shape.eps) if shape.final_norm else None
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
        shape = (len(z), layer.kv_heads, self.shape.places, layer.head_dim)
        count = len(self.layers)
        blank = [z.new_empty(shape) for _ in range(2 * count)]
        return Frame(z, blank[:count], blank[count:])

    def run(self, frame: Frame, tokens: Tensor, at: int) -> Tensor:
        """One pass.

        Args:
            frame: Of `begin`; keys and values behind place `at` are forgotten.
            tokens: `[B, n]`: the tokens in front of the codes at, at + 1, …; in front of code 0
                stands the first token of the frame.
            at: The first code that is predicted.

        Returns:
            Logits `[B, n, V]` of the codes at, at + 1, ….
        """
        return self._run(frame.z, tokens, at, list(zip(frame.keys, frame.values, strict=True)))

    def whole(self, z: Tensor, tokens: Tensor) -> Tensor:
        """Teacher-forced logits `[B, K, V]` of hidden states `[B, D]`, tokens `[B, K]`."""
        return self._run(z, tokens, 0, None)

    def _run(
        self, z: Tensor, tokens: Tensor, at: int, caches: list[tuple[Tensor, Tensor]] | None
    ) -> Tensor:
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
