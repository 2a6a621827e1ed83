"""Helpers that several tests share: attach turns."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import Tiny


def second_turn(this: Tiny, first: dict[str, Any], sequence: torch.Tensor, seed: int) -> Any:
    """Inputs of the whole conversation with a second video, and of the new part alone."""
    part = this.inputs([" then {video} and?"], videos=this.videos(1, seed))
    whole: dict[str, Any] = {"input_ids": torch.cat([sequence, part["input_ids"]], 1)}
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    for name in ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"):
        if name in part:
            whole[name] = torch.cat([first[name], part[name]])
    if "mm_token_type_ids" in part:
        old = first["mm_token_type_ids"]
        answer = torch.zeros(1, sequence.shape[1] - old.shape[1], dtype=old.dtype)
        whole["mm_token_type_ids"] = torch.cat([old, answer, part["mm_token_type_ids"]], 1)
    return whole, part
