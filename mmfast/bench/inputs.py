"""What each family wants to be called with: token layout, pixels, encoder outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmfast.bench.presets import Preset
from mmfast.bench.synthetic import video_features
from mmfast.core.errors import MmfastError

_BEFORE, _AFTER = 14, 18  # a system line and a short question: 32 text tokens
_STAMP = 7  # Qwen3-VL writes "<12.5 seconds>" before every frame


def video_grid(preset: Preset, frames: int) -> tuple[int, int, int]:
    """(frames, rows, columns) of the tokens the language model gets.

    Raises:
        MmfastError: The family takes pairs of frames, or `frames` is below 1.
    """
    rows, columns = preset.grid
    if frames < 1:
        raise MmfastError(f"--frames {frames} is no clip; give at least 1")
    if preset.family == "llava_onevision":
        return frames, (rows + 1) // 2, (columns + 1) // 2  # bilinear pooling by 2
    if frames % 2:
        raise MmfastError(
            f"--frames {frames}: {preset.name} takes pairs of frames; give an even number"
        )
    return frames // 2, rows // 2, columns // 2  # two frames a step, 2 x 2 patches a token


def prompt_inputs(
    preset: Preset, config: Any, grid: tuple[int, int, int], seed: int
) -> dict[str, Tensor]:
    """`input_ids` [1, L] with the placeholders in place, and what M-RoPE asks for."""
    gen = torch.Generator().manual_seed(seed)
    top = min(config.video_token_id, config.image_token_id)

    def text(n: int) -> list[int]:
        return torch.randint(top - 10, (n,), generator=gen).tolist()

    video, per_frame = config.video_token_id, grid[1] * grid[2]
    if preset.family == "llava_onevision":
        ids = [*text(_BEFORE), *[video] * (grid[0] * per_frame + 1), *text(_AFTER)]  # + newline
        return {"input_ids": torch.tensor([ids])}
    start, end = config.vision_start_token_id, config.vision_end_token_id
    if preset.family == "qwen2_5_vl":
        ids = [*text(_BEFORE), start, *[video] * (grid[0] * per_frame), end, *text(_AFTER)]
    else:
        ids = text(_BEFORE)
        for _ in range(grid[0]):
            ids += [*text(_STAMP), start, *[video] * per_frame, end]
        ids += text(_AFTER)
    input_ids = torch.tensor([ids])
    return {
        "input_ids": input_ids,
        "mm_token_type_ids": torch.where(input_ids == video, 2, 0),
        "video_grid_thw": _grid_thw(preset, grid[0]),
    }


def _grid_thw(preset: Preset, steps: int) -> Tensor:
    return torch.tensor([[steps, *preset.grid]])


def pixel_inputs(preset: Preset, frames: int, seed: int) -> dict[str, Tensor]:
    """What the tower takes: frames `[1, T, 3, H, W]`, or flattened patches `[P, C * 2 * p * p]`."""
    rows, columns = preset.grid
    size = int(preset.vision["patch_size"])
    if preset.family != "llava_onevision":
        x = video_features((frames // 2, rows, columns), 3 * 2 * size * size, seed)
        return {"pixel_values_videos": x, "video_grid_thw": _grid_thw(preset, frames // 2)}
    side = int(preset.vision["image_size"])
    patches = video_features((frames, rows, columns), 3 * size * size, seed)
    x = patches.reshape(frames, rows, columns, 3, size, size).permute(0, 3, 1, 4, 2, 5)
    x = x.reshape(frames, 3, rows * size, columns * size)
    # 384 is 27.4 patches of 14: the tower's convolution never looks at the rest.
    x = torch.nn.functional.pad(x, (0, side - columns * size, 0, side - rows * size))
    return {"pixel_values_videos": x[None]}


def video_output(preset: Preset, model: Any, visual: Tensor, deepstack: list[Tensor]) -> Any:
    """The encoder's output object with features `[N, D]` in the container the family uses."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    if preset.family == "llava_onevision":
        newline = model.model.image_newline[None]
        return BaseModelOutputWithPooling(pooler_output=torch.cat([visual, newline])[None])
    if preset.family == "qwen2_5_vl":
        return BaseModelOutputWithPooling(pooler_output=(visual,))
    from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

    return BaseModelOutputWithDeepstackFeatures(
        pooler_output=(visual,), deepstack_features=[(plane,) for plane in deepstack]
    )
