"""Benchmark of the attention that keys receive, against eager weights and FlexAttention."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.stages import ceilings
from mmfast.bench.suites.kernels import INPUTS, ONE_DTYPE, in_turn, over_cases, poisoned
from mmfast.bench.timing import device_times, extra_mb, frozen, spread
from mmfast.core.errors import MmfastError, warn
from mmfast.ops.attention import attend
from mmfast.ops.attention_column_sums import attention_column_sums

ROUNDS = {"cuda": 30, "cpu": 5}
_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-4}  # of the largest sum: bfloat16 is exact input


class ColumnSumCase(NamedTuple):
    """Attention of `items` sequences of `length` tokens."""

    name: str
    items: int
    heads: int
    kv_heads: int
    length: int
    width: int
    causal: bool
    goal_ms: float | None = None  # of ours on an H200

    @property
    def flops(self) -> float:
        """FLOPs of the logits computed once: half of the matrix under a causal mask."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 2.0 * self.items * self.heads * pairs * self.width


CASES = {
    "cuda": (
        ColumnSumCase(
            "7B prefill of 6,336 tokens, 28 / 4 heads x 128", 1, 28, 4, 6336, 128, True, 0.45
        ),
        ColumnSumCase("7B prefill of 2,880 tokens, 32 heads x 128", 1, 32, 32, 2880, 128, True),
        ColumnSumCase("32 frames of 729 patches, 16 heads x 72", 32, 16, 16, 729, 72, False, 0.30),
        ColumnSumCase("8 prompts of 1,632 tokens, 28 / 4 heads x 128", 8, 28, 4, 1632, 128, True),
    ),
    "cpu": (
        ColumnSumCase("512 tokens, 14 / 2 heads x 64", 1, 14, 2, 512, 64, True),
        ColumnSumCase("512 tokens, 8 heads x 64", 1, 8, 8, 512, 64, True),
        ColumnSumCase("2 frames of 256 patches, 4 heads x 72", 2, 4, 4, 256, 72, False),
    ),
}


@dataclass(frozen=True)
class AttentionInputs:
    """Queries `[B, H, L, D]`, keys and values `[B, Hkv, L, D]`, log-sum-exp `[B, H, L]`."""

    case: ColumnSumCase
    query: Tensor
    key: Tensor
    value: Tensor
    lse: Tensor

    @classmethod
    def random(cls, case: ColumnSumCase, dtype: torch.dtype, device: str) -> AttentionInputs:
        """Draw queries, keys and values in the layout of a model's projections."""

        def make(heads: int) -> Tensor:
            shape = (case.items, case.length, heads, case.width)
            return torch.randn(shape, device=device).to(dtype).transpose(1, 2)

        query, key, value = make(case.heads), make(case.kv_heads), make(case.kv_heads)
        return cls(case, query, key, value, _log_sum_exp(case, query, key))

    def per_head(self, x: Tensor) -> Tensor:
        """Repeat grouped keys or values for every head."""
        return x.repeat_interleave(self.case.heads // self.case.kv_heads, dim=1)


def _log_sum_exp(case: ColumnSumCase, query: Tensor, key: Tensor) -> Tensor:
    if query.is_cuda:
        from mmfast.kernels.attention_column_sums import log_sum_exp

        return log_sum_exp(query, key, case.width**-0.5, case.causal)
    level = attend(query, key, key, None, case.causal)[1]
    assert level is not None
    return level


def ours(x: AttentionInputs) -> Tensor:
    """Compute our column sums with the log-sum-exp known."""
    return attention_column_sums(x.query, x.key, x.lse, causal=x.case.causal)


def _sdpa_and_ours(x: AttentionInputs) -> Tensor:
    _, lse = attend(x.query, x.key, x.value, None, x.case.causal)
    return attention_column_sums(x.query, x.key, lse, causal=x.case.causal)


def _eager(x: AttentionInputs) -> Tensor:
    weights = _weights(x)
    torch.matmul(weights, x.per_head(x.value))
    return weights.sum((1, 2), dtype=torch.float32)


def _weights(x: AttentionInputs) -> Tensor:
    case = x.case
    logits = x.query @ x.per_head(x.key).transpose(2, 3) * case.width**-0.5
    if case.causal:
        hidden = logits.new_full((case.length, case.length), torch.finfo(logits.dtype).min)
        logits = logits + hidden.triu(1)
    weights: Tensor = logits.softmax(-1, dtype=torch.float32).to(x.query.dtype)
    return weights


def swapped_flex(x: AttentionInputs, compiled: bool = True) -> Callable[[], Tensor]:
    """FlexAttention with queries and keys exchanged: its log-sum-exp gives the column sums."""
    case, lse = x.case, x.lse

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s - lse[b, h, kv]

    def later(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv >= q

    device, n = x.query.device.type, case.length
    mask = create_block_mask(later, None, None, n, n, device=device) if case.causal else None
    keys = x.per_head(x.key)
    unused = x.query.new_zeros(case.items, case.heads, n, 16)
    flex: Callable[..., Any] = flex_attention
    if compiled:
        flex = torch.compile(flex_attention, dynamic=False)

    def run() -> Tensor:
        _, more = flex(keys, x.query, unused, score, mask, return_aux=AuxRequest(lse=True))
        sums: Tensor = more.lse.exp().sum(1)
        return sums

    return run


# The output of attention is in both of a compared pair or in none.
WAYS: dict[str, Callable[[AttentionInputs], Tensor]] = {
    "ours": ours,
    "ours and its log-sum-exp": lambda x: attention_column_sums(
        x.query, x.key, causal=x.case.causal
    ),
    "eager weights": lambda x: _weights(x).sum((1, 2), dtype=torch.float32),
    "sdpa and ours": _sdpa_and_ours,
    "eager attention with weights": _eager,
    "sdpa alone": lambda x: F.scaled_dot_product_attention(
        x.query, x.key, x.value, is_causal=x.case.causal, enable_gqa=True
    ),
}
_FLEX = "flex, swapped"
_WITH_OUTPUT = {"sdpa and ours", "eager attention with weights", "sdpa alone"}


@benchmark("kernels", "attention-column-sums")
def column_sums(tick: Tick) -> list[Row]:
    """Compare column sums of attention with those of eager weights.

    `speedup` is over eager attention, with its output where the way has that, too; `tflop_s` of the
    logits computed once; `of_matmul` its share of a large matrix product; `peak_over_sdpa` the
    growth of inputs and peak over those of sdpa; `max_error` a share of the largest sum.
    """
    with frozen():
        return over_cases(CASES, ONE_DTYPE, _rows, tick)


def _rows(case: ColumnSumCase, dtype: torch.dtype, device: str) -> list[Row]:
    sets = [AttentionInputs.random(case, dtype, device) for _ in range(INPUTS)]
    common: Row = {"items": case.items, "n": case.length, "heads": case.heads}
    common |= {"kv_heads": case.kv_heads, "d": case.width, "causal": case.causal}
    errors = _check(sets[0])
    jobs = {name: in_turn(way, sets) for name, way in WAYS.items()}
    if device == "cuda" and case.items == 1:
        common |= _add_flex(jobs, errors, sets[0])
    peaks = _peaks(jobs, sets[0])
    times = device_times(jobs, ROUNDS[device], device)
    ceiling, found = ceilings(device)["matmul_tflop_s"], []
    for name, mine in times.items():
        ms, base = median(mine), times["eager weights"]
        row: Row = {**common, "way": name, **spread(mine), **peaks[name]}
        row |= {"max_error": errors.get(name), "goal_ms": case.goal_ms if name == "ours" else None}
        if name in _WITH_OUTPUT:
            base = times["eager attention with weights"]
        else:
            reached = case.flops / ms / 1e9
            row |= {"tflop_s": reached, "of_matmul": reached / ceiling}
        found.append({**row, "speedup": median(base) / ms})
    return found


def _add_flex(
    jobs: dict[str, Callable[[], Tensor]], errors: dict[str, float], x: AttentionInputs
) -> Row:
    """Add the way by FlexAttention, unless this torch cannot compile it; return fields of rows."""
    run, exact, start = swapped_flex(x), exact_sums(x), time.perf_counter()
    try:
        errors[_FLEX] = _error(run(), exact)
    except Exception as error:  # of a compiler: the other ways are measured all the same
        warn(f"{_FLEX} is left out: {type(error).__name__}: {error}")
        return {}
    jobs[_FLEX] = run
    return {"flex_compile_s": time.perf_counter() - start}


def _peaks(jobs: dict[str, Callable[[], Tensor]], x: AttentionInputs) -> dict[str, Row]:
    """Measure peak megabytes above those in use, each after a run that made its workspaces."""
    found: dict[str, Row] = {}
    for name, job in jobs.items():
        job()
        found[name] = {"extra_mb": extra_mb(job)}
    if x.query.is_cuda:  # a resident set is too coarse for that
        alone, ours = found["sdpa alone"]["extra_mb"], found["sdpa and ours"]
        whole = alone + sum(each.nbytes for each in (x.query, x.key, x.value)) / 1e6
        ours["peak_over_sdpa"] = (ours["extra_mb"] - alone) / whole
    return found


def _check(x: AttentionInputs) -> dict[str, float]:
    exact, errors = exact_sums(x), {}
    for name, way in WAYS.items():
        if name == "sdpa alone":
            continue
        with poisoned(warn_only=True):
            errors[name] = _error(way(x), exact)
        if "ours" in name and not errors[name] <= _ERROR[x.query.dtype]:
            raise MmfastError(
                f"attention_column_sums is off by {errors[name]:.1e} of the largest sum in "
                f"{x.case.name!r} ({name}); no speed is measured"
            )
    return errors


def exact_sums(x: AttentionInputs) -> Tensor:
    """Compute the sums in float64."""
    return attention_column_sums(x.query.double(), x.key.double(), causal=x.case.causal)


def _error(sums: Tensor, exact: Tensor) -> float:
    return float((sums.double() - exact).abs().max() / exact.abs().max())
