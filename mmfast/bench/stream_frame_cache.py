"""Encoder time with the frame cache against the stock tower, on real shapes with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from mmfast.bench.cases import Case, build
from mmfast.bench.encoder_jobs import only_tower
from mmfast.bench.named import Tick
from mmfast.bench.presets import Preset, get_preset
from mmfast.bench.results import Row
from mmfast.bench.stream_jobs import compare
from mmfast.core.errors import MmfastError
from mmfast.models.vision.frame_cache import FrameCache

SHARE, EVERY, ROUNDS = 0.25, 32, 5


def rows(progress: Tick) -> list[Row]:
    """Rows of both shapes: a frame by the stock tower, by the cache, and the cost over a stream."""
    found: list[Row] = []
    for done, name in enumerate(SHAPES):
        progress(name, done, len(SHAPES))
        found += measure(name, ROUNDS)
    return found


def measure(name: str, rounds: int) -> list[Row]:
    """Rows of one shape of `SHAPES`.

    Every frame differs from the one before in all patches, a little, so that the cache computes
    exactly its share of each; the rule that finds scene cuts is off.

    Raises:
        MmfastError: The cache failed its checks, and no time is worth telling.
    """
    preset, frames, note = SHAPES[name]
    case = build(preset, ("vit",), frames=frames)
    encode = case.model.get_video_features
    cache = FrameCache(case.model, SHARE, cut=None, every=None)
    state = cache.start()
    # Each its own frames: in step with the other job, one would see the same frame every time.
    stream, whole = _stream(case), _stream(case)
    with torch.no_grad():
        _check(encode, cache, state, stream)

    def cached() -> None:
        with cache.using(state):
            encode(**next(stream))

    found = compare({"stock": lambda: encode(**next(whole)), "frame cache": cached}, rounds)
    n = state.patches / state.frames
    computed = (state.computed / n - 1) / (state.frames - 1)  # the first one is whole
    if abs(computed - SHARE) > 1 / n:
        raise MmfastError(f"the frame cache computed {computed:.3f} of the patches, not {SHARE}")
    shared = {
        "preset": name,
        "note": note,
        "dtype": "float32",
        "method": "frame_cache",
        "knobs": {"refresh": SHARE},
        "computed": computed,
        "state_mb": state.nbytes / 1e6,
    }
    stock_row, row = ({**shared, **each} for each in found)
    # What a stream saves in which one frame of `EVERY` is computed whole.
    row |= {"every": EVERY, "saved_every": row["saved"] * (EVERY - 1) / EVERY}
    return [stock_row | {"method": None, "knobs": {}, "computed": 1.0, "state_mb": 0.0}, row]


def _stream(case: Case) -> Iterator[dict[str, Any]]:
    """Calls of the encoder with one frame each, without end."""
    name = "pixel_values_videos"
    still: Tensor = case.pixels[name]
    gen = torch.Generator().manual_seed(1)
    noisy = [still + 0.05 * torch.randn(still.shape, generator=gen) for _ in range(3)]
    return cycle([{**case.pixels, name: each} for each in noisy])


def _check(encode: Callable[..., Any], cache: FrameCache, state: Any, stream: Any) -> None:
    """A whole frame bit for bit, and a frame of which exactly the share is computed."""
    first, second = next(stream), next(stream)
    with cache.using(state):
        whole = _features(encode(**first))
    n = state.computed
    with cache.using(state):
        partly = _features(encode(**second))
    share = (state.computed - n) / n
    same = torch.equal(whole, _features(encode(**first)))
    if not same or abs(share - SHARE) > 1 / n or not bool(partly.isfinite().all()):
        raise MmfastError(
            f"the frame cache failed its checks (whole frame equal: {same}, share {share:.3f}); "
            "run pytest tests/test_frame_cache*.py"
        )


def _features(output: Any) -> Tensor:
    found = output.pooler_output
    return found if isinstance(found, Tensor) else torch.cat(list(found))


def _siglip() -> Preset:
    shape = get_preset("llava-onevision-0.5b")
    return only_tower(shape)


def _qwen() -> Preset:
    shape = get_preset("qwen2.5-vl-7b")
    vision = {**shape.vision, "depth": 8, "fullatt_block_indexes": [7]}
    return only_tower(replace(shape, vision=vision, grid=(28, 28), half=False))


# Preset, frames of a call (the Qwen tower takes two at once), what was cut.
SHAPES = {
    "siglip-so400m-384": (_siglip(), 1, "26 layers, 729 patches"),
    "qwen2.5-vl-vit": (_qwen(), 2, "8 of 32 layers, one of them full attention; 784 patches"),
}
