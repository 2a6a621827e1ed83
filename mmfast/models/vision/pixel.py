"""Drop patches before the vision tower (site `pixel`), so that repeated ones never enter it.

Towers that pack the patches of all items into one sequence (Qwen) take their positions, segment
and window bounds from outside, so the stock tower runs on the patches that are left. Positions
are those of the whole image. Afterwards dropped tokens get zeros, for the stock code to see the
shapes it expects; `ForwardStep` removes them before decoder layer 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.spec import Spec
from mmfast.core.tokens import Tokens
from mmfast.models.families.adapter import Adapter
from mmfast.models.families.tower import Tower
from mmfast.models.patching import override
from mmfast.models.reduction.record import CHAINS
from mmfast.models.reduction.site import Chain, Site, run_site
from mmfast.models.reduction.tower_signals import KEPT
from mmfast.models.wrappers import base_of


@contextmanager
def pixel_stage(model: Any, adapter: Adapter, specs: Sequence[Spec]) -> Iterator[None]:
    """Drop patches of whole merge units whenever the model encodes images or videos.

    While encoding, a missing signal is a ModelError, a stage that merges or a wrong budget a
    SpecError.
    """
    tower = adapter.tower(base_of(model))
    stage = _PixelStage(tower, Site(0, tuple(specs)))
    tower.module.__dict__[KEPT] = stage.kept
    try:
        with override(tower.module, "forward", stage.around):
            yield
    finally:
        tower.module.__dict__.pop(KEPT, None)


class _PixelStage:
    """Overrides the tower's forward; the current pass is kept per thread."""

    def __init__(self, tower: Tower, site: Site) -> None:
        self._module = tower.module
        self._site = site
        self._local = threading.local()

    def kept(self) -> Reduction | None:
        """The patches in the current pass, among all in the tower's order; None where all are."""
        found: Reduction | None = getattr(self._local, "kept", None)
        return found

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
            kwargs, order = part_of(self._module, grid_thw, mask, kwargs)
            self._local.kept = Reduction.prune(order, len(hidden_states))
            try:
                rows = hidden_states[mask.repeat_interleave(len(hidden_states) // sum(sizes))]
                output = call(rows, grid_thw, **kwargs)
            finally:
                self._local.kept = None
            _fill_up(output, mask)
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
            chain = run_site(self._site, Tokens(x, grid=grid, signals={"pixels": x}), {})
            if not chain.pure:
                raise SpecError(
                    f"'{self._site.specs[0]}' merges patches before the vision tower, which can "
                    "only drop them; use a method that prunes, such as 'pixelprune'"
                )
            chains.append(chain)
        return chains


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
    tables = {"position_ids": get_vision_position_ids(grid, merge, kwargs=kwargs)[patches]}
    tables["cu_seqlens"] = _bounds(get_vision_cu_seqlens(grid, kwargs=kwargs), patches)
    order = patches
    if hasattr(module, "window_size"):
        window, ends = get_vision_window_index(
            grid, merge, module.window_size, module.patch_size, kwargs=kwargs
        )
        window = window.to(mask.device)
        inside = mask[window]
        order = inside.repeat_interleave(merge**2)
        number = mask.cumsum(0) - 1
        tables["window_index"] = number[window[inside]]
        tables["cu_window_seqlens"] = _bounds(ends, order)
    if hasattr(module, "num_grid_per_side"):
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=module.num_grid_per_side,
            mode=module.interpolation_mode,
            align_corners=module.interpolation_align_corners,
            spatial_merge_size=merge,
            kwargs=kwargs,
        )
        tables |= {"interp_indices": indices[patches], "interp_weights": weights[patches]}
    for name in ("max_seqlen", "max_window_seqlen"):  # counted again where they are needed
        kwargs.pop(name, None)
    return {**kwargs, **tables}, order.nonzero()[:, 0]


def _bounds(ends: Tensor, present: Tensor) -> Tensor:
    """Segment bounds `[S + 1]` among the patches that are present; empty segments go."""
    total = F.pad(present.cumsum(0), (1, 0))
    new: Tensor = total[ends.to(total.device).long()]
    distinct: Tensor = torch.unique_consecutive(new)
    return distinct.to(ends.dtype)


def _fill_up(output: Any, mask: Tensor) -> None:
    """Features and DeepStack planes `[K, D]` back to `[U, D]`, zeros where units were dropped."""

    def full(rows: Tensor) -> Tensor:
        filled = rows.new_zeros(len(mask), rows.shape[-1])
        filled[mask.to(rows.device)] = rows
        return filled

    output.pooler_output = full(output.pooler_output)
    if getattr(output, "deepstack_features", None) is not None:
        output.deepstack_features = [full(plane) for plane in output.deepstack_features]
