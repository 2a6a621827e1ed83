"""`mmfast bench --kernels attention-column-sums`: attention received, against eager weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmfast.bench import column_sum_ways as ways
from mmfast.bench.column_sum_ways import Case, Inputs
from mmfast.bench.kernel_runs import extra_mb, over_cases, poisoned, timing, turns
from mmfast.bench.stages import ceilings
from mmfast.bench.timing import device_times, frozen
from mmfast.core.errors import MmfastError
from mmfast.ops.attention_column_sums import attention_column_sums

ROUNDS, CPU_ROUNDS = 30, 5
SETS = 3  # inputs that take turns
_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-4}  # of the largest sum: bfloat16 is exact input

CUDA_CASES = (
    Case("7B prefill of 6,336 tokens, 28 / 4 heads x 128", 1, 28, 4, 6336, 128, True, 0.45),
    Case("7B prefill of 2,880 tokens, 32 heads x 128", 1, 32, 32, 2880, 128, True),
    Case("32 frames of 729 patches, 16 heads x 72", 32, 16, 16, 729, 72, False, 0.30),
    Case("8 prompts of 1,632 tokens, 28 / 4 heads x 128", 8, 28, 4, 1632, 128, True),
)
CPU_CASES = (
    Case("512 tokens, 14 / 2 heads x 64", 1, 14, 2, 512, 64, True),
    Case("512 tokens, 8 heads x 64", 1, 8, 8, 512, 64, True),
    Case("2 frames of 256 patches, 4 heads x 72", 2, 4, 4, 256, 72, False),
)
# Way: what it is compared with. The output of attention is in both of a pair or in none.
_PLAIN: dict[str, Callable[[Inputs], Tensor]] = {
    "ours": ways.ours,
    "ours and its log-sum-exp": ways.ours_alone,
    "eager weights": ways.eager_weights,
    "sdpa and ours": ways.attention_and_ours,
    "eager attention with weights": ways.eager,
    "sdpa alone": ways.attention,
}
_FLEX = "flex, swapped"
_WITH_OUTPUT = {"sdpa and ours", "eager attention with weights", "sdpa alone"}


def rows(tick: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    """Measure every case on CUDA where there is one, tiny ones on the CPU elsewhere.

    Returns:
        A row per case and way: milliseconds, `speedup` over eager attention (with its output
        where the way has that, too), `tflop_s` of the logits computed once, `of_matmul`, what
        share of a large matrix product that is, `extra_mb` of memory at the peak above the inputs,
        `peak_over_sdpa`, what of its inputs and peak together ours adds to sdpa, `max_error`
        against float64 as a share of the largest sum, the goal where there is one, and the seconds
        FlexAttention takes to compile.

    Raises:
        MmfastError: Our sums are wrong; nothing is timed then.
    """
    kinds = {"cuda": (torch.bfloat16,), "cpu": (torch.float32,)}
    with frozen(), torch.inference_mode():
        return over_cases({"cuda": CUDA_CASES, "cpu": CPU_CASES}, kinds, _measured, tick)


def _measured(case: Case, kind: torch.dtype, device: str) -> list[dict[str, Any]]:
    torch.seed()  # other numbers each time
    sets = [ways.inputs(case, kind, device) for _ in range(SETS)]
    shape = {"items": case.items, "n": case.length, "heads": case.heads, "kv_heads": case.shared}
    common: dict[str, Any] = {"case": case.name, "device": device}
    common |= {"dtype": str(kind).removeprefix("torch."), **shape, "d": case.width}
    errors = _checked(sets[0])
    jobs = {name: turns(way, sets) for name, way in _PLAIN.items()}
    if device == "cuda" and case.items == 1:
        jobs[_FLEX], first_s = ways.swapped(sets[0]), time.perf_counter()
        errors[_FLEX] = _error(jobs[_FLEX](), _exact(sets[0]))
        common["flex_compile_s"] = time.perf_counter() - first_s
    peaks = _peaks(jobs, sets[0])
    times = device_times(jobs, ROUNDS if device == "cuda" else CPU_ROUNDS, device)
    middle = {name: statistics.median(each) for name, each in times.items()}
    ceiling = ceilings(device)["matmul_tflop_s"]
    return [
        {
            **common,
            "way": name,
            "causal": case.causal,
            **timing(each),
            "speedup": middle[_base(name)] / middle[name],
            **_rate(name, case, middle[name], ceiling),
            **peaks[name],
            "max_error": errors.get(name),
            "goal_ms": case.goal_ms if name == "ours" else None,
        }
        for name, each in times.items()
    ]


def _base(name: str) -> str:
    return "eager attention with weights" if name in _WITH_OUTPUT else "eager weights"


def _rate(name: str, case: Case, ms: float, ceiling: float) -> dict[str, float]:
    if name in _WITH_OUTPUT:
        return {}
    reached = case.flops / ms / 1e9
    return {"tflop_s": reached, "of_matmul": reached / ceiling}


def _peaks(jobs: dict[str, Callable[[], Tensor]], given: Inputs) -> dict[str, dict[str, float]]:
    """Peak megabytes above what is there before, each after a run that made its workspaces."""
    extra = {}
    for name, job in jobs.items():
        job()
        extra[name] = extra_mb(job)
    found = {name: {"extra_mb": mb} for name, mb in extra.items()}
    if given.query.is_cuda:  # a resident set is too coarse for that
        alone = extra["sdpa alone"]
        whole = alone + sum(x.nbytes for x in (given.query, given.key, given.value)) / 1e6
        found["sdpa and ours"]["peak_over_sdpa"] = (extra["sdpa and ours"] - alone) / whole
    return found


def _checked(given: Inputs) -> dict[str, float]:
    """Errors of every way that makes sums; ours in memory that holds NaN before."""
    exact = _exact(given)
    errors = {}
    for name, way in _PLAIN.items():
        if name == "sdpa alone":
            continue
        with poisoned(warn_only=True):
            errors[name] = _error(way(given), exact)
        if "ours" in name and not errors[name] <= _ERROR[given.query.dtype]:
            raise MmfastError(
                f"attention_column_sums is off by {errors[name]:.1e} of the largest sum in "
                f"{given.case.name!r} ({name}); no speed is measured"
            )
    return errors


def _exact(given: Inputs) -> Tensor:
    query, key = given.query.double(), given.key.double()
    return attention_column_sums(query, key, causal=given.case.causal)


def _error(sums: Tensor, exact: Tensor) -> float:
    return float((sums.double() - exact).abs().max() / exact.abs().max())
