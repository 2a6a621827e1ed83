"""How near the features of the frame cache are to the stock tower's, on the embedded clips."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.core.errors import MmfastError
from mmfast.frontends.video.reader import read_video
from mmfast.models.loading import embedded_path, load
from mmfast.models.vision.frame_cache import FrameCache
from mmfast.streams.frontend import FrameEncoder

CLIPS = Path(__file__).resolve().parents[2] / "assets" / "clips"
MODEL = "tiny-video"
# Frames a second, and knobs of the cache.
CASES: tuple[tuple[float, dict[str, Any]], ...] = (
    (8.0, {"refresh": 0.25}),
    (4.0, {"refresh": 0.25}),
    (8.0, {"refresh": 0.1}),
    (8.0, {"threshold": 0.02}),
    (8.0, {"refresh": 0.25, "fixed": True}),
)


def rows(progress: Tick) -> list[Row]:
    """A row per case: cosine of every token with the stock one, over all frames but the first.

    Raises:
        MmfastError: The clips are not here.
    """
    paths = sorted(CLIPS.glob("*.mp4"))
    if not paths:
        raise MmfastError(f"no clips at {str(CLIPS)!r}; run in a checkout of mmfast")
    model, processor = load(embedded_path(MODEL), "cpu", "float32")
    found: list[Row] = []
    for done, (fps, knobs) in enumerate(CASES):
        progress(f"{fps:g} frames/s", done, len(CASES))
        found.append(measure(model, processor, paths, fps, knobs))
    return found


def measure(
    model: Any, processor: Any, paths: Sequence[Path], fps: float, knobs: dict[str, Any]
) -> Row:
    """One case: every clip is a stream of its own, encoded frame by frame."""
    cache, near = FrameCache(model, **knobs), []
    counts = dict.fromkeys(("frames", "whole", "patches", "computed"), 0)
    for path in paths:
        clip = read_video(path, fps=fps)
        shots = [(frame, float(time)) for frame, time in zip(clip.frames, clip.times, strict=True)]
        state = cache.start()
        stock = _features(FrameEncoder(model, processor), shots, None)
        cached = _features(FrameEncoder(model, processor, cache=cache), shots, state)
        near.append(F.cosine_similarity(cached, stock, dim=-1)[1:])
        counts = {name: total + state.stats()[name] for name, total in counts.items()}
    cosines = torch.cat(near)  # [frames, tokens]
    return {
        "model": MODEL,
        "method": "frame_cache",
        "knobs": knobs,
        "fps": fps,
        "n": len(paths),
        "cosine": cosines.mean().item(),
        "cosine_worst_frame": cosines.mean(-1).min().item(),
        "cosine_worst_token": cosines.min().item(),
        "computed": counts["computed"] / counts["patches"],
        "frames": counts["frames"],
        "whole": counts["whole"],
        "device": "cpu",
        "dtype": "float32",
    }


def _features(encoder: FrameEncoder, shots: Sequence[Any], state: Any) -> Tensor:
    """Features of every frame, `[T, n, D]`."""
    return torch.stack([encoder([[shot]], state)[0].features for shot in shots])
