"""Text that reads the patches before they are dropped, and a square of queries in their place."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from mmfast.compressors.base import Compressed, Compressor, learned
from mmfast.compressors.query_compressor import sin_cos, sin_cos_at
from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.attention import rotate_at

# Keys and values `[..., H, n, d]` of tokens in front, which those behind them read.
Front = tuple[Tensor, Tensor]


class RootNorm(nn.RMSNorm):
    """Root mean square norm in the precision of its weight, under autocast, too."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Scale `[..., C]`."""
        return super().forward(x.to(self.weight.dtype))


class PrefusionLayer(nn.Module):
    """A decoder block as language models have it: rotary causal attention, then a gated layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = (RootNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(
        self, x: Tensor, place: Tensor, seen: Tensor, front: Front | None = None
    ) -> tuple[Tensor, Front]:
        """Run tokens `[..., n, C]` at `place` `[..., n]` behind those in `front`.

        `seen` `[..., n, m + n]` is False where a token must not look, at the m in front or at the
        n. Also returns the keys and values of the n.
        """
        inside = self.before(x)
        q, k, v = (
            layer(inside).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for layer in (self.q, self.k, self.v)
        )
        q, k = rotate_at(q, place), rotate_at(k, place)
        keys, values = k, v
        if front is not None:
            lead = torch.broadcast_shapes(k.shape[:-2], front[0].shape[:-2])
            q = q.expand(*lead, *q.shape[-2:])
            keys, values = (
                torch.cat([each.expand(*lead, *each.shape[-2:]) for each in pair], -2)
                for pair in zip(front, (k, v), strict=True)
            )
        mixed = scaled_dot_product_attention(q, keys, values, attn_mask=seen[..., None, :, :])
        x = x + self.o(mixed.transpose(-2, -3).flatten(-2))
        inside = self.between(x)
        return x + self.down(silu(self.gate(inside)) * self.up(inside)), (k, v)


class LlavaMini(Compressor, name="llava_mini"):
    """Pre-fusion of the text with the patches, and compression by a square of learned queries.

    Decoder blocks run over the patches of a frame and the text behind them. They end in a change of
    the text's embeddings, averaged over the frames, which starts at zero: untrained, text stays as
    it is. A square of queries, each with the sine and cosine of the middle of its cell, attends to
    the patches; each output is a convex sum of their features. A vector stands in the middle of its
    cell.
    """

    def __init__(
        self,
        width: int,
        tokens: int = 1,
        grid: tuple[int, int] = (24, 24),
        *,
        inner: int = 192,
        heads: int = 6,
        depth: int = 2,
    ) -> None:
        super().__init__()
        grid = (grid[0], grid[1])
        self.config = {"width": width, "tokens": tokens, "grid": list(grid), "inner": inner}
        self.config |= {"heads": heads, "depth": depth}
        self.refuse(tokens)
        side = math.isqrt(tokens)
        if side > min(grid) or tokens == grid[0] * grid[1]:
            raise ModelError(
                f"llava_mini:{tokens} lays {side} x {side} queries over a frame of {grid[0]} x "
                f"{grid[1]} tokens; choose a square of less than it has, in rows and in columns"
            )
        self.cell: Tensor
        self.place: Tensor
        self.spots: Tensor
        self.own_spots: Tensor
        ends = [torch.arange(side + 1) * n // side for n in grid]
        middles = [(end[1:] + end[:-1] - 1) / 2 for end in ends]  # between two where cells are even
        rows, columns = (
            torch.bucketize(torch.arange(n), end[1:], right=True)
            for n, end in zip(grid, ends, strict=True)
        )
        row, column = (middle.floor().long() for middle in middles)
        cell, place = rows[:, None] * side + columns, row[:, None] * grid[1] + column
        self.register_buffer("cell", cell.flatten(), persistent=False)
        self.register_buffer("place", place.flatten(), persistent=False)
        self.register_buffer("spots", sin_cos(grid, inner), persistent=False)
        spots = sin_cos_at(middles[0], middles[1], inner)
        self.register_buffer("own_spots", spots, persistent=False)
        self.learned = nn.Parameter(0.02 * torch.randn(tokens, inner))
        self.enter = nn.Sequential(RootNorm(width), nn.Linear(width, inner, bias=False))
        self.choose, self.offer = (nn.Linear(inner, inner, bias=False) for _ in range(2))
        for layer in (self.choose, self.offer):  # the attention of the paper, without weights
            nn.init.eye_(layer.weight)
        self.read = nn.Sequential(RootNorm(width), nn.Linear(width, inner, bias=False))
        self.layers = nn.ModuleList(PrefusionLayer(inner, heads) for _ in range(depth))
        self.behind, self.fuse = RootNorm(inner), nn.Linear(inner, width, bias=False)
        nn.init.zeros_(self.fuse.weight)

    @classmethod
    def refuse(cls, tokens: int) -> None:
        """Refuse what is no square (ModelError)."""
        side = math.isqrt(max(0, tokens))
        if tokens < 1 or side * side != tokens:
            raise ModelError(
                f"llava_mini:{tokens} is no square, and its queries are laid out in one; write "
                f"llava_mini:{max(1, side * side)} or llava_mini:{(side + 1) ** 2}"
            )

    def forward(
        self, x: Tensor, question: Tensor | None = None, known: Tensor | None = None
    ) -> Compressed:
        """Compress `[..., F, P, D]`; arguments are those of `Compressor.forward`."""
        if question is None:
            raise ModelError("llava_mini fuses the text with the patches; give its embeddings")
        keys, queries = self.enter(x) + self.spots, self.learned + self.own_spots
        score = self.choose(queries) @ self.offer(keys).mT / math.sqrt(keys.shape[-1])
        vectors = score.softmax(-1) @ x  # [..., F, k, D]
        lead = vectors.shape[:-1]
        place, owner = self.place.expand(lead), self.cell.expand(*lead[:-1], -1)
        return Compressed(vectors, place, owner, text=self.fused(x, question, known))

    def fused(self, x: Tensor, question: Tensor, known: Tensor | None = None) -> Tensor:
        """Return the change of the text `[..., T, D]` after reading patches `[..., F, P, D]`.

        Text is causal, and patches do not see it, so that they run once for all questions.
        """
        patches, length = x.shape[-2], question.shape[-2]
        if known is None:
            known = question.new_ones(question.shape[:-1], dtype=torch.bool)
        at = torch.arange(patches, device=x.device)
        order = torch.arange(length, device=x.device)
        seen = known[..., None, :] & (order[:, None] >= order)  # [..., T, T]
        seen = torch.cat([seen.new_ones(*seen.shape[:-1], patches), seen], -1)[..., None, :, :]
        behind = (patches + known.long().cumsum(-1) - 1)[..., None, :]  # padding has no place
        shown, words = self.read(x), self.read(question)[..., None, :, :]  # [..., 1, T, C]
        for layer in self.layers:
            shown, front = layer(shown, at, at[:, None] >= at)
            words, _ = layer(words, behind, seen, front)
        change: Tensor = self.fuse(self.behind(words)).mean(-3)
        return change.masked_fill(~known[..., None], 0)


@register(
    "llava_mini",
    kind="compressor",
    paper="2501.03895",
    needs=("x", "grid", "query"),
    fuses=True,
)
def llava_mini(tokens: Tokens, budget: int, *, path: str = "") -> Reduction:
    """Compress each frame to a square of vectors, after the prompt's text has read all patches.

    Args:
        tokens: `x` `[N, D]` with its `grid`, and `query` `[T, D]`.
        budget: Tokens to keep of all frames; in a spec it counts those of one frame, a square.
        path: File of the weights; "" is the one beside the model's checkpoint.
    """
    return learned(tokens, budget, path, "llava_mini")
