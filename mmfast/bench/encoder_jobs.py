"""What the benchmarks of the vision tower share: real shapes, and jobs against the first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmfast.bench.cases import Case, build
from mmfast.bench.presets import Preset, get_preset
from mmfast.bench.results import Row
from mmfast.bench.timing import device_times, noise, one_thread, paired, quantile
from mmfast.core.errors import MmfastError

_SPECIAL = {"image_token_index": 510, "video_token_index": 511}
_SMALL_TEXT = {
    "vocab_size": 512,
    "intermediate_size": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}


def device() -> torch.device:
    """CUDA where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def depth(on_cpu: int, whole: int) -> int:
    """Blocks to run: all on a GPU, on the CPU so many that a benchmark takes minutes."""
    return whole if device().type == "cuda" else on_cpu


def siglip(layers: int, frames: int, dtype: torch.dtype | None = None) -> Case:
    """SigLIP-so400m at 384 pixels, 729 patches a frame, as LLaVA-OneVision has it."""
    shape = get_preset("llava-onevision-0.5b")
    vision = {**shape.vision, "num_hidden_layers": layers}
    return _case(replace(shape, vision=vision), frames, dtype)


def qwen(layers: int, frames: int, dtype: torch.dtype | None = None) -> Case:
    """The tower of Qwen2.5-VL on 392 x 392 pixels, 784 patches for two frames.

    As in the checkpoint the last block of eight attends to the whole frame, the others to windows.
    """
    shape = get_preset("qwen2.5-vl-7b")
    full = [*range(7, layers, 8)] or [layers - 1]
    vision = {**shape.vision, "depth": layers, "fullatt_block_indexes": full}
    return _case(replace(shape, vision=vision, grid=(28, 28), half=False), frames, dtype)


def _case(shape: Preset, frames: int, dtype: torch.dtype | None) -> Case:
    where = device()
    dtype = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
    return build(only_tower(shape), ("vit",), frames=frames, device=where, dtype=dtype)


def only_tower(shape: Preset) -> Preset:
    """A shape whose language model, which does not run, is small."""
    return replace(shape, text={**shape.text, **_SMALL_TEXT}, special=_SPECIAL)


def encode(case: Case) -> Tensor:
    """Features of the case's clip, `[N, D]`."""
    found = case.model.get_video_features(**case.pixels).pooler_output
    rows = found if isinstance(found, Tensor) else torch.cat(list(found))
    return rows.flatten(0, -2)


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest value."""
    difference = (found.float() - expected.float()).abs().max()
    return float(difference / expected.float().abs().max())


def check(found: Tensor, expected: Tensor, limit: float) -> float:
    """The distance, where it is small enough that a time is worth telling.

    Raises:
        MmfastError: It is not.
    """
    far = distance(found, expected)
    if not far <= limit:
        raise MmfastError(
            f"features differ by {far:.1e} of their largest value, more than {limit:.0e}; run "
            "pytest tests/models/vision/test_encoder.py"
        )
    return far


def compare(jobs: Mapping[str, Callable[[], object]], rounds: int, shared: Row) -> list[Row]:
    """Time jobs in turn, the first one twice a round, and compare the others with it.

    Returns:
        A row per job: `job`, `p20_ms`, `median_ms`, `p80_ms`, `speedup` over the first, `noise`
        (of an A/A pair), `n`, and what `shared` holds.
    """
    first, where = next(iter(jobs)), device()
    with torch.no_grad(), one_thread():
        times = device_times({**jobs, "again": jobs[first]}, rounds, where)
    floor = noise(times[first], times["again"])
    base = [(a + b) / 2 for a, b in zip(times[first], times.pop("again"), strict=True)]
    clock = "events" if where.type == "cuda" else "processor time of the process"
    return [
        {
            **shared,
            "job": name,
            "median_ms": statistics.median(times[name]),
            "p20_ms": quantile(times[name], 0.2),
            "p80_ms": quantile(times[name], 0.8),
            "speedup": 1.0 if name == first else paired(base, times[name]),
            "noise": floor,
            "n": rounds,
            "clock": clock,
            "threads": 1,
            "device": where.type,
        }
        for name in jobs
    ]


def named(rows: list[Row], extra: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Rows with what is known of each job beside its time."""
    return [{**row, **extra.get(row["job"], {})} for row in rows]
