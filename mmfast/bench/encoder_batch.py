"""Frames per call of the vision tower: one by one against several together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mmfast.bench.encoder_jobs import compare, device, siglip
from mmfast.bench.encoder_jobs import named as with_extra
from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.timing import peak_during

FRAMES, LAYERS, ROUNDS = 8, 1, 5
PER_CALL = (1, 2, 4, 8)


def rows(tick: Tick) -> list[Row]:
    """Rows of `FRAMES` frames of the SigLIP tower, so many a call; `speedup` is over one."""
    return measure(FRAMES, LAYERS, ROUNDS, tick)


def measure(frames: int, layers: int, rounds: int, tick: Tick) -> list[Row]:
    """Rows for a number of frames and blocks; on a GPU four times the frames and all blocks."""
    if device().type == "cuda":
        frames, layers = 4 * frames, 26
    case = siglip(layers, frames)
    tower, pixels = case.model.base_model.vision_tower, case.pixels["pixel_values_videos"][0]

    def run(count: int) -> None:
        with torch.no_grad():
            for part in pixels.split(count):
                tower(part)

    counts = sorted({*PER_CALL, frames}) if frames >= max(PER_CALL) else [1, frames]
    jobs: dict[str, Callable[[], object]] = {f"{n} a call": partial(run, n) for n in counts}
    tick("frames per call", 0, 2)
    shared: Row = {
        "tower": "siglip-so400m-384",
        "frames": frames,
        "layers": layers,
        "of_layers": 26,
    }
    found = compare(jobs, rounds, shared)
    tick("memory", 1, 2)
    extra = {name: {"peak_mb": peak_during(job)} for name, job in jobs.items()}
    tick("memory", 2, 2)
    return with_extra(found, extra)
