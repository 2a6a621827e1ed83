"""Whether a model fits, before it is built, and one line where it did not after all."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mmfast.bench.cases import TOWER_STAGES, empty_model
from mmfast.bench.inputs import video_grid
from mmfast.bench.presets import Preset
from mmfast.core.errors import MmfastError

_OWN_BYTES = 1 << 30  # libraries, matrices of the ceilings, what the allocator holds back
_REFUSED = ("can't allocate memory", "not enough memory", "CUDA out of memory")


def needed_bytes(preset: Preset, stages: Collection[str], frames: int, dtype: torch.dtype) -> int:
    """About what a run holds at its peak: weights, keys and values, one layer's activations."""
    model = empty_model(preset, stages, torch.device("meta"), dtype)
    size = torch.empty((), dtype=dtype).element_size()
    weights = sum(p.numel() for p in model.parameters())  # shared ones count once
    text, vision = model.config.get_text_config(), model.config.vision_config
    steps, rows, columns = video_grid(preset, frames)
    n = steps * rows * columns
    heads = text.num_attention_heads
    entries = 2 * text.num_hidden_layers * n * text.hidden_size // heads * text.num_key_value_heads
    inside = n * (3 * text.intermediate_size + 6 * text.hidden_size)
    if TOWER_STAGES & set(stages):
        patches = frames * preset.grid[0] * preset.grid[1]
        inside = max(inside, patches * (2 * vision.intermediate_size + 6 * vision.hidden_size))
    return int(size * (weights + entries + inside))


def free_bytes(device: torch.device) -> int | None:
    """Bytes a process may still take, or None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    if not info.is_file():
        return None
    lines = info.read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return min(free, _group_bytes(Path("/sys/fs/cgroup"), free))


def _group_bytes(folder: Path, otherwise: int) -> int:
    """What a container's limit leaves; the files of control groups, version 2."""
    limit, used = folder / "memory.max", folder / "memory.current"
    if not (limit.is_file() and used.is_file()):
        return otherwise
    bound = limit.read_text(encoding="ascii").strip()
    return otherwise if bound == "max" else int(bound) - int(used.read_text(encoding="ascii"))


def check_fits(
    preset: Preset,
    stages: Collection[str],
    frames: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Refuse what the machine would kill halfway.

    Raises:
        MmfastError: Says what is needed, what is free and what would fit.
    """
    free = free_bytes(device)
    needed = needed_bytes(preset, stages, frames, dtype) + _OWN_BYTES
    if free is None or needed <= free:
        return
    smaller = ["a smaller --preset"]
    if dtype == torch.float32:
        smaller.insert(0, "--dtype bfloat16")
    if TOWER_STAGES & set(stages):
        smaller.append("--stages llm")
    raise MmfastError(
        f"{preset.name} in {str(dtype).removeprefix('torch.')} with {frames} frames needs about "
        f"{needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free on {device}; "
        f"choose {', '.join(smaller)} or fewer --frames"
    )


@contextmanager
def one_line_when_full(preset: str, frames: int) -> Iterator[None]:
    """Say in one line that memory ran out.

    Raises:
        MmfastError: In place of what the allocator raised.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(text in str(error) for text in _REFUSED):
            raise MmfastError(
                f"memory ran out on {preset} with {frames} frames; choose fewer --frames, "
                "--dtype bfloat16 or a smaller --preset"
            ) from None
        raise
