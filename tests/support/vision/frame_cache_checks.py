"""Streams for tests of the frame cache, and the slow version of what it must compute."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from tiny_base import by_name
from tiny_models import ALL_FAMILIES, Tiny, facts
from torch import Tensor

from mmfast.models.families.adapter import tower_of
from mmfast.models.families.prompt_ids import prompt_ids
from mmfast.models.families.tower import attention_of
from mmfast.models.vision.frames.cache import FrameCache
from mmfast.models.vision.frames.state import FrameCacheState

KINDS = ("image", "video")
CASES = [
    (family, kind)
    for family in ALL_FAMILIES
    if family != "fast_vlm"
    for kind in facts(family).kinds
    if kind in KINDS
]


def pictures(this: Tiny, count: int, seed: int = 0) -> list[np.ndarray]:
    """Frames in which one block moves over a still background."""
    rng = np.random.default_rng(seed)
    height, width = this.shape.height, this.shape.width_px
    ground = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    thing = rng.integers(0, 256, (height // 3, width // 3, 3), dtype=np.uint8)
    frames = []
    for t in range(count):
        frame = ground.copy()
        left = (t * width // 8) % (width - width // 3)
        frame[: height // 3, left : left + width // 3] = thing
        frames.append(frame)
    return frames


def features(this: Tiny, kind: str, frames: Sequence[np.ndarray], videos: int = 1) -> list[Tensor]:
    """What the language model would get of these images, or of `videos` videos of equal length.

    Features `[n, D]`, and DeepStack planes behind them, of all items in one.
    A tower that takes two frames at once gets every frame of a video twice.
    """
    media: dict[str, Any] = {"images": list(frames)}
    count = len(frames)
    if kind == "video":
        pairs, each = (2 if "qwen" in this.family else 1), len(frames) // videos
        clips = [np.stack(frames[i * each : (i + 1) * each]) for i in range(videos)]
        media, count = {"videos": [np.repeat(clip, pairs, axis=0) for clip in clips]}, videos
    inputs = this.inputs([f"{{{kind}}}"] * count, **media)  # an image alone may be cut into tiles
    call = {name: inputs[name] for name in this.facts.calls[kind] if name in inputs}
    base = this.model.base_model
    method = getattr(base, f"get_{kind}_features", None) or base.get_image_features
    given = by_name(method, call)
    with prompt_ids(inputs["input_ids"]):  # tells which tiles are one image
        output = method(**given, return_dict=True)
    planes = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    if this.family == "llava_onevision" and kind == "video" and given.keys() == call.keys():
        planes[0] = planes[0][:, :-1]  # the newline behind a video
    return [p.flatten(0, -2) if isinstance(p, Tensor) else torch.cat(list(p)) for p in planes]


def streamed(
    this: Tiny, kind: str, frames: Sequence[np.ndarray], cache: FrameCache, state: FrameCacheState
) -> list[list[Tensor]]:
    """Features of each frame, encoded one after the other."""
    found = []
    for frame in frames:
        with cache.using(state):
            found.append(features(this, kind, [frame]))
    return found


@dataclass
class SlowCache:
    """The same by hooks on the stock modules, every patch computed and most results thrown away.

    Keys and values of patches that are not fresh are overwritten by the old ones as they leave
    their projection, and outputs as they leave the block.
    """

    this: Tiny
    old: dict[str, Tensor] = field(default_factory=dict)
    fresh: Tensor | None = None  # [S] bool in the tower's order; None: all

    def encode(self, kind: str, frame: np.ndarray) -> list[Tensor]:
        with ExitStack() as stack:
            for index, block in enumerate(tower_of(self.this.model).blocks):
                attn: Any = attention_of(block)
                for name in ("k_proj", "v_proj", "k", "v", "qkv"):
                    if hasattr(attn, name):
                        hook = partial(self._keep, f"{index}.{name}")
                        handle = getattr(attn, name).register_forward_hook(hook)
                        stack.callback(handle.remove)
                hook = partial(self._keep, f"{index}")
                handle = block.register_forward_hook(hook, prepend=True)  # before it is recorded
                stack.callback(handle.remove)
            return features(self.this, kind, [frame])

    def _keep(self, name: str, module: Any, args: Any, output: Tensor) -> Tensor:
        rows = output.flatten(0, -2)
        if self.fresh is not None:
            stale = ~self.fresh
            columns = slice(None)
            if name.endswith("qkv"):  # queries of stale patches lead nowhere
                columns = slice(rows.shape[-1] // 3, None)
            rows = rows.clone()
            rows[stale, columns] = self.old[name][stale, columns]
        self.old[name] = rows.clone()
        return rows.reshape(output.shape)


def first_inputs(this: Tiny, kind: str, frame: np.ndarray) -> Tensor:
    """What enters the first block, `[S, D]`."""
    seen: list[Tensor] = []
    block = tower_of(this.model).blocks[0]
    handle = block.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    features(this, kind, [frame])
    handle.remove()
    return seen[0]
