"""BAViT: a small transformer tells foreground from background, and background is dropped.

Sah et al., 2024 (arXiv 2410.09324) put it in front of a detector, where it reads the patches of the
picture. Here it stands behind the vision tower and reads the features of each frame, so that it
works with every tower.
"""

from __future__ import annotations

import math
from pathlib import Path

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from mmfast.compressors.base import read_module
from mmfast.compressors.query_compressor import sin_cos
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import stable_topk
from mmfast.rankers import fitted


class SceneLayer(nn.Module):
    """A block of a vision transformer: attention among the tokens of a frame, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run frames `[..., P, C]`."""
        parts = self.mix(self.before(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.movedim(-3, 0).transpose(-2, -3)  # [..., H, P, d] each
        mixed = scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(-2, -3).flatten(-2))
        more: Tensor = self.down(gelu(self.up(self.between(x))))
        return x + more


class BackgroundVit(nn.Module):
    """Logit of being foreground for every token of a frame.

    Tokens get the sine and cosine of their row and column, so a frame may have any raster.
    """

    name = "bavit"

    def __init__(self, width: int, *, inner: int = 48, heads: int = 3, depth: int = 2) -> None:
        super().__init__()
        self.config = {"width": width, "inner": inner, "heads": heads, "depth": depth}
        self.enter = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner))
        self.layers = nn.ModuleList(SceneLayer(inner, heads) for _ in range(depth))
        self.leave, self.head = nn.LayerNorm(inner), nn.Linear(inner, 1)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Judge frames of features `[..., P, D]` of `grid` rows and columns: `[..., P]` float32."""
        spots = sin_cos(grid, self.config["inner"]).to(x.device, x.dtype)
        inside = self.enter(x) + spots
        for layer in self.layers:
            inside = layer(inside)
        found: Tensor = self.head(self.leave(inside))[..., 0].float()
        return found


def load(path: str | Path) -> BackgroundVit:
    """Read the weights, on the CPU in float32; ModelError where the file holds none."""
    found: BackgroundVit = read_module(path, "ranking", BackgroundVit)
    return found


@register("bavit", kind="ranker", paper="2410.09324", needs=("x", "grid"), adaptive=True)
def bavit(tokens: Tokens, budget: int | None, *, path: str = "") -> Reduction:
    """Keep the tokens that a small trained transformer takes for foreground.

    Sah et al., 2024 (BAViT): two layers of a vision transformer, trained with segmentation maps or
    boxes, tell background from foreground; background leaves completely, or in part. Here they
    read the features of a frame behind the vision tower, and no question.

    Args:
        tokens: Features `x` `[..., N, D]` with their `grid`.
        budget: Tokens to keep of all frames, the most probable foreground, ties to the lowest
            index; None keeps all foreground, or the best token where there is none.
        path: File of the weights; "" is `rankers/bavit.safetensors` beside the model's checkpoint.
    """
    judge: BackgroundVit = fitted("bavit", path, tokens, load)
    grid = tokens.grid
    assert grid is not None
    frames = tokens.x.float().unflatten(-2, (grid[0], math.prod(grid[1:])))
    score = judge(frames, grid[1:]).flatten(-2)
    if budget is None:
        budget = max(1, int((score > 0).sum()))
    return Reduction.prune(stable_topk(score, budget), tokens.n)
