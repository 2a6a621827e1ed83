"""Benchmark of the frame cache under a camera that moves: quality and time on the same tower."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.bench.cases import build
from mmfast.bench.registry import Tick, benchmark, over
from mmfast.bench.results import Row
from mmfast.bench.suites.vision import siglip_shape
from mmfast.bench.timing import ON_ONE_THREAD, frozen, one_thread
from mmfast.core.errors import MmfastError
from mmfast.frontends.changes import Pixels
from mmfast.models.loading import embedded_path, load
from mmfast.models.vision.frames.cache import FrameCache
from mmfast.models.vision.frames.motion import by_frame

CLIPS = Path(__file__).resolve().parents[3] / "assets" / "clips"
MOTIONS = ("static", "pan 1 px", "pan 4 px", "pan a patch", "shake", "zoom", "cuts")
GOAL, SHARE = 0.98, 0.25
SWING = 24  # frames until a pan or a zoom turns back
NOISE, TEXTURE = 1.0, 30.0  # of 255: noise of the sensor, texture over the flat ground of the clips
_FRAME = 192  # side of the embedded clips


def embedded_clips() -> list[Path]:
    """Return the files of the embedded clips; MmfastError outside of a checkout."""
    paths = sorted(CLIPS.glob("*.mp4"))
    if not paths:
        raise MmfastError(f"no clips at {str(CLIPS)!r}; run in a checkout of mmfast")
    return paths


class CameraTower(NamedTuple):
    """A tower and its stream: `make` gives the model, its frame's side and its patch's."""

    make: Callable[[], tuple[Any, int, int]]
    note: str
    each: int  # frames a call
    calls: int


def _trained() -> tuple[Any, int, int]:
    model, _ = load(embedded_path("tiny-video"), "cpu", "float32")
    return model, 96, 8


def _wide(layers: int = 2) -> tuple[Any, int, int]:
    shape = siglip_shape(layers)
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    vision = {**shape.vision, **sizes, "image_size": 224, "patch_size": 16}
    case = build(replace(shape, vision=vision, grid=(14, 14)), ("vit",), frames=1)
    return case.model, 224, 16


TOWERS = {
    "tiny-video": CameraTower(_trained, "trained, 144 patches, 8 frames a call", 8, 12),
    "siglip-base-224": CameraTower(
        _wide, "random weights, 2 of 12 layers, 196 patches, 1 frame a call", 1, 20
    ),
}


@benchmark("stream", "frame-cache-motion")
def frame_cache_motion(tick: Tick) -> list[Row]:
    """Compare the frame cache under a goal with the stock tower while the camera moves."""
    embedded_clips()
    rows: list[Row] = []
    for name, tower in TOWERS.items():
        made = tower.make()
        rows += over(MOTIONS, lambda motion: [motion_row(name, tower, made, motion)], tick)  # noqa: B023
    return rows


@torch.no_grad()
def motion_row(
    name: str, tower: CameraTower, made: tuple[Any, int, int], motion: str, timed: bool = False
) -> Row:
    """Encode one stream with the cache, and twice without, call by call in turn."""
    model, side, patch = made

    def encode(shot: Pixels) -> Any:
        return model.get_video_features(pixels_of(shot))

    cache = FrameCache(model, SHARE, goal=GOAL, timed=timed)
    state, cosines, first = cache.start(), list[Tensor](), None
    spent: dict[str, list[float]] = {"stock": [], "cache": [], "again": []}

    def cached(pixels: Pixels) -> Any:
        with cache.using(state):
            return encode(pixels)

    jobs: dict[str, Callable[[Pixels], Any]] = {"stock": encode, "cache": cached, "again": encode}
    stream = shots(motion, side, patch)
    with one_thread(), frozen():
        for number in range(tower.calls + 1):
            pixels = np.stack([next(stream) for _ in range(tower.each)])
            if not number:
                encode(pixels)  # the first call of all warms up
                continue
            found, turn = {}, number % 3
            for job in [*jobs][turn:] + [*jobs][:turn]:
                start = time.process_time()
                found[job] = jobs[job](pixels)
                spent[job].append((time.process_time() - start) * 1e3)
            parts = {job: by_frame(found[job].pooler_output, tower.each) for job in found}
            exact, near = (torch.stack(parts[job] or []) for job in ("stock", "cache"))
            first = exact[:1] if first is None else first
            cosine = [F.cosine_similarity(each, exact, dim=-1) for each in (near, first)]
            cosines.append(torch.stack([each.mean(-1) for each in cosine]))
    row: Row = {"model": name, "note": tower.note, "motion": motion, "method": "frame_cache"}
    row |= {"knobs": {"refresh": SHARE, "goal": GOAL, "timed": timed}, "n": tower.calls}
    return row | _quality(torch.cat(cosines, 1)) | _times(spent) | _counts(state)


def _quality(cosines: Tensor) -> Row:
    """Cosines `[2, frames]` of the cache and of the first frame's features to the exact ones."""
    near, frozen_features = cosines
    quality = {"cosine": near.mean().item(), "cosine_worst_frame": near.min().item()}
    return {**quality, "cosine_first_frame": frozen_features.mean().item()}


def _times(spent: dict[str, list[float]]) -> Row:
    stock, cache, again = (sum(spent[job]) for job in ("stock", "cache", "again"))
    ratio = 2 * cache / (stock + again)
    figures = {"ratio": ratio, "saved": 1 - ratio, "noise": abs(stock / again - 1)}
    means = {"stock_ms": stock / len(spent["stock"]), "mean_ms": cache / len(spent["cache"])}
    return {**figures, **means, **ON_ONE_THREAD, "dtype": "float32"}


def _counts(state: Any) -> Row:
    shares = {"computed": state.computed / state.patches, "state_mb": state.nbytes / 1e6}
    return {**shares, "frames": state.frames, "whole": state.whole}


def pixels_of(shot: Pixels) -> Tensor:
    """Return pixels `[1, T, 3, H, W]` in [-1, 1], as SigLIP takes them, of frames of uint8."""
    pixels = torch.from_numpy(shot).permute(0, 3, 1, 2).float()
    return (pixels / 127.5 - 1.0)[None]


def shots(motion: str, side: int, patch: int) -> Iterator[Pixels]:
    """Yield frames `[side, side, 3]` without end, of a camera over a still scene."""
    rng, scene = np.random.default_rng(0), scene_of(side)
    steps = {"pan 1 px": 1, "pan 4 px": 4, "pan a patch": patch}
    number = 0
    while True:
        swing = SWING - abs(number % (2 * SWING) - SWING)
        y, x, zoom = int(0.9 * side), int(0.6 * side), 1.0
        if motion in steps:
            x += steps[motion] * swing
        elif motion == "shake":
            y, x = (int(at + rng.integers(-3, 4)) for at in (y, x))
        elif motion == "zoom":
            zoom = 1.01**swing
        elif motion == "cuts":
            place = number // 8 % 6
            y, x = int(place * 0.63 % 1.0 * 1.9 * side), int(place * 0.37 % 1.0 * 4.9 * side)
        elif motion != "static":
            raise MmfastError(f"no motion {motion!r}; choices: {', '.join(MOTIONS)}")
        noise = rng.normal(0, NOISE, (side, side, 3))
        frame = _crop(scene, y, x, side, zoom).permute(1, 2, 0).numpy() + noise
        yield frame.round().clip(0, 255).astype(np.uint8)
        number += 1


def _crop(scene: Tensor, y: int, x: int, side: int, zoom: float) -> Tensor:
    """The square `[3, side, side]` at a place of the scene, or the middle of it enlarged."""
    square = scene[:, y : y + side, x : x + side]
    if zoom == 1.0:
        return square
    turn = torch.tensor([[[1 / zoom, 0, 0], [0, 1 / zoom, 0]]])
    grid = F.affine_grid(turn, [1, 3, side, side], align_corners=False)
    return F.grid_sample(square[None], grid, padding_mode="border", align_corners=False)[0]


def scene_of(side: int) -> Tensor:
    """Frames of the embedded clips side by side under a texture: `[3, 3 * side, 6 * side]`."""
    shown = []
    for path in embedded_clips():
        with av.open(str(path)) as file:
            frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
        shown.append([frames[0], frames[12]])
    rows = [
        np.concatenate([shown[(column + 3 * row) % 6][row % 2] for column in range(6)], axis=1)
        for row in range(3)
    ]
    ground = torch.from_numpy(np.concatenate(rows)).permute(2, 0, 1)[None].float()
    gen = torch.Generator().manual_seed(0)
    height, width = ground.shape[-2:]
    for cell in (96, 48, 24, 12, 6):
        coarse = torch.randn(1, 3, height // cell, width // cell, generator=gen)
        fine = F.interpolate(coarse, (height, width), mode="bicubic")
        ground = ground + TEXTURE * (cell / 96) ** 0.7 * fine
    return F.interpolate(ground, scale_factor=side / _FRAME, mode="bilinear", antialias=True)[0]
