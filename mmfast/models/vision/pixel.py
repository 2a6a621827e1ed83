"""Drop patches before the vision tower (site `pixel`), or resize the pictures it gets.

Towers that pack the patches of all items into one sequence (Qwen) take their positions, segment
and window bounds from outside, so the stock tower runs on the patches that are left. Positions
are those of the whole image. Afterwards dropped tokens get zeros, for the stock code to see the
shapes it expects; `ForwardStep` removes them before decoder layer 0.

A method that resizes gives the tower the smaller picture. Its tokens take the places in the prompt
of those they stand for, and the positions that a prompt with the smaller picture would have.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as tvF
from transformers import image_utils
from transformers.vision_utils import get_vision_window_index

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.spec import Spec
from mmfast.core.tokens import Tokens
from mmfast.models.families.adapter import Adapter, placeholder
from mmfast.models.families.tower import Tower, grid_tables
from mmfast.models.patching import override
from mmfast.models.reduction.record import CHAINS
from mmfast.models.reduction.site import Chain, Site, run_site
from mmfast.models.reduction.tower_signals import KEPT
from mmfast.models.wrappers import base_of


@contextmanager
def pixel_stage(model: Any, adapter: Adapter, specs: Sequence[Spec]) -> Iterator[None]:
    """Drop or resize by whole merge units whenever the model encodes images or videos.

    While encoding, a missing signal is a ModelError, a stage that merges or a wrong budget a
    SpecError.
    """
    tower = adapter.tower(base_of(model))
    stage = _PixelStage(tower, Site(0, tuple(specs)))
    tower.module.__dict__[KEPT] = stage.kept
    with ExitStack() as stack:
        stack.callback(tower.module.__dict__.pop, KEPT, None)
        stack.enter_context(override(tower.module, "forward", stage.around))
        owners = {id(part): part for part in (tower.base, model)} if stage.resizes else {}
        for part in owners.values():
            if hasattr(part, "get_rope_index"):  # of both, where `generate` calls its own
                stack.enter_context(override(part, "get_rope_index", stage.positions))
        yield


class _PixelStage:
    """Overrides the tower's forward; the current pass is kept per thread."""

    def __init__(self, tower: Tower, site: Site) -> None:
        self._base, self._module = tower.base, tower.module
        self._site = site
        self.resizes = site.specs[0].method.resizes
        self._local = threading.local()
        self._known: dict[tuple[int, int, int], Chain] = {}  # of methods that resize

    def kept(self) -> Reduction | None:
        """The patches in the current pass, among all in the tower's order; None where all are."""
        return getattr(self._local, "kept", None)

    def around(
        self, call: Callable[..., Any], hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any
    ) -> Any:
        """Around the tower's forward: choose, run it on what is left, fill up with zeros."""
        chains = self._choose(hidden_states, grid_thw)
        sizes = [chain.reductions[0].n for chain in chains]
        mask = torch.cat([_mask(chain) for chain in chains])  # [U]
        if bool(mask.all()):
            output = call(hidden_states, grid_thw, **kwargs)
        else:
            source = mask.cumsum(0).sub(1).masked_fill(~mask, -1)
            if self.resizes:
                small = self._small(chains, grid_thw)
                starts = accumulate((len(chain.keep) for chain in chains), initial=0)
                pairs = zip(chains, starts, strict=False)
                source = torch.cat([chain.reductions[0].owner + start for chain, start in pairs])
                rows = torch.cat(list(self._resized(hidden_states, grid_thw, small)))
                self._local.kept = standing(self._module, grid_thw, small, mask)
                kwargs = {k: v for k, v in kwargs.items() if k not in _TABLES}
            else:
                kwargs, order = part_of(self._module, grid_thw, mask, kwargs)
                self._local.kept = Reduction.prune(order, len(hidden_states))
                rows = hidden_states[mask.repeat_interleave(len(hidden_states) // sum(sizes))]
                small = grid_thw
            try:
                output = call(rows, small, **kwargs)
            finally:
                self._local.kept = None
            _fill_up(output, Reduction(mask.nonzero()[:, 0], source))
        output.__dict__[CHAINS] = chains
        return output

    @torch.no_grad()
    def _choose(self, pixels: Tensor, grid_thw: Tensor) -> list[Chain]:
        """The reductions of each item, from the pixels `[P, C]` of its merge units."""
        merge = self._module.spatial_merge_size
        chains, start = [], 0
        for t, h, w in grid_thw.tolist():
            mine = pixels[start : start + t * h * w]
            start += t * h * w
            x = mine.reshape(t * h * w // merge**2, -1)  # [N, merge^2 * C]
            grid = (t, h // merge, w // merge)
            if grid in self._known:
                chains.append(self._known[grid])
                continue
            chain = run_site(self._site, Tokens(x, grid=grid, signals={"pixels": x}), {})
            if self.resizes:  # by the size of a picture alone
                chain = self._known[grid] = _stand_ins(chain, grid, self._site.specs[0])
            if not chain.pure:
                raise SpecError(
                    f"'{self._site.specs[0]}' merges patches before the vision tower, which can "
                    "only drop them; use a method that prunes, such as 'pixelprune'"
                )
            chains.append(chain)
        return chains

    def positions(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around `get_rope_index`: the positions of a prompt with the smaller pictures."""
        call = inspect.signature(stock).bind(*args, **kwargs)
        given, ids = call.arguments, call.arguments["input_ids"]  # [B, L]
        gone = torch.zeros_like(ids, dtype=torch.bool)
        for kind in ("image", "video"):
            grid = given.get(f"{kind}_grid_thw")
            if grid is not None:
                count = int(grid.prod(-1).sum())
                chains = self._choose(torch.empty(count, 1, device=ids.device), grid)
                given[f"{kind}_grid_thw"] = self._small(chains, grid)
                mask = torch.cat([_mask(chain) for chain in chains])
                gone[ids == placeholder(self._base.config, kind)] = ~mask.to(ids.device)
        if not bool(gone.any()):
            return stock(*args, **kwargs)
        seen = given.get("attention_mask")
        seen = torch.ones_like(ids) if seen is None else seen
        given["attention_mask"] = seen.masked_fill(gone, 0)
        positions, deltas = stock(*call.args, **call.kwargs)
        return positions, deltas - gone.sum(1, keepdim=True)  # caches count what is gone, too

    def _small(self, chains: Sequence[Chain], grid_thw: Tensor) -> Tensor:
        """Patches of the smaller pictures, `[items, 3]`."""
        merge = self._module.spatial_merge_size
        rasters = [chain.raster or (1, 1, 1) for chain in chains]  # `_stand_ins` tells it
        sides = [(t, h * merge, w * merge) for t, h, w in rasters]
        return torch.tensor(sides, dtype=grid_thw.dtype, device=grid_thw.device)

    def _resized(self, patches: Tensor, grid_thw: Tensor, small: Tensor) -> Iterator[Tensor]:
        """Patches of each picture at its smaller size, laid out as the processor does."""
        merge, side = self._module.spatial_merge_size, self._module.config.patch_size
        layout = "(t h w a b) (c f y x) -> (t f) c (h a y) (w b x)"
        sizes = {"a": merge, "b": merge, "y": side, "x": side}
        sizes["f"] = self._module.config.temporal_patch_size
        parts = patches.split(grid_thw.prod(-1).tolist())
        for part, (t, h, w), (_, rows, columns) in zip(
            parts, grid_thw.tolist(), small.tolist(), strict=True
        ):
            if (h, w) != (rows, columns):
                frames = rearrange(part, layout, t=t, h=h // merge, w=w // merge, **sizes)
                frames = resized(frames, (rows * side, columns * side))
                back = " -> ".join(reversed(layout.split(" -> ")))
                part = rearrange(frames, back, h=rows // merge, w=columns // merge, **sizes)
            yield part


def _stand_ins(chain: Chain, grid: tuple[int, int, int], spec: Spec) -> Chain:
    """The places that the smaller picture's tokens take, which the tower fills."""
    (found,) = chain.reductions
    t, h, w = grid
    frame, row, column = (
        len(place.unique())
        for place in (found.keep // (h * w), found.keep // w % h, found.keep % w)
    )
    if frame < t:
        raise SpecError(
            f"'{spec}' leaves less than one token to each of {t} frames; give a larger budget, or "
            "fewer frames"
        )
    pure = replace(found, weight=None, mix=None, pure=True)
    return Chain((pure,), chain.ms, (frame, row, column))


def standing(module: Any, grid: Tensor, small: Tensor, mask: Tensor) -> Reduction:
    """Patches of the whole pictures that each of the smaller ones stands for, in tower order."""
    merge = module.spatial_merge_size**2
    places = torch.full_like(mask, -1, dtype=torch.int64)
    order = _tower_order(module, small).argsort()  # where the tower works on each smaller unit
    places[mask] = order.to(mask.device)
    slots = places[_tower_order(module, grid).to(mask.device)]  # [U]
    inside = torch.arange(merge, device=mask.device)
    owner = torch.where(slots[:, None] < 0, -1, slots[:, None] * merge + inside).flatten()
    return Reduction((owner >= 0).nonzero()[:, 0], owner)


def _tower_order(module: Any, grid: Tensor) -> Tensor:
    if not hasattr(module, "window_size"):
        return torch.arange(int(grid.prod(-1).sum()) // module.spatial_merge_size**2)
    sizes = (module.spatial_merge_size, module.window_size, module.patch_size)
    order: Tensor = get_vision_window_index(grid, *sizes)[0].cpu()
    return order


# Means and deviations by which processors normalise pictures of 8 bits.
_NORMS = [
    (getattr(image_utils, f"{name}_MEAN"), getattr(image_utils, f"{name}_STD"))
    for name in ("OPENAI_CLIP", "IMAGENET_STANDARD", "IMAGENET_DEFAULT")
]
# What the tower would take of the whole picture instead of computing it.
_TABLES = {"position_ids", "cu_seqlens", "max_seqlen", "window_index", "cu_window_seqlens"}
_TABLES |= {"max_window_seqlen", "interp_indices", "interp_weights"}


def resized(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Normalised pictures `[F, C, H, W]` at another size, by antialiased bicubic interpolation.

    Processors resize pictures of 8 bits and normalise them then. Where the numbers show that they
    were such pictures, these are resized, so that the result is to the bit that of a processor on
    this device (of 256 levels, those of a GPU and of a CPU may be one apart).
    """
    for norm in _NORMS:
        mean, std = (torch.tensor(v, device=frames.device) * 255.0 for v in norm)
        whole = _of_8_bits(frames, mean[:, None, None], std[:, None, None])
        if whole is not None:
            small = tvF.resize(whole, list(size), tvF.InterpolationMode.BICUBIC, antialias=True)
            small = tvF.normalize(small.float(), mean.tolist(), std.tolist())
            break
    else:
        small = tvF.resize(
            frames.float(), list(size), tvF.InterpolationMode.BICUBIC, antialias=True
        )
    found: Tensor = small.to(frames.dtype)
    return found


def _of_8_bits(frames: Tensor, mean: Tensor, std: Tensor) -> Tensor | None:
    """The pictures before they were normalised by these numbers; None where they were not."""
    whole = torch.empty_like(frames, dtype=torch.uint8)
    off = mean.new_zeros(())
    for picture, target in zip(frames, whole, strict=True):  # which a cache holds, one by one
        levels = (picture.float() * std).add_(mean)
        rounded = levels.round().clamp_(0, 255)
        off += levels.sub_(rounded).abs_().sum()
        target.copy_(rounded)
    close = max(1e-3, 20 * torch.finfo(frames.dtype).eps)
    return whole if float(off) < close * frames.numel() else None


def _mask(chain: Chain) -> Tensor:
    mask = torch.zeros(chain.reductions[0].n, dtype=torch.bool, device=chain.keep.device)
    mask[chain.keep] = True
    return mask


def part_of(
    module: Any, grid: Tensor, mask: Tensor, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Tensor]:
    """Arguments with which a packed tower runs on the merge units in `mask` `[U]`.

    `grid` `[items, 3]` counts patches. Also returns the places `[K]` of the patches among all, in
    the order the tower works.
    """
    merge, kwargs, grid = module.spatial_merge_size, dict(kwargs), grid.to(mask.device)
    patches = mask.repeat_interleave(merge**2)
    tables, order = grid_tables(module, grid, kwargs), patches
    tables["cu_seqlens"] = _bounds(tables["cu_seqlens"], patches)
    for name in ("position_ids", "interp_indices", "interp_weights"):
        if name in tables:
            tables[name] = tables[name][patches]
    if "window_index" in tables:
        window = tables["window_index"].to(mask.device)
        inside = mask[window]
        order = inside.repeat_interleave(merge**2)
        tables["window_index"] = (mask.cumsum(0) - 1)[window[inside]]
        tables["cu_window_seqlens"] = _bounds(tables["cu_window_seqlens"], order)
    for name in ("max_seqlen", "max_window_seqlen"):  # counted again where they are needed
        kwargs.pop(name, None)
    return {**kwargs, **tables}, order.nonzero()[:, 0]


def _bounds(ends: Tensor, present: Tensor) -> Tensor:
    """Segment bounds `[S + 1]` among the patches that are present; empty segments go."""
    total = F.pad(present.cumsum(0), (1, 0))
    new: Tensor = total[ends.to(total.device).long()]
    distinct: Tensor = torch.unique_consecutive(new)
    return distinct.to(ends.dtype)


def _fill_up(output: Any, whole: Reduction) -> None:
    """Features and DeepStack planes `[K, D]` back to `[U, D]`, zeros where units were dropped.

    Chunked prefill looks for the places of features, so those of a resized picture are repeated.
    """
    output.pooler_output = whole.expand(output.pooler_output)
    if getattr(output, "deepstack_features", None) is not None:
        output.deepstack_features = [whole.expand(plane) for plane in output.deepstack_features]
