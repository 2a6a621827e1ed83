"""Benchmark of merging in VGGT, on a model of its shape with random weights.

VGGT (Wang et al., arXiv 2503.11651) is in no package that this project depends on, so its part that
matters here, the aggregator, is built anew under its names: what acts in one acts in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.attach import attach
from mmfast.bench.cases import fill_
from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row, dtype_name
from mmfast.bench.timing import compare_jobs
from mmfast.models.loading import pick_device


class SceneAttention(nn.Module):
    """Attention with normed, rotated queries and keys over `[B, n, C]` at places `[B, n, 2]`."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.fused_attn = heads, True
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = nn.LayerNorm(dim // heads), nn.LayerNorm(dim // heads)

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        """Attend from every token to every token."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = _rotated(self.q_norm(q), pos), _rotated(self.k_norm(k), pos)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


def _rotated(x: Tensor, pos: Tensor) -> Tensor:
    """Rotate `[B, H, n, d]`: the first half of the channels by row, the second by column."""
    quarter = x.shape[-1] // 4
    speed = 100.0 ** -(torch.arange(quarter, device=x.device) / quarter)
    angle = pos[:, None, :, :, None].float() * speed  # [B, 1, n, 2, d / 4]
    a, b = x.unflatten(-1, (2, 2, quarter)).unbind(-2)  # [B, H, n, 2, d / 4] each
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -2).flatten(-3)


class SceneBlock(nn.Module):
    """A block of attention and MLP, each with a norm in front."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = SceneAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        """`[B, n, C]` to the same."""
        x = x + self.attn(self.norm1(x), pos=pos)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class SceneAggregator(nn.Module):
    """Blocks that attend to one frame and to all in turn, over patches of convolution.

    A camera token and register tokens stand in front of each frame, those of the first frame apart
    from those of the others.
    """

    def __init__(
        self, dim: int = 1024, depth: int = 24, heads: int = 16, patch: int = 14, registers: int = 4
    ) -> None:
        super().__init__()
        self.patch_size, self.patch_start_idx = patch, 1 + registers
        self.patch_embed = nn.Sequential(nn.Conv2d(3, dim, patch, patch), nn.Flatten(2), _Turned())
        self.frame_blocks = nn.ModuleList(SceneBlock(dim, heads) for _ in range(depth))
        self.global_blocks = nn.ModuleList(SceneBlock(dim, heads) for _ in range(depth))
        self.camera_token = nn.Parameter(torch.randn(1, 2, 1, dim))
        self.register_token = nn.Parameter(torch.randn(1, 2, registers, dim))

    def forward(self, images: Tensor) -> tuple[list[Tensor], int]:
        """Outputs `[B, S, P, 2 C]` of each pair of blocks, and the place of the first patch."""
        batch, frames, _, height, width = images.shape
        patches = self.patch_embed(images.flatten(0, 1)).unflatten(0, (batch, frames))
        special = torch.cat([self.camera_token, self.register_token], 2)
        which = (torch.arange(frames, device=images.device) > 0).long()
        x = torch.cat([special[:, which].expand(batch, -1, -1, -1), patches], 2)  # [B, S, P, C]
        rows, columns = height // self.patch_size, width // self.patch_size
        raster = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) + 1
        place = F.pad(raster, (0, 0, self.patch_start_idx, 0)).to(images.device)  # [P, 2]
        outputs = []
        for alone, together in zip(self.frame_blocks, self.global_blocks, strict=True):
            one = alone(x.flatten(0, 1), pos=place[None]).unflatten(0, (batch, frames))
            x = together(one.flatten(1, 2), pos=place.repeat(frames, 1)[None])
            x = x.unflatten(1, (frames, -1))
            outputs.append(torch.cat([one, x], -1))
        return outputs, self.patch_start_idx


class _Turned(nn.Module):
    """`[B, C, N]` to `[B, N, C]`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


SPECS = ("litevggt@vit:0.4?first=true&reuse=6", "litevggt@vit:0.4?first=true")


@benchmark("encoder", "scene")
def scene(
    tick: Tick,
    rounds: int = 3,
    layers: int = 2,
    frames: int = 8,
    size: tuple[int, int] = (350, 518),
) -> list[Row]:
    """Compare merging with the stock aggregator, in shape the published one with fewer blocks."""
    where, dtype = pick_device(None), torch.float32
    if where.type == "cuda":
        dtype, layers, frames = torch.bfloat16, 24, 32
    model: Any = SceneAggregator(depth=layers).eval()
    fill_(model)
    model = model.to(where, dtype)
    gen = torch.Generator().manual_seed(0)
    x = torch.rand(1, frames, 3, *size, generator=gen).to(where, dtype)
    each = size[0] // 14 * (size[1] // 14)
    shared: Row = {"frames": frames, "tokens": frames * each, "blocks": 2 * layers}
    shared |= {"dtype": dtype_name(dtype), "of_blocks": 48}
    tick("VGGT", 0, 1)
    with attach(model, SPECS[0]) as trace, torch.no_grad():
        model(x)
    left = trace.rows[0].tokens_out
    full, less = (_macs(model, frames, each, n) for n in (frames * each, left))
    extra = {spec: {"reduce": spec, "ideal": full / less} for spec in SPECS}
    jobs = {name: partial(_run, model, x, spec) for name, spec in _named(SPECS)}
    return compare_jobs(jobs, rounds, shared, where, {"stock": {"reduce": None}, **extra})


def _named(specs: Sequence[str]) -> list[tuple[str, str | None]]:
    return [("stock", None), *((spec, spec) for spec in specs)]


def _macs(model: SceneAggregator, frames: int, each: int, left: int) -> int:
    """Products of all blocks where so many patches are `left` in the attention to all frames."""
    front, dim = model.patch_start_idx, model.camera_token.shape[-1]
    n, m = frames * (front + each), frames * front + left
    linear = 2 * 12 * dim * dim * n
    return len(model.frame_blocks) * (linear + 2 * dim * (n * (front + each) + m * m))


@torch.no_grad()
def _run(model: Any, x: Tensor, spec: str | None) -> Tensor:
    with attach(model, spec):
        out: Tensor = model(x)[0][-1]
    return out
