"""Frames to features through the stock processor and the stock encoder, a few at a time.

A frame comes out as it would in a whole clip: towers look at one frame, or one temporal patch, at
a time, so the split does not matter.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.models.adapter import adapter_for
from mmfast.streams.script import Unit

Frame = NDArray[np.uint8]  # [H, W, 3]
Shot = tuple[Frame, float]  # a frame and its time in seconds


class Encoder:
    """The vision side of a model; holds no state of a stream.

    Args:
        model: A stock model of a known family.
        processor: Its processor.
        sized_for: Some processors share a budget of pixels out over all frames of a clip, and a
            stream has no end: its frames are as large as those of a clip of so many frames.
        cache: A `FrameCache` that computes only what changed, or None.
    """

    def __init__(
        self, model: Any, processor: Any, *, sized_for: int = 64, cache: Any = None
    ) -> None:
        self.base, self.adapter = model.base_model, adapter_for(model)
        self.device = model.device
        self.processor = processor.video_processor
        self.options = _shared(self.processor, model.config.model_type, sized_for)
        self.cache = cache
        self._takes = inspect.signature(self.base.get_video_features).parameters

    @torch.no_grad()
    def __call__(self, groups: Sequence[Sequence[Shot]], state: Any = None) -> list[Unit]:
        """Features of frames, or of temporal patches.

        Args:
            groups: Of each unit its frames with their times; all of one size.
            state: What the frame cache remembers of the stream; None encodes without it.

        Returns:
            A unit per group, nothing dropped.
        """
        clips = [np.stack([frame for frame, _ in group]) for group in groups]
        inputs = self.processor(
            videos=clips, do_sample_frames=False, return_tensors="pt", **self.options
        )
        given = {k: v.to(self.device) for k, v in inputs.items() if k in self._takes}
        using = nullcontext() if state is None else self.cache.using(state)
        with using:
            output = self.base.get_video_features(**given, return_dict=True)
        units = []
        layouts = self.adapter.layout(self.base, "video", inputs)
        for item, (group, layout) in enumerate(zip(groups, layouts, strict=True)):
            content = layout.content().to(self.device)
            planes = getattr(output, "deepstack_features", None) or ()
            assert layout.grid is not None
            units.append(
                Unit(
                    _rows(output.pooler_output[item], content),
                    layout.grid[1:],
                    tuple(time for _, time in group),
                    planes=tuple(_rows(plane[item], content) for plane in planes),
                )
            )
        return units


def _rows(features: Tensor, content: Tensor) -> Tensor:
    return features.reshape(-1, features.shape[-1])[content].clone()


def _shared(processor: Any, family: str, frames: int) -> dict[str, Any]:
    """Sizes for one patch that give its frames the pixels they would have in a longer clip."""
    if not family.startswith("qwen"):
        return {}
    size, patch = processor.size, processor.temporal_patch_size
    low, high = int(size["shortest_edge"]), int(size["longest_edge"])
    factor = processor.patch_size * processor.merge_size
    capped = bool(processor.cap_pixels_per_frame)
    if family == "qwen3_vl":  # edges are pixels of all frames together
        if capped:
            most = processor.max_video_tokens * factor**2
            high = max(min(most, high // frames), int(low * 1.05)) * frames
        low, high = low * patch // frames, high * patch // frames
    elif capped:
        total = int(processor.max_video_tokens * factor**2 * 0.9)
        high = max(min(high, total * patch // frames), int(low * 1.05))
    sides = {"shortest_edge": max(low, 1), "longest_edge": max(high, 1)}
    return {"size": sides, "cap_pixels_per_frame": False}
