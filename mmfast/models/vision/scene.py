"""Merge tokens inside the attention of VGGT that reads all frames of a scene (site `vit`).

VGGT (Wang et al., arXiv 2503.11651) alternates blocks that attend within a frame with blocks that
attend to all of them, whose cost grows with the square of the patches. As in LiteVGGT (Shu et al.,
arXiv 2512.04939) queries, keys and values of the latter are merged behind their rotation, and what
attention says of a merged token is copied to each of its patches; all else has its full length.
Camera and register tokens stay as they are. One plan may serve several blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import ModelError, SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.spec import Spec, run
from mmfast.core.tokens import Tokens
from mmfast.core.trace import Trace, settled
from mmfast.models.families.adapter import Adapter
from mmfast.models.families.tower import Tower, attention_of
from mmfast.models.patching import override
from mmfast.models.reduction.probe import AttentionCalls
from mmfast.models.wrappers import base_of
from mmfast.ops.similarity import unit_rows
from mmfast.reducers.merging.litevggt import geometry

_GREY = (0.299, 0.587, 0.114)
_AT_ONCE = 16  # frames whose geometry is computed together, in float64


@contextmanager
def scene_stage(model: Any, adapter: Adapter, spec: Spec, trace: Trace) -> Iterator[None]:
    """Merge the patches of each scene `[S, 3, H, W]` in the blocks that attend to all frames.

    A share or number is of all patches of a scene. Every scene adds a row `vit` to the trace and
    the Reduction of its last plan, over the patches in order of frames, rows and columns.
    """
    stage = _SceneStage(adapter.tower(base_of(model)), spec, trace)
    tower = stage.tower
    with ExitStack() as stack:
        stack.enter_context(override(tower.base, "forward", stage.encode))
        stack.callback(tower.base.patch_embed.register_forward_hook(stage.see).remove)
        for index, block in enumerate(tower.blocks):
            around = partial(stage.attend, index)
            stack.enter_context(override(attention_of(block), "forward", around))
        yield


@dataclass
class _Scene:
    """One pass: raster of the patches of a scene, their geometry, and the plan in force."""

    grid: tuple[int, int, int]
    images: Tensor  # [B, S, 3, H, W]
    geometry: Tensor | None = None  # [B, N]
    found: Reduction | None = None  # patches onto merged ones
    plan: Reduction | None = None  # the same, with the tokens in front of each frame


class _SceneStage:
    """Functions around those of the model; the current pass is kept per thread."""

    def __init__(self, tower: Tower, spec: Spec, trace: Trace) -> None:
        self.tower = tower
        self._trace = trace
        self._reuse = int(spec.knobs.get("reuse", 1))
        self._merging = max(1, round(float(spec.knobs.get("until", 1.0)) * len(tower.blocks)))
        knobs = {name: spec.knobs[name] for name in spec.knobs if name not in ("reuse", "until")}
        self._spec = replace(spec, knobs=knobs)
        self._local = threading.local()

    def encode(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around the forward of the aggregator: begin a pass, run, report."""
        base = self.tower.base
        if base.training and torch.is_grad_enabled():
            raise ModelError(
                f"'{self._spec}' remembers plans from block to block, and VGGT computes blocks "
                "again in training; call eval()"
            )
        images = self.tower.bind("forward", args, kwargs)["images"]
        batch, frames, _, height, width = images.shape
        side = int(base.patch_size)
        work = _Scene((frames, height // side, width // side), images)
        self._local.work, start = work, settled()
        try:
            output = call(*args, **kwargs)
        finally:
            self._local.work = None
        assert work.found is not None
        ms = (settled() - start) * 1e3 / batch
        for item in range(batch):
            found = Reduction(work.found.keep[item], work.found.owner[item])
            self._trace.record("vit", item, found)
            self._trace.add("vit", found.n, found.m, ms, self._spec.method.name)
        return output

    @torch.no_grad()
    def see(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Behind the patch embedding: the geometry of pixels and patches."""
        work: _Scene | None = getattr(self._local, "work", None)
        if work is None or not self._spec.method.scene:
            return
        patches = output["x_norm_patchtokens"] if isinstance(output, dict) else output
        weight, maps = torch.tensor(_GREY, device=work.images.device), []
        pictures = work.images.detach().flatten(0, 1)  # [B * S, 3, H, W]
        for rows, seen in zip(patches.split(_AT_ONCE), pictures.split(_AT_ONCE), strict=True):
            grey = torch.einsum("fchw,c->fhw", seen.float(), weight)
            maps.append(geometry(unit_rows(rows).flatten(0, 1), (len(rows), *work.grid[1:]), grey))
        work.geometry = torch.cat(maps).view(len(work.images), -1)

    def attend(
        self, index: int, call: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Around the attention of a block, whose input is normed: `[B, S * P, C]`."""
        work: _Scene | None = getattr(self._local, "work", None)
        if work is None or index >= self._merging:
            return call(x, *args, **kwargs)
        if index % self._reuse == 0:
            self._plan(work, x.detach())
        assert work.plan is not None
        with AttentionCalls(partial(_on_merged, work.plan)):
            return call(x, *args, **kwargs)

    @torch.no_grad()
    def _plan(self, work: _Scene, x: Tensor) -> None:
        front = int(self.tower.base.patch_start_idx)
        rows = x.unflatten(1, (work.grid[0], -1))[:, :, front:].flatten(1, 2)  # [B, N, C]
        signals = {} if work.geometry is None else {"geometry": work.geometry}
        found = run(self._spec, Tokens(rows, grid=work.grid, signals=signals))
        if isinstance(found, list) or found.mix is not None or (found.pure and found.m < found.n):
            raise SpecError(
                f"{self._spec.method.name!r} cannot run at site 'vit': it drops tokens, and VGGT "
                "needs every patch; use a method that merges, such as 'litevggt@vit:0.4'"
            )
        work.found, work.plan = found, _with_front(found, work.grid, front)


def _with_front(found: Reduction, grid: tuple[int, int, int], front: int) -> Reduction:
    """A Reduction of patches `[B, N]`, with `front` tokens before each frame that never merge."""
    frames, each = grid[0], grid[1] * grid[2]
    place = torch.arange(frames * (front + each), device=found.keep.device).view(frames, -1)
    special, patch = place[:, :front].flatten(), place[:, front:].flatten()
    target = place.flatten().expand(len(found.keep), -1).clone()
    target[:, patch] = patch[found.keep.gather(-1, found.owner)]
    keep = torch.cat([special.expand(len(target), -1), patch[found.keep]], -1)
    return Reduction.merge(keep, target)


def _on_merged(
    plan: Reduction, sdpa: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **given: Any
) -> Tensor:
    """Answer a call of sdpa `[B, H, n, d]` on merged tokens, for all that they stand for."""
    if given.get("attn_mask") is not None:
        raise ModelError("merging in the attention of VGGT takes no attn_mask; leave it out")
    merged = [_by_head(plan.apply(_by_token(each)), q.shape[1]) for each in (q, k, v)]
    return _by_head(plan.expand(_by_token(sdpa(*merged, **given))), q.shape[1])


def _by_token(rows: Tensor) -> Tensor:
    return rows.transpose(1, 2).flatten(2)  # [B, H, n, d] to [B, n, H * d]


def _by_head(rows: Tensor, heads: int) -> Tensor:
    out: Tensor = rows.unflatten(2, (heads, -1)).transpose(1, 2)
    return out


def check_scene(specs: Sequence[Spec], tower: Tower, encoder: str | None) -> None:
    """Refuse what cannot act in blocks that attend to all frames, or needs such blocks."""
    name = type(tower.module).__name__
    if tower.scene and encoder is not None:
        raise ModelError(f"encoder={encoder!r} is not known to work in {name}; leave it out")
    fused = (getattr(attention_of(block), "fused_attn", False) for block in tower.blocks)
    if tower.scene and specs and not all(fused):
        raise ModelError(
            f"'{specs[0]}' merges around fused attention, and blocks of this {name} have another; "
            "build them with fused_attn=True"
        )
    for spec in specs:
        if spec.method.scene and not tower.scene:
            raise SpecError(
                f"'{spec}' merges where all frames of a scene attend to each other, as in VGGT, "
                f"which {name} does not; use 'tome@vit:0.5', or site 'pre' before a language model"
            )
