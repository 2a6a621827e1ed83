"""VideoLLaMA3, PaddleOCR-VL, HunYuan-VL and ERNIE 4.5 VL: grids as in Qwen, and other towers.

Papers: arXiv 2501.13106 (VideoLLaMA3), 2510.14528 (PaddleOCR-VL), 2511.19575 (HunyuanOCR).
"""

from __future__ import annotations

from typing import Any

from einops import reduce
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.prompt_ids import ids_of
from mmfast.models.families.qwen import fold, layout, recover
from mmfast.models.families.tower import Tower


def merged_layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One raster per image or clip; the call tells how many patches of each make a token.

    ModelError where the processor has dropped tokens of a clip itself.
    """
    merges = call[f"{kind}_merge_sizes"].tolist()
    grids = call[f"{kind}_grid_thw"].tolist()
    found = [(t, h // m, w // m) for (t, h, w), m in zip(grids, merges, strict=True)]
    ids, total = ids_of(call), sum(t * h * w for t, h, w in found)
    stand = total if ids is None else int((ids == getattr(base.config, f"{kind}_token_id")).sum())
    if kind == "video" and 0 < stand < total:
        raise ModelError(
            f"the processor left {stand} of {total} tokens of the clips (video_compression_mask); "
            "give it use_token_compression=False, and drop tokens by reduce="
        )
    return [Layout(t * h * w, (t, h, w)) for t, h, w in found]


def merged_fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """The stock pooling of patches `[P, C]` to one `[N, C]` per image or clip."""
    grid, merges = call[f"{kind}_grid_thw"], call[f"{kind}_merge_sizes"]
    tokens = base.vision_model.pixel_unshuffle(values, grid, merges)
    return list(tokens.split((grid.prod(-1) // merges**2).tolist()))


def raster_fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Mean over the patches of a token, `[P, C]` to one `[N, C]` per image, from raster order."""
    merge = base.config.vision_config.spatial_merge_size
    grids = call[f"{kind}_grid_thw"].tolist()
    parts = values.split([t * h * w for t, h, w in grids])
    cells = "(t h a w b) c -> (t h w) c"
    return [
        reduce(part, cells, "mean", t=t, h=h // merge, a=merge, b=merge)
        for part, (t, h, _) in zip(parts, grids, strict=True)
    ]


def lined_layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """A mark in front of an image and behind it, and a newline behind each of its rows."""
    found = []
    for each in layout(base, kind, call):
        assert each.grid is not None
        _, rows, columns = each.grid
        ends = [(row + 1) * (columns + 1) for row in range(rows)]
        found.append(Layout(ends[-1] + 2, each.grid, (0, *ends, ends[-1] + 1)))
    return found


def paired_layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """As in Qwen; of a clip every two frames become one."""
    if kind != "video":
        return layout(base, kind, call)
    return [Layout(t * h * w, (t, h, w)) for t, h, w in _paired(base, call)]


def paired_fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Mean over the patches of a merge unit, and over the frames of a pair."""
    units = fold(base, kind, values, call)
    if kind != "video":
        return units
    return [
        reduce(part, "(t pair n) c -> (t n) c", "mean", t=t, n=h * w)
        for part, (t, h, w) in zip(units, _paired(base, call), strict=True)
    ]


def _paired(base: Any, call: Call) -> list[tuple[int, int, int]]:
    """Raster of each clip."""
    config = base.config.vision_config
    merge, step = config.spatial_merge_size, config.temporal_merge_size
    return [(t // step, h // merge, w // merge) for t, h, w in call["video_grid_thw"].tolist()]


def merged_tower(base: Any) -> Tower:
    """All patches in one sequence."""
    return Tower(base, base.vision_model, base.vision_model.encoder.layers, True, False)


def lined_tower(base: Any) -> Tower:
    """All patches in one sequence, in raster order."""
    return Tower(base, base.vision_tower, base.vision_tower.layers, True, False)


def paired_tower(base: Any) -> Tower:
    """All patches in one sequence, those of a merge unit side by side."""
    return Tower(base, base.vision_tower, base.vision_tower.blocks, True, False)


def paddle_tower(base: Any) -> Tower:
    """All patches in one sequence, in raster order."""
    tower = base.visual.vision_model
    return Tower(base, tower, tower.encoder.layers, True, False)


add_adapter(Adapter("video_llama_3", merged_layout, merged_fold, tower=merged_tower, inner=False))
add_adapter(
    Adapter(
        "paddleocr_vl",
        layout,
        raster_fold,
        recover,
        tower=paddle_tower,
        media=("image",),
        inner=False,
        mrope=True,
    )
)
add_adapter(
    Adapter(
        "hunyuan_vl",
        lined_layout,
        raster_fold,
        tower=lined_tower,
        media=("image",),
        inner=False,
        mrope=True,
    )
)
# Its experts are those of text or of media, by the types of tokens (see models/reduction/step.py).
add_adapter(
    Adapter(
        "ernie4_5_vl_moe",
        paired_layout,
        paired_fold,
        recover,
        tower=paired_tower,
        inner=False,
        mrope=True,
    )
)
