"""Cost of choosing tokens, against the textbook formulation of the same rule."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmfast.bench.measure import one_thread
from mmfast.bench.results import environment
from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Reduction
from mmfast.core.spec import count, reduce
from mmfast.core.tokens import Tokens


@dataclass(frozen=True)
class Case:
    """One comparison: `method` on a video of `grid` with features of width `d`."""

    method: str
    grid: tuple[int, int, int]
    d: int
    share: float


CASES = (
    Case("divprune", (32, 14, 14), 1024, 0.25),
    Case("divprune", (8, 14, 14), 896, 0.25),
    Case("divprune", (8, 14, 14), 896, 0.10),
    Case("evs", (8, 14, 14), 896, 0.25),
    Case("evs", (32, 14, 14), 1024, 0.25),
    Case("holitom_inner@llm2", (8, 14, 14), 896, 0.25),
)


def measure(cases: Sequence[Case] = CASES, repeats: int = 5) -> Iterator[dict[str, Any]]:
    """Time every case on one thread, method and textbook in turn.

    Args:
        cases: What to measure.
        repeats: Rounds; the textbook loop of more than 4,000 tokens, many seconds, runs once.

    Yields:
        Rows with `method`, `n`, `d`, `budget`, the medians `ms` and `textbook_ms` in processor
        milliseconds, `speedup` and `same_indices`; `case` and `median_ms` are for the table.

    Raises:
        MmfastError: A method has no textbook formulation here.
    """
    for case in cases:
        name = case.method.partition("@")[0]
        if name not in TEXTBOOKS:
            raise MmfastError(f"no textbook for {name!r}; choices: {', '.join(sorted(TEXTBOOKS))}")
        with one_thread():
            yield _row(case, TEXTBOOKS[name], repeats)


def result_rows(progress: Callable[[int, int], None] | None = None) -> list[dict[str, Any]]:
    """All cases as rows for `assets/results/selection-cpu.jsonl`."""
    shared = {"suite": "selection", "device": "cpu", "dtype": "float32", **environment()}
    rows = []
    for row in measure():
        rows.append({**shared, **row})
        if progress is not None:
            progress(len(rows), len(CASES))
    return rows


def _row(case: Case, textbook: Callable[[Tokens, int], Tensor], repeats: int) -> dict[str, Any]:
    tokens = video(case.grid, case.d)
    budget = count(case.share, tokens.n) or 1
    times: dict[str, list[float]] = {"ours": [], "textbook": []}
    kept, expected = _ours(tokens, case, budget), torch.empty(0)
    for turn in range(repeats):
        kept = _timed(times["ours"], lambda: _ours(tokens, case, budget))
        if turn == 0 or tokens.n <= 4000:
            expected = _timed(times["textbook"], lambda: textbook(tokens, budget))
    ms, slow = (statistics.median(times[key]) for key in ("ours", "textbook"))
    return {
        "case": f"{case.method}, {tokens.n:,} x {case.d:,}, keep {case.share:.0%}",
        "method": case.method,
        "n": tokens.n,
        "d": case.d,
        "budget": budget,
        "ms": ms,
        "median_ms": ms,
        "textbook_ms": slow,
        "speedup": slow / ms,
        "same_indices": kept.equal(expected.sort().values),
        "threads": 1,
    }


def _ours(tokens: Tokens, case: Case, budget: int) -> Tensor:
    found = reduce(tokens, f"{case.method}:{budget}")
    if not isinstance(found, Reduction):
        raise MmfastError(f"{case.method!r} gave several reductions for one item")
    found.apply(tokens.x)
    return found.keep


def _timed(times: list[float], call: Callable[[], Tensor]) -> Tensor:
    # Time of this process alone: other load on the machine counts little.
    start = time.process_time()
    result = call()
    times.append((time.process_time() - start) * 1e3)
    return result


def video(grid: tuple[int, int, int], d: int, seed: int = 0) -> Tokens:
    """A textured scene with camera noise and a patch that moves: tokens with attention scores."""
    frames, rows, columns = grid
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, d, 5, 5, generator=generator)
    scene = F.interpolate(coarse, size=(rows, columns), mode="bilinear")[0].permute(1, 2, 0)
    scene = scene + 0.5 * torch.randn(rows, columns, d, generator=generator)
    clip = scene + 0.2 * torch.randn(frames, rows, columns, d, generator=generator)
    side = min(3, rows, columns)
    patch, top = torch.randn(side, side, d, generator=generator), (rows - side) // 2
    for frame in range(frames):
        left = frame % (columns - side + 1)
        clip[frame, top : top + side, left : left + side] = patch
    attn = torch.rand(frames * rows * columns, generator=generator)
    return Tokens(clip.reshape(-1, d), attn=attn, grid=grid)


def _divprune(tokens: Tokens, budget: int) -> Tensor:
    """Every step reads the distances to all chosen rows again."""
    rows = F.normalize(tokens.x, dim=-1)
    distance = 1 - rows @ rows.T
    picks = [int(distance.topk(2, dim=0, largest=False).values[1].argmax())]
    while len(picks) < budget:
        picks.append(int(distance[torch.tensor(picks)].amin(0).argmax()))
    return torch.tensor(picks)


def _evs(tokens: Tokens, budget: int) -> Tensor:
    """Cosine over full-size temporaries and a sort of everything."""
    frames = tokens.grid[0] if tokens.grid else 1
    clip = tokens.x.unflatten(0, (frames, -1))
    change = 1 - F.cosine_similarity(clip[1:], clip[:-1], dim=-1)
    change = torch.cat([255 * torch.ones_like(change[:1]), change])
    return change.flatten().argsort(descending=True, stable=True)[:budget]


def _holitom_inner(tokens: Tokens, budget: int) -> Tensor:
    """One merge after the other, each on the states that the last one left."""
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
