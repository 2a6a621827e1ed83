"""What `attach` adds to one decode step, beside a stock cache of the same lengths.

The twin is the stock model on a stock cache that holds as many entries in every layer: both do
the same arithmetic, so the difference is what hooks, shortened cache layers and policies cost.
Policies that act at every step (`sink`, `window`), unpack what they read (`quant`) or read a part
(`retrieve`) do work of their own there; `work` tells which.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from mmfast.attach import attach
from mmfast.bench.cases import Case, build, pick_device, pick_dtype
from mmfast.bench.named import Row, Tick
from mmfast.bench.presets import get_preset
from mmfast.bench.timing import Sample, frozen, interleave, noise, one_thread, paired
from mmfast.models.timing import timed


@dataclass(frozen=True)
class HookJob:
    """One way of attaching.

    Attributes:
        reduce: Spec of the reducers.
        cache: Spec of the KV policies.
        work: What it does at every step beyond looking on.
    """

    reduce: str | None = None
    cache: str | None = None
    work: str = "none"

    @property
    def name(self) -> str:
        """Both specs."""
        return " | ".join(filter(None, (self.reduce, self.cache)))


JOBS = (
    HookJob("evs:0.25"),
    HookJob("fastv@llm3:0.5"),
    HookJob("holitom_inner@llm3:0.5"),
    HookJob(cache="snapkv:0.5"),
    HookJob(cache="lookm:0.5"),
    HookJob("evs:0.25+fastv@llm3:0.5", "snapkv:0.5"),
    HookJob(cache="sink:4+window:64", work="evicts"),
    HookJob(cache="retrieve:2", work="reads a part"),
    HookJob(cache="quant:8", work="unpacks"),
)
SHAPES = (("tiny", 4, 32, 15), ("llava-onevision-0.5b", 2, 4, 7))  # frames, steps, rounds


def rows(tick: Tick) -> list[Row]:
    """Rows of the tiny shape, where hooks weigh most, and of the 0.5B shape."""
    return [row for shape in SHAPES for row in measure(*shape, tick=tick)]


def measure(
    preset: str,
    frames: int,
    steps: int,
    rounds: int,
    jobs: Sequence[HookJob] = JOBS,
    device: str | None = None,
    tick: Tick = lambda *_: None,
) -> list[Row]:
    """A row per job.

    Args:
        preset: Model shape.
        frames: Frames of the clip in the prompt.
        steps: Decode steps per sample.
        rounds: Samples of each job, of its twin, and of the twin again.
        jobs: What is attached.
        device: Where; CUDA where there is one.
        tick: Told of every sample.
    """
    where, shape = pick_device(device), get_preset(preset)
    case = build(preset, ("llm", "decode"), frames, where, pick_dtype("auto", shape, where))
    found: list[Row] = []
    shared: Row = {"preset": preset, "dtype": str(case.visual.dtype).removeprefix("torch.")}
    shared |= {"device": where.type, "visual": case.n}
    with torch.no_grad(), one_thread(), frozen():
        for number, job in enumerate(jobs):
            found.append({**shared, **_row(case, job, steps, rounds)})
            tick(f"{preset} {job.name}", number + 1, len(jobs))
    return found


def _row(case: Case, job: HookJob, steps: int, rounds: int) -> Row:
    with attach(case.model, job.reduce, job.cache):
        held = _prefill(case)
    twin = _twin(held)
    plain = partial(_steps, case, twin, steps)
    ways: Mapping[str, Callable[[], Sample]] = {
        "twin": plain,
        "attached": partial(_attached, case, job, held, steps),
        "again": plain,
    }
    for run in ways.values():
        run()
    taken = interleave(ways, rounds)
    first, mine, again = ([s["ms"] for s in taken[k]] for k in ("twin", "attached", "again"))
    base = [(a + b) / 2 for a, b in zip(first, again, strict=True)]
    return {
        "job": job.name,
        "reduce": job.reduce,
        "cache": job.cache,
        "work": job.work,
        "layers": len(held.layers),
        "held": [_length(layer) for layer in held.layers],
        "step_ms": median(mine),
        "twin_ms": median(base),
        "overhead": paired(mine, base) - 1,
        "overhead_us": 1e3 * median(a - b for a, b in zip(mine, base, strict=True)),
        "noise": noise(first, again),
        "noise_us": 1e3 * median(abs(a - b) for a, b in zip(first, again, strict=True)),
        "steps": steps,
        "n": rounds,
        "clock": "wall, synchronised" if case.device.type == "cuda" else "processor time",
    }


def _prefill(case: Case) -> Any:
    inputs = {**case.prompt, "mm_encoder_outputs": case.features(), "logits_to_keep": 1}
    return case.model(**inputs, use_cache=True).past_key_values


def _attached(case: Case, job: HookJob, cache: Any, steps: int) -> Sample:
    with attach(case.model, job.reduce, job.cache):
        return _steps(case, cache, steps)


def _steps(case: Case, cache: Any, steps: int) -> Sample:
    """Milliseconds per step on a copy of the cache; the first step is not timed."""
    own, token = copy.deepcopy(cache), case.prompt["input_ids"][:, :1]

    def run(count: int) -> None:
        for _ in range(count):
            case.model(input_ids=token, past_key_values=own, use_cache=True)

    run(1)
    _, ms = timed(partial(run, steps), _clock(case))
    return {"ms": ms / steps}


def _clock(case: Case) -> Callable[[], float]:
    return time.perf_counter if case.device.type == "cuda" else time.process_time


def _twin(held: Any) -> Any:
    """A stock cache with as many entries in each layer."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for index, layer in enumerate(held.layers):
        keys = layer.keys
        shape = (len(keys), keys.shape[1], _length(layer), keys.shape[3])
        cache.update(*(torch.randn(shape, dtype=keys.dtype, device=keys.device),) * 2, index)
    return cache


def _length(layer: Any) -> int:
    return int(layer.keys.shape[2]) + int(getattr(layer, "extra", 0))
