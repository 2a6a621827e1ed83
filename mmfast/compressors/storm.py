"""Selective state spaces over the tokens of all frames, both ways in time, then pooling."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from mmfast.compressors.base import Compressed, Compressor, learned
from mmfast.compressors.query_compressor import cells_of, sin_cos
from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens


def selective_scan(rate: Tensor, gain: Tensor) -> Tensor:
    """States `h[t] = exp(rate[t]) h[t-1] + gain[t]` with `h[-1] = 0`, all `[..., L, C, S]`.

    The sequence is cut into about sqrt(L) chunks. All of them run side by side from zero, then each
    gets what reaches it from the one before: 2 sqrt(L) steps in place of L. Rates are at most 0.
    """
    length = rate.shape[-3]
    size = max(1, math.isqrt(length))
    rate, gain = (pad(each, (0, 0, 0, 0, 0, -length % size)) for each in (rate, gain))
    rate, gain = (each.unflatten(-3, (-1, size)) for each in (rate, gain))
    # Numbers too small for full precision are slow, and below this nothing arrives.
    reach = rate.cumsum(-3).clamp_min(-60).exp()
    state = gain.select(-3, 0)
    states = [state]  # side by side, `[..., chunks, C, S]`
    for factor, more in zip(rate.exp().unbind(-3)[1:], gain.unbind(-3)[1:], strict=True):
        state = factor * state + more
        states.append(state)
    carries = [torch.zeros_like(state.select(-3, 0))]
    for arrives, own in zip(reach.select(-3, -1).unbind(-3), state.unbind(-3), strict=True):
        carries.append(arrives * carries[-1] + own)
    found = torch.stack(states, -3) + reach * torch.stack(carries[:-1], -3).unsqueeze(-3)
    return found.flatten(-4, -3)[..., :length, :, :]


class MambaLayer(nn.Module):
    """A selective state space layer of Mamba (Gu & Dao, 2023) over `[..., L, C]`, causal.

    Weights are called as those of Mamba, and each of 2 C channels has `states` numbers as state.
    """

    def __init__(self, width: int, states: int, kernel: int = 4) -> None:
        super().__init__()
        wide, self.rank = 2 * width, math.ceil(width / 16)
        self.in_proj = nn.Linear(width, 2 * wide, bias=False)
        self.conv1d = nn.Conv1d(wide, wide, kernel, groups=wide, padding=kernel - 1)
        self.x_proj = nn.Linear(wide, self.rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(self.rank, wide)
        steps = torch.exp(torch.empty(wide).uniform_(math.log(1e-3), math.log(0.1)))
        with torch.no_grad():  # softplus of the bias is the step
            self.dt_proj.bias.copy_(steps + torch.log(-torch.expm1(-steps)))
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(wide, 1))
        self.D = nn.Parameter(torch.ones(wide))
        self.out_proj = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each token with those before it."""
        lead, length, states = x.shape[:-2], x.shape[-2], self.A_log.shape[-1]
        u, gate = self.in_proj(x.reshape(-1, length, x.shape[-1])).chunk(2, -1)
        u = silu(self.conv1d(u.mT)[..., :length].mT)
        step, enter, leave = self.x_proj(u).split([self.rank, states, states], -1)
        exact = torch.promote_types(self.A_log.dtype, torch.float32)  # products of many factors
        step = softplus(self.dt_proj(step)).to(exact)[..., None]  # [B, L, 2 C, 1]
        rate = -step * self.A_log.to(exact).exp()
        h = selective_scan(rate, step * u.to(exact)[..., None] * enter.to(exact)[..., None, :])
        y = (h * leave.to(exact)[..., None, :]).sum(-1).to(u.dtype) + self.D * u
        mixed: Tensor = self.out_proj((y * silu(gate)).to(x.dtype))
        return mixed.view(*lead, length, -1)


class Storm(Compressor, name="storm"):
    """Bidirectional Mamba layers over all tokens in time, then means in time and space (STORM).

    The tokens of all frames are one sequence, frame after frame in raster order. Each layer adds
    what a scan from the front and one from the back found, so a token tells of frames before and
    after it. `stride` frames are then averaged, and that mean is cut into `stride * tokens` cells,
    which are averaged: `tokens` a frame on average, whatever the stride. Each output is the mean of
    the features it replaces plus a learned change that starts at zero, so that untrained it is
    plain pooling. The frames of a group take its cells in turn, and a vector stands at the middle
    of its cell.
    """

    def __init__(
        self,
        width: int,
        tokens: int,
        grid: tuple[int, int],
        *,
        inner: int = 96,
        depth: int = 2,
        states: int = 8,
        stride: int = 1,
    ) -> None:
        super().__init__()
        grid = (grid[0], grid[1])
        self.config = {"width": width, "tokens": tokens, "grid": list(grid), "inner": inner}
        self.config |= {"depth": depth, "states": states, "stride": stride}
        if not 1 <= stride * tokens <= grid[0] * grid[1]:
            raise ModelError(
                f"storm of {tokens} tokens a frame over {stride} frames needs {stride * tokens} "
                f"cells, and a frame has {grid[0]} x {grid[1]} tokens; choose less of one"
            )
        self.tokens, self.stride = tokens, stride
        self.cells = [cells_of(grid, tokens * n) for n in range(1, stride + 1)]
        self.middles = [_middles(cell, grid, tokens) for cell in self.cells]
        self.register_buffer("spots", sin_cos(grid, inner), persistent=False)
        self.enter = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner))
        self.before = nn.ModuleList(nn.LayerNorm(inner) for _ in range(depth))
        self.ahead, self.back = (
            nn.ModuleList(MambaLayer(inner, states) for _ in range(depth)) for _ in range(2)
        )
        self.behind, self.change = nn.LayerNorm(inner), nn.Linear(inner, width)
        for weight in (self.change.weight, self.change.bias):
            nn.init.zeros_(weight)

    def forward(
        self, x: Tensor, question: Tensor | None = None, known: Tensor | None = None
    ) -> Compressed:
        """Compress `[..., F, P, D]`; the question is not read."""
        h = (self.enter(x) + self.spots).flatten(-3, -2)  # [..., F P, C]
        for norm, ahead, back in zip(self.before, self.ahead, self.back, strict=True):
            seen = norm(h)
            h = h + ahead(seen) + back(seen.flip(-2)).flip(-2)
        h = self.behind(h).unflatten(-2, x.shape[-3:-1])
        vectors, places, owners = [], [], []
        for start in range(0, x.shape[-3], self.stride):
            group = slice(start, start + self.stride)
            here, told = (each[..., group, :, :] for each in (x, h))
            count = here.shape[-3]
            cell, order, place = self.cells[count - 1].to(x.device), *self.middles[count - 1]
            order, place = order.to(x.device), place.to(x.device)
            pool = cell == torch.arange(count * self.tokens, device=x.device)[order.flatten(), None]
            mean = pool.to(x.dtype) / pool.sum(-1, keepdim=True)  # [n k, P]
            found = mean @ here.mean(-3) + self.change(mean.to(told.dtype) @ told.mean(-3))
            vectors.append(found.unflatten(-2, (count, -1)))
            places.append(place)
            mine = order.flatten().argsort()[cell]  # of the group's outputs, `[P]`
            ago = self.tokens * torch.arange(count, device=x.device)[:, None]
            owners.append(mine - ago)
        lead = (*x.shape[:-3], -1, -1, -1)
        place, owner = (torch.cat(each).expand(lead[:-1]) for each in (places, owners))
        return Compressed(torch.cat(vectors, -3), place, owner)


def _middles(cell: Tensor, grid: tuple[int, int], tokens: int) -> tuple[Tensor, Tensor]:
    """Cells of each frame of a group `[n, k]` and the patch in the middle of each, ascending."""
    at = torch.stack([torch.arange(len(cell)) // grid[1], torch.arange(len(cell)) % grid[1]], -1)
    middles = []
    for number in range(int(cell.max()) + 1):
        mine = (cell == number).nonzero()[:, 0]
        here = at[mine].double()
        middles.append(mine[(here - here.mean(0)).norm(dim=-1).argmin()])
    place, order = torch.stack(middles).view(-1, tokens).sort(-1)
    return order + tokens * torch.arange(len(order))[:, None], place


@register("storm", kind="compressor", paper="2503.04130", needs=("x", "grid"), temporal=True)
def storm(tokens: Tokens, budget: int, *, path: str = "") -> Reduction:
    """Pool each frame to a few vectors after trained Mamba layers carried time, both ways.

    Args:
        tokens: `x` `[N, D]` with its `grid`.
        budget: Tokens to keep of all frames; in a spec it counts those of one frame.
        path: File of the weights; "" is the one beside the model's checkpoint.
    """
    return learned(tokens, budget, path, "storm")
