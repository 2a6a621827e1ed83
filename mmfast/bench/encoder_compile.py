"""The vision tower by `encoder="fast"`, `"compile"` and `"graph"` against the stock one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mmfast.bench.cases import Case
from mmfast.bench.encoder_jobs import check, compare, depth, device, encode, named, qwen, siglip
from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.timing import timed
from mmfast.core.errors import MmfastError
from mmfast.models.vision.acceleration import MODES, check_encoder, fast_encoder

ROUNDS, LAYERS, FRAMES = 3, 2, 2
TOWERS = {"siglip-so400m-384": (siglip, 26), "qwen2.5-vl-vit": (qwen, 32)}


def rows(tick: Tick) -> list[Row]:
    """Rows of both towers in every mode the machine has; compiling is told apart."""
    return [row for name in TOWERS for row in measure(name, ROUNDS, tick)]


def measure(name: str, rounds: int, tick: Tick) -> list[Row]:
    """Rows of one of `TOWERS`."""
    make, whole = TOWERS[name]
    layers, modes = depth(LAYERS, whole), [mode for mode in MODES if _runs(mode)]
    frames = FRAMES if device().type == "cpu" else 32
    case = make(layers, frames)
    with torch.no_grad():
        expected = encode(case)
    jobs: dict[str, Callable[[], object]] = {"stock": partial(encode, case)}
    extra: dict[str, Row] = {}
    limit = 1e-4 if expected.dtype == torch.float32 else 5e-2
    for number, mode in enumerate(modes):
        tick(f"{name}, {mode}", number, len(modes))
        run = jobs[mode] = partial(_within, case, mode)
        first, ms = timed(run)
        far = check(first, expected, limit)
        extra[mode] = {"difference": far, "first_call_s": ms / 1e3}
    shared: Row = {"tower": name, "frames": frames, "layers": layers, "of_layers": whole}
    shared["dtype"] = str(expected.dtype).removeprefix("torch.")
    return named(compare(jobs, rounds, shared), extra)


def _within(case: Case, mode: str) -> Tensor:
    with torch.no_grad(), fast_encoder(case.model, mode):
        return encode(case)


def _runs(mode: str) -> bool:
    try:
        check_encoder(mode, device())
    except MmfastError:
        return False
    return True
