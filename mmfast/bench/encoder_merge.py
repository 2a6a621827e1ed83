"""Merging inside the vision tower: time of the tower against what its fewer FLOPs would give."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmfast.attach import attach
from mmfast.bench.cases import Case
from mmfast.bench.encoder_jobs import compare, depth, device, encode, named, qwen, siglip
from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.timing import one_thread
from mmfast.core.errors import MmfastError
from mmfast.models.flops import tower_flops
from mmfast.models.vision.merge_pass import MergePass

ROUNDS, LAYERS = 3, 4
# What builds it, blocks of the checkpoint, frames on the CPU (Qwen takes two at once).
TOWERS = {"siglip-so400m-384": (siglip, 26, 1), "qwen2.5-vl-vit": (qwen, 32, 2)}
SPECS = (
    "tome@vit:0.75",
    "tome@vit:0.5",
    "tome@vit:0.5?until=0.5",
    "tome@vit:0.25",
    "saint@vit:0.5",
)


def rows(tick: Tick) -> list[Row]:
    """Rows of both towers: stock, and every spec with its ideal and the time spent on merging."""
    return [row for name in TOWERS for row in measure(name, SPECS, ROUNDS, tick)]


def measure(name: str, specs: tuple[str, ...], rounds: int, tick: Tick) -> list[Row]:
    """Rows of one of `TOWERS`; `ideal` is by FLOPs, `merging_ms` the time to choose and merge.

    Raises:
        MmfastError: Features of a spec are of another shape, or not finite.
    """
    tick(name, [*TOWERS].index(name), len(TOWERS))
    make, whole, few = TOWERS[name]
    layers = depth(LAYERS, whole)
    frames = few if device().type == "cpu" else 32
    case: Case = make(layers, frames)
    with torch.no_grad():
        shape = encode(case).shape
    flops = _flops(case, [math.prod((case.grid[0], *case.preset.grid))] * layers)
    extra: dict[str, Row] = {"stock": {"reduce": None, "ideal": 1.0, "merging_ms": 0.0}}
    jobs: dict[str, Callable[[], Tensor]] = {"stock": partial(encode, case)}
    for spec in specs:
        run = jobs[spec] = partial(_attached, case, spec)
        with torch.no_grad(), _watching(counting=True) as seen:
            features = run()
        if features.shape != shape or not bool(features.isfinite().all()):
            raise MmfastError(f"{spec!r} gave features {list(features.shape)}; run the tests")
        with torch.no_grad(), one_thread(), _watching() as timed:
            run()
        extra[spec] = {
            "reduce": spec,
            "ideal": flops / _flops(case, seen.lengths),
            "merging_ms": timed.ms,
            "operations_a_block": seen.operations / layers,
        }
    shared: Row = {"tower": name, "frames": frames, "layers": layers, "of_layers": whole}
    found = named(compare(jobs, rounds, shared), extra)
    return [{**row, "of_ideal": row["speedup"] / row["ideal"]} for row in found]


def _attached(case: Case, spec: str) -> Tensor:
    with attach(case.model, spec):
        return encode(case)


def _flops(case: Case, leaving: list[int]) -> int:
    """FLOPs of the blocks, by the tokens that reach the MLP of each."""
    grid = (case.grid[0], *case.preset.grid)
    return tower_flops(case.model, grid, [math.prod(grid), *leaving[:-1]], leaving)


@dataclass
class _MergeRecord:
    """What the merging of one pass took, and the tokens left after each block."""

    ms: float = 0.0
    operations: int = 0
    lengths: list[int] = field(default_factory=list)


class _Counter(TorchDispatchMode):
    """Counts operations: on a GPU each is a launch."""

    def __init__(self, seen: _MergeRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Neither views nor what asks for a dtype or for memory launch anything.
        launches = isinstance(out, (Tensor, tuple)) and not func.is_view
        self._seen.operations += launches and "aten.empty" not in str(func)
        return out


@contextmanager
def _watching(counting: bool = False) -> Iterator[_MergeRecord]:
    """Stand around the merging of every block; to count and to time are two passes."""
    stock, seen = MergePass.merge, _MergeRecord()

    def merge(work: MergePass, block: int, hidden: Tensor) -> Tensor:
        start = time.process_time()
        with _Counter(seen) if counting else nullcontext():
            out = stock(work, block, hidden)
        seen.ms += (time.process_time() - start) * 1e3
        seen.lengths.append(sum(work.lengths))
        return out

    with patch.object(MergePass, "merge", merge):
        yield seen
