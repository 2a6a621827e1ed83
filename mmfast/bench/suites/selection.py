"""Cost of choosing tokens: of every reducer, and against textbook formulations of the same rule.

The textbooks follow the papers' own code, independent of `mmfast.ops`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmfast.bench.cases import textured_video
from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row, environment
from mmfast.bench.timing import counted, device_times, extra_mb, noise, one_thread, spread, timed
from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Reduction, gather_rows
from mmfast.core.registry import Method, methods
from mmfast.core.spec import count, reduce
from mmfast.core.tokens import Tokens
from mmfast.ops.attention import attend
from mmfast.ops.attention_column_sums import attention_column_sums
from mmfast.ops.video import static_windows

_ENOUGH_MS = 10.0  # of one sample: a shorter job runs several times in a row
_SLOW_MS = 1000.0  # a textbook that takes longer runs once


def _divprune(tokens: Tokens, budget: int) -> Tensor:
    """Read the distances to all chosen rows again in every step."""
    rows = F.normalize(tokens.x, dim=-1)
    distance = 1 - rows @ rows.T
    picks = [int(distance.topk(2, dim=0, largest=False).values[1].argmax())]
    while len(picks) < budget:
        picks.append(int(distance[torch.tensor(picks)].amin(0).argmax()))
    return torch.tensor(picks)


def _evs(tokens: Tokens, budget: int) -> Tensor:
    """Compute cosines over full-size temporaries and sort all of them."""
    frames = tokens.grid[0] if tokens.grid else 1
    clip = tokens.x.unflatten(0, (frames, -1))
    change = 1 - F.cosine_similarity(clip[1:], clip[:-1], dim=-1)
    change = torch.cat([255 * torch.ones_like(change[:1]), change])
    return change.flatten().argsort(descending=True, stable=True)[:budget]


def _holitom_inner(tokens: Tokens, budget: int) -> Tensor:
    """Merge token after token, each into the states that the last merge left."""
    attn = tokens.need("attn")
    keep = attn.argsort(descending=True, stable=True)[:budget]
    rows = F.normalize(tokens.x, dim=-1)
    states = tokens.x.clone()
    chosen = set(keep.tolist())
    for token in range(tokens.n):
        if token not in chosen:
            target = keep[(rows[keep] @ rows[token]).argmax()]
            states[target] = (states[target] + states[token]) / 2
    return keep


TEXTBOOKS: dict[str, Callable[[Tokens, int], Tensor]] = {
    "divprune": _divprune,
    "evs": _evs,
    "holitom_inner": _holitom_inner,
}


def _textbook_windows(
    similarity: Tensor, tau: float, longest: int
) -> tuple[list[tuple[int, int]], int]:
    """Return segments (first, last) that save the most tokens, from all pairs of frames."""
    frames = len(similarity) + 1
    gains = torch.zeros(frames, frames)
    for first in range(frames - 1):
        still = (similarity[first:] > tau).cumprod(0).sum(1)
        gains[first, first + 1 :] = still * torch.arange(1, frames - first)
    best = torch.zeros(frames + 1)  # tokens saved in the first frames
    segments: list[list[tuple[int, int]]] = [[]]
    for last in range(frames):
        begin, best[last + 1] = last, best[last]
        for first in range(last - 1, max(last - longest, -1), -1):
            total = best[first] + gains[first, last]
            if total > best[last + 1]:
                begin, best[last + 1] = first, total
        segments.append([*segments[begin], (begin, last)])
    return segments[-1], int(best[-1])


def _textbook_importance(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return causal attention `[1, H, L, d]` and that received by each key `[1, L]`, by weights."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    hidden = torch.full((length, length), torch.finfo(query.dtype).min).triu(1)
    logits = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5 + hidden
    weights = logits.softmax(-1, dtype=torch.float32).to(query.dtype)
    return weights @ value, weights.mean(1).mean(1)


class SelectionJob(NamedTuple):
    """The fast and the papers' formulation of one rule."""

    ours: Callable[[], Any]
    textbook: Callable[[], Any]
    same: Callable[[Any, Any], bool]  # compares their results
    memory: bool = False  # measure the peak memory of both


class SelectionCase(NamedTuple):
    """A rule and its sizes; `build` makes the inputs when it is measured."""

    case: str
    method: str
    n: int
    d: int
    budget: int | None
    build: Callable[[], SelectionJob]


def method_case(method: str, grid: tuple[int, int, int], d: int, share: float) -> SelectionCase:
    """Return a case that keeps a share of a video of `grid` with features of width `d`."""
    n = math.prod(grid)
    budget = count(share, n) or 1
    name = f"{method}, {n:,} x {d:,}, keep {share:.0%}"
    return SelectionCase(name, method, n, d, budget, partial(_method_job, method, grid, d, budget))


def _method_job(method: str, grid: tuple[int, int, int], d: int, budget: int) -> SelectionJob:
    name = method.partition("@")[0]
    if name not in TEXTBOOKS:
        raise MmfastError(f"no textbook for {name!r}; choices: {', '.join(sorted(TEXTBOOKS))}")
    tokens = textured_video(grid, d)
    return SelectionJob(
        lambda: _ours(tokens, f"{method}:{budget}"),
        lambda: TEXTBOOKS[name](tokens, budget),
        lambda kept, expected: kept.equal(expected.sort().values),
    )


def segmentation(frames: int, places: int, tau: float = 0.8) -> SelectionJob:
    """Build windows of static places: shots of 16 frames in which one place in 25 changes."""
    generator = torch.Generator().manual_seed(0)
    alike = 0.7 + 0.3 * torch.rand(frames - 1, places, generator=generator).sqrt()
    alike[torch.rand(frames - 1, places, generator=generator) < 0.04] = 0.5
    alike[15::16] = 0.3
    longest = 1024
    return SelectionJob(
        lambda: static_windows(alike > tau, longest),
        lambda: _textbook_windows(alike, tau, longest),
        lambda a, b: bool(a == b),
    )


def importance(
    heads: int, kv_heads: int, length: int, width: int, share: float = 0.25
) -> SelectionJob:
    """Build attention with the attention received by every key."""
    generator = torch.Generator().manual_seed(0)
    make = partial(torch.randn, generator=generator)
    query = make(1, heads, length, width)
    key, value = make(1, kv_heads, length, width), make(1, kv_heads, length, width)

    def same(ours: tuple[Tensor, Tensor], textbook: tuple[Tensor, Tensor]) -> bool:
        count = int(share * length)
        kept = [found[1].topk(count).indices.sort().values for found in (ours, textbook)]
        near = partial(torch.allclose, rtol=1e-4, atol=1e-5)
        return all(map(near, ours, textbook)) and kept[0].equal(kept[1])

    def fast() -> tuple[Tensor, Tensor]:
        output, lse = attend(query, key, value, causal=True)
        return output, attention_column_sums(query, key, lse, causal=True) / (heads * length)

    textbook = partial(_textbook_importance, query, key, value)
    return SelectionJob(fast, textbook, same, memory=True)


def head_gather(heads: int, length: int, kept: int, width: int) -> SelectionJob:
    """Build a gather of entries that differ between the heads of a KV cache."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, heads, length, width, generator=generator)
    order = torch.rand(heads, length, generator=generator).argsort()
    index = order[:, :kept].sort().values
    # The textbook's index is as wide as the states.
    textbook = lambda: states.gather(2, index[None, :, :, None].expand(-1, -1, -1, width))
    return SelectionJob(lambda: gather_rows(states, index[None]), textbook, torch.equal)


_ATTENTION = "attention with importance, 2,880 tokens"
_WINDOWS = "holitom segmentation, 128 frames x 196"
_GATHER = "KV gather per head, 1,584 of 6,336, 4 heads x 128"
_IMPORTANCE = ("importance", 2880, 128, 720)
_OTHERS: tuple[tuple[Any, ...], ...] = (
    (_WINDOWS, "holitom_windows", 128, 196, None, partial(segmentation, 128, 196)),
    (f"{_ATTENTION}, 28 / 4 heads x 128", *_IMPORTANCE, partial(importance, 28, 4, 2880, 128)),
    (f"{_ATTENTION}, 32 heads x 128", *_IMPORTANCE, partial(importance, 32, 32, 2880, 128)),
    (_GATHER, "head_gather", 6336, 128, 1584, partial(head_gather, 4, 6336, 1584, 128)),
)
CASES = (
    method_case("divprune", (32, 14, 14), 1024, 0.25),
    method_case("divprune", (8, 14, 14), 896, 0.25),
    method_case("divprune", (8, 14, 14), 896, 0.10),
    method_case("evs", (8, 14, 14), 896, 0.25),
    method_case("evs", (32, 14, 14), 1024, 0.25),
    method_case("evs", (32, 14, 14), 3584, 0.25),
    method_case("holitom_inner@llm2", (8, 14, 14), 896, 0.25),
    *(SelectionCase(*each) for each in _OTHERS),
)


def measure(cases: Sequence[SelectionCase] = CASES, repeats: int = 9) -> Iterator[Row]:
    """Time every case on one thread, ours and textbook in turn; a slow textbook runs once.

    `noise` is the difference of two runs of ours; `extra_mb` is above the memory used before.
    """
    for case in cases:
        with one_thread():
            figures = _compare(case.build(), repeats)
            sizes = {key: getattr(case, key) for key in ("case", "method", "n", "d", "budget")}
            yield {**sizes, **figures, "threads": 1}


def result_rows(progress: Callable[[int, int], None] | None = None) -> list[Row]:
    """Measure all cases as rows for `assets/results/selection-cpu.jsonl`."""
    shared = {"suite": "selection", "device": "cpu", "dtype": "float32", **environment()}
    rows = []
    for row in measure():
        rows.append({**shared, **row})
        if progress is not None:
            progress(len(rows), len(CASES))
    return rows


def _compare(job: SelectionJob, repeats: int) -> Row:
    jobs = {"ours": job.ours, "textbook": job.textbook, "again": job.ours}
    # The C library keeps freed memory, up to 32 MB: page faults would dominate short jobs.
    torch.zeros(31 << 20, dtype=torch.uint8)
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    runs = {name: timed(call, time.process_time) for name, call in jobs.items()}
    first = {name: ms for name, (_, ms) in runs.items()}
    if first["textbook"] > _SLOW_MS:
        samples["textbook"].append(first["textbook"])
    warm = {
        name: _processor_ms(jobs[name], 1) if ms < _SLOW_MS else ms for name, ms in first.items()
    }
    often = {name: 1 + int(_ENOUGH_MS / max(ms, 1e-3)) for name, ms in warm.items()}
    for turn in range(repeats):
        for name in jobs if turn % 2 == 0 else reversed(jobs):
            if name != "textbook" or first["textbook"] <= _SLOW_MS:
                samples[name].append(_processor_ms(jobs[name], often[name]))
    memory = {}
    if job.memory:
        memory = {"extra_mb": extra_mb(job.ours), "textbook_extra_mb": extra_mb(job.textbook)}
    ms, textbook_ms = median(samples["ours"]), median(samples["textbook"])
    times = {"ms": ms, "median_ms": ms, "textbook_ms": textbook_ms, "speedup": textbook_ms / ms}
    same = job.same(runs["ours"][0], runs["textbook"][0])
    floor = noise(samples["ours"], samples["again"])
    return {**times, "same_indices": same, "noise": floor, **memory}


def _processor_ms(call: Callable[[], Any], often: int) -> float:
    # Time of this process alone: other load on the machine counts little.
    start = time.process_time()
    for _ in range(often):
        call()
    return (time.process_time() - start) * 1e3 / often


def _ours(tokens: Tokens, spec: str) -> Tensor:
    found = reduce(tokens, spec)
    if not isinstance(found, Reduction):
        raise MmfastError(f"{spec!r} gave several reductions for one item")
    if not found.pure:  # the textbook merges too
        found.apply(tokens.x)
    return found.keep


SHAPES = (((32, 14, 14), 1024), ((5, 24, 24), 1024))  # a video, the tiles of an image
_ROUNDS, _SHARE = 5, 0.25
_WORDS, _TILES, _IMAGES = 3, 5, 3


@benchmark("kernels", "reducers")
def reducers(tick: Tick) -> list[Row]:
    """Measure every reducer at a quarter of the tokens on one thread; features take `input_mb`."""
    known = methods("reducer")
    found: list[Row] = []
    for number, (grid, d) in enumerate(SHAPES):
        tokens = all_signals(grid, d)
        with one_thread():
            for place, method in enumerate(known):
                tick(method.name, number * len(known) + place, len(SHAPES) * len(known))
                found.append(_reducer_row(method, tokens))
    tick("", 1, 1)
    return sorted(found, key=lambda row: (row["n"], row["median_ms"]), reverse=True)


def _reducer_row(method: Method, tokens: Tokens) -> Row:
    call, d = reduction(method, tokens), tokens.x.shape[-1]
    row: Row = {
        "case": f"{method.name}, {tokens.n:,} x {d:,}",
        "method": method.name,
        "device": "cpu",
    }
    row |= {"dtype": "float32", "n": tokens.n, "d": d, "budget": int(_SHARE * tokens.n)}
    row |= {"input_mb": tokens.x.nbytes / 1e6, "threads": 1}
    row |= spread(device_times({"": call}, _ROUNDS, "cpu")[""])
    return row | {"operations": counted(call).count, "extra_mb": extra_mb(call)}


def reduction(method: Method, tokens: Tokens) -> Callable[[], object]:
    """Return the choice of a share of the tokens, at the method's first site."""
    site = "llm2" if method.sites[0] == "llm" else method.sites[0]
    spec = f"{method.name}@{site}:{max(1, int(_SHARE * tokens.n))}"
    return lambda: reduce(tokens, spec)


def all_signals(grid: tuple[int, int, int], d: int) -> Tokens:
    """Return a synthetic video with every signal that a reducer may need; keys are 64 wide."""
    clip = textured_video(grid, d)
    generator = torch.Generator().manual_seed(1)
    scores = (
        *("attn_first", "attn_middle", "attn_visual", "attn_window", "attn_ahead", "attn_before"),
        *("attn_peak", "attn_mutual", "key_norm", "drift"),
    )
    signals = {name: torch.rand(clip.n, generator=generator) for name in scores}
    place = torch.cartesian_prod(*map(torch.arange, grid))
    token = torch.arange(clip.n)
    signals |= {
        "keys": clip.x @ torch.randn(d, 64, generator=generator) / d**0.5,
        "attn_text": torch.rand(clip.n, _WORDS, generator=generator),
        "tile": token * _TILES // clip.n,
        "image": token * _IMAGES // clip.n,
        "place": place.reshape(clip.n, 3),
        "pixels": clip.x,
        "text_key_norm": torch.rand(_WORDS, generator=generator),
        "values": torch.randn(clip.n, 128, generator=generator),
        "text_values": torch.randn(_WORDS, 2, 64, generator=generator),
        "rope": torch.randn(clip.n, 2, generator=generator),
    }
    query = torch.randn(_WORDS, d, generator=generator)
    return Tokens(clip.x, attn=clip.attn, query=query, grid=grid, signals=signals)
