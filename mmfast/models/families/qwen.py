"""What the Qwen vision families share: grids in the call, merge units, 3-D positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmfast.models.families.adapter import Call, Layout


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One raster per image or video, `grid_thw` over the merge size; no separators."""
    merge = base.config.vision_config.spatial_merge_size
    grids = [(t, h // merge, w // merge) for t, h, w in call[f"{kind}_grid_thw"].tolist()]
    return [Layout(t * h * w, (t, h, w)) for t, h, w in grids]


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Mean over the patches of a merge unit: `[P, C]` to one `[N, C]` per image or video."""
    lengths = [each.length for each in layout(base, kind, call)]
    return list(units(base, values).split(lengths))


def units(base: Any, values: Tensor) -> Tensor:
    """`[P, C]` to `[P / merge^2, C]`; the patches of a unit are neighbours in the tower."""
    size = base.config.vision_config.spatial_merge_size**2
    return values.reshape(-1, size, values.shape[-1]).mean(1)


def recover(base: Any, kind: str, embeds: Tensor, positions: Tensor | None) -> Layout | None:
    """Layout from the positions `[3, length]`: rows and columns count up inside a frame."""
    if positions is None:
        return None
    first = positions[:, positions[0] == positions[0, 0]]
    _, rows, columns = (first.amax(1) - first.amin(1) + 1).tolist()
    length = positions.shape[1]
    frames = length // (rows * columns)
    return Layout(length, (frames, rows, columns) if frames * rows * columns == length else None)
