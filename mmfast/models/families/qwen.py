"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, the thinkers of Qwen-Omni, and EXAONE 4.5.

A call brings its grids, the patches of a merge unit become one token, and positions have three axes
(M-RoPE). Papers: arXiv 2409.12191 (Qwen2-VL), 2502.13923 (2.5), 2511.21631 (3), 2503.20215 (Omni).
"""

from __future__ import annotations

from typing import Any

from einops import reduce
from torch import Tensor
from transformers.vision_utils import get_vision_window_index

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.sound import packed_tower


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One raster per image or video, `grid_thw` over the merge size; no separators."""
    merge = base.config.vision_config.spatial_merge_size
    grids = [(t, h // merge, w // merge) for t, h, w in call[f"{kind}_grid_thw"].tolist()]
    return [Layout(t * h * w, (t, h, w)) for t, h, w in grids]


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Mean over the patches of a merge unit: `[P, C]` to one `[N, C]` per image or video."""
    lengths = [each.length for each in layout(base, kind, call)]
    return list(_units(base, values).split(lengths))


def fold_windows(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """As `fold`, for a tower that works in window order: its units are put in raster order."""
    vision = base.config.vision_config
    window, _ = get_vision_window_index(
        call[f"{kind}_grid_thw"], vision.spatial_merge_size, vision.window_size, vision.patch_size
    )
    raster = _units(base, values)[window.argsort().to(values.device)]
    return list(raster.split([each.length for each in layout(base, kind, call)]))


def _units(base: Any, values: Tensor) -> Tensor:
    """`[P, C]` to `[P / merge^2, C]`; the patches of a unit are neighbours in the tower."""
    size = base.config.vision_config.spatial_merge_size**2
    return reduce(values, "(unit patch) c -> unit c", "mean", patch=size)


def recover(base: Any, kind: str, embeds: Tensor, positions: Tensor | None) -> Layout | None:
    """Layout from the positions `[3, length]`: rows and columns count up inside a frame."""
    if positions is None:
        return None
    first = positions[:, positions[0] == positions[0, 0]]
    _, rows, columns = (first.amax(1) - first.amin(1) + 1).tolist()
    length = positions.shape[1]
    frames = length // (rows * columns)
    return Layout(length, (frames, rows, columns) if frames * rows * columns == length else None)


def omni_layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """As `layout`; a line of tokens per sound.

    With `use_audio_in_video` the tokens of a clip and of its sound alternate in the prompt; they
    are two items all the same.
    """
    if kind != "audio":
        return layout(base, kind, call)
    return [Layout(n // 2, (n // 2, 1, 1)) for n in _sound_frames(base, call)]


def omni_fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """As `fold_windows`; a token of sound is the mean of a pair of frames."""
    if kind != "audio":
        return fold_windows(base, kind, values, call)
    sounds = values.split(_sound_frames(base, call))
    pairs = (each[: len(each) // 2 * 2] for each in sounds)
    return [reduce(each, "(token pair) c -> token c", "mean", pair=2) for each in pairs]


def omni_moe_layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """As `layout`; a line of tokens per sound, each of which is one row of the encoder."""
    if kind != "audio":
        return layout(base, kind, call)
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
        _get_feat_extract_output_lengths,
    )

    lengths = call["feature_attention_mask"].sum(-1)
    counts = _get_feat_extract_output_lengths(lengths, base.audio_tower.n_window).tolist()
    return [Layout(n, (n, 1, 1)) for n in counts]


def omni_moe_fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """As `fold`; sounds are tokens in the encoder already."""
    if kind != "audio":
        return fold(base, kind, values, call)
    return list(values.split([each.length for each in omni_moe_layout(base, kind, call)]))


def _sound_frames(base: Any, call: Call) -> list[int]:
    """Frames of each sound behind the convolution: 100 mel frames a second, halved."""
    lengths = call["feature_attention_mask"].sum(-1)
    frames: list[int] = base.audio_tower._get_feat_extract_output_lengths(lengths)[0].tolist()
    return frames


add_adapter(Adapter("qwen2_vl", layout, fold, recover, mrope=True))
add_adapter(Adapter("qwen2_5_vl", layout, fold_windows, recover, mrope=True))
add_adapter(Adapter("exaone4_5", layout, fold_windows, counts=True))  # along one axis
# The frames of a video are one item: its placeholders follow each other with timestamps in between.
for _family in ("qwen3_vl", "qwen3_vl_moe"):
    add_adapter(Adapter(_family, layout, fold, recover, deepstack=True, mrope=True))
# Their decoders have linear attention, too, and no DeepStack.
for _family in ("qwen3_5", "qwen3_5_moe"):
    add_adapter(Adapter(_family, layout, fold, recover, mrope=True))
add_adapter(
    Adapter(
        "qwen2_5_omni_thinker",
        omni_layout,
        omni_fold,
        recover,
        audio_tower=packed_tower,
        media=("image", "video", "audio"),
        mrope=True,
    )
)
add_adapter(
    Adapter(
        "qwen3_omni_moe_thinker",
        omni_moe_layout,
        omni_moe_fold,
        recover,
        audio_tower=packed_tower,
        media=("image", "video", "audio"),
        deepstack=True,
        mrope=True,
    )
)
