"""Queries that cross-attend to the patches of a frame, led by its low resolution and a question."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from mmfast.compressors.base import Compressed, Compressor, learned
from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.merging import split_box


def cells_of(grid: tuple[int, int], count: int) -> Tensor:
    """Number of the cell of each patch of a frame cut into `count` compact cells, `[P]`."""
    cell = torch.zeros(grid, dtype=torch.int64)
    for number, (_, _, top, bottom, left, right) in enumerate(split_box((1, *grid), count)):
        cell[top:bottom, left:right] = number
    return cell.flatten()


def sin_cos(grid: tuple[int, int], width: int) -> Tensor:
    """Sines and cosines of row and column, `[P, width]`; `width` is a multiple of 4."""
    return sin_cos_at(torch.arange(grid[0]), torch.arange(grid[1]), width)


def sin_cos_at(rows: Tensor, columns: Tensor, width: int) -> Tensor:
    """Sines and cosines of every row `[R]` and column `[C]`, `[R C, width]` in raster order."""
    rate = 100.0 ** -(torch.arange(width // 4) / (width // 4))
    row, column = torch.meshgrid(rows, columns, indexing="ij")
    turn = [place.flatten()[:, None] * rate for place in (row, column)]
    return torch.cat([part for angle in turn for part in (angle.sin(), angle.cos())], -1)


class CrossAttention(nn.Module):
    """Multi-head attention of queries `[..., k, C]` to keys `[..., n, C]`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return `[..., k, C]`; `seen` is False where a query must not look, `[..., k, n]`."""
        q, k, v = (
            layer(each).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for layer, each in ((self.q, queries), (self.k, keys), (self.v, keys))
        )
        seen = None if seen is None else seen[..., None, :, :]
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=seen)
        found: Tensor = self.o(mixed.transpose(-2, -3).flatten(-2))
        return found


class PatchLayer(nn.Module):
    """A transformer layer over the patches of a frame."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look = CrossAttention(width, heads)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix patches `[..., P, C]`, then change each alone."""
        seen = self.before(x)
        x = x + self.look(seen, seen)
        changed: Tensor = self.narrow(gelu(self.wide(self.between(x))))
        return x + changed


class QueryCompressor(Compressor, name="query_compressor"):
    """Cross-attention of one query a cell to the patches of its cell, then a soft choice of one.

    Patches first read their frame (the fusion layers of LLaVA-Mini), since what tells the left
    digit from the right one lies beside it. A query is the mean of its cell (the low-resolution
    view of mPLUG-DocOwl2, whose queries see their own region alone), a learned vector, the number
    of its frame, and where it `asks` a summary of the text (the query of the one-token scaling
    law); queries of all frames read each other, so that frames may tell different things of a still
    scene. Each output is a convex sum of its cell's features, so that a frozen language model
    reads what it knows, plus a learned change that starts at zero; it stands at the place of the
    patch with the greatest share.
    """

    def __init__(
        self,
        width: int,
        tokens: int,
        grid: tuple[int, int],
        *,
        inner: int = 192,
        heads: int = 6,
        asks: bool = True,
        depth: int = 2,
    ) -> None:
        super().__init__()
        grid = (grid[0], grid[1])
        self.config = {"width": width, "tokens": tokens, "grid": list(grid), "inner": inner}
        self.config |= {"heads": heads, "asks": asks, "depth": depth}
        self.cell: Tensor
        self.seen: Tensor
        cell = cells_of(grid, tokens)
        seen = cell == torch.arange(tokens)[:, None]  # [k, P]
        self.register_buffer("cell", cell, persistent=False)
        self.register_buffer("seen", seen, persistent=False)
        self.register_buffer("mean", seen / seen.sum(-1, keepdim=True), persistent=False)
        self.register_buffer("spots", sin_cos(grid, inner), persistent=False)
        self.enter = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner))
        self.learned = nn.Parameter(0.02 * torch.randn(tokens, inner))
        if asks:
            self.read = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner))
            self.ask = nn.Parameter(0.02 * torch.randn(1, inner))
            self.listen = CrossAttention(inner, heads)
        self.layers = nn.ModuleList(PatchLayer(inner, heads) for _ in range(depth))
        self.look, self.mix = CrossAttention(inner, heads), CrossAttention(inner, heads)
        self.before, self.ahead = nn.LayerNorm(inner), nn.LayerNorm(inner)
        self.between, self.behind = nn.LayerNorm(inner), nn.LayerNorm(inner)
        self.wide, self.narrow = nn.Linear(inner, 2 * inner), nn.Linear(2 * inner, inner)
        self.choose, self.offer = (nn.Linear(inner, inner, bias=False) for _ in range(2))
        self.change, self.time = nn.Linear(inner, width), nn.Linear(inner, inner, bias=False)
        for weight in (self.change.weight, self.change.bias, self.time.weight):
            nn.init.zeros_(weight)

    def forward(
        self, x: Tensor, question: Tensor | None = None, known: Tensor | None = None
    ) -> Compressed:
        """Compress `[..., F, P, D]`; arguments are those of `Compressor.forward`."""
        inside = self.enter(x)
        keys = inside + self.spots  # [..., F, P, C]
        for layer in self.layers:
            keys = layer(keys)
        queries = self.mean @ inside + self.learned  # [..., F, k, C]
        frames = sin_cos((x.shape[-3], 1), keys.shape[-1]).to(keys)
        queries = queries + self.time(frames)[:, None]
        if self.config["asks"]:
            if question is None:
                raise ModelError("this query_compressor reads the question; give its embeddings")
            seen = None if known is None else known[..., None, :]
            text = self.read(question)
            asked = self.ask.expand(*text.shape[:-2], -1, -1)
            queries = queries + self.listen(asked, text, seen)[..., None, :, :]
        queries = queries + self.look(self.before(queries), keys, self.seen)
        every = self.ahead(queries).flatten(-3, -2)  # [..., F k, C]
        queries = queries + self.mix(every, every).unflatten(-2, queries.shape[-3:-1])
        queries = queries + self.narrow(gelu(self.wide(self.between(queries))))
        queries = self.behind(queries)
        score = self.choose(queries) @ self.offer(keys).mT / math.sqrt(keys.shape[-1])
        score = score.masked_fill(~self.seen, float("-inf"))  # [..., F, k, P]
        vectors = score.softmax(-1) @ x + self.change(queries)
        return Compressed.of_cells(vectors, score, self.cell)


@register("query_compressor", kind="compressor", paper="2409.03420", needs=("x", "grid", "query"))
def query_compressor(tokens: Tokens, budget: int, *, path: str = "") -> Reduction:
    """Compress each frame to a few vectors by trained queries that read patches and question.

    Args:
        tokens: `x` `[N, D]` with its `grid`, and `query` `[T, D]`.
        budget: Tokens to keep of all frames; in a spec it counts those of one frame.
        path: File of the weights; "" is the one beside the model's checkpoint.
    """
    return learned(tokens, budget, path, "query_compressor")
