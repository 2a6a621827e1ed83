"""The cost of choosing: a method run on random tokens of the size that it will get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmfast.core.spec import Spec, count, run
from mmfast.core.tokens import Tokens
from mmfast.planner.calibration import Bench
from mmfast.planner.cost import Work

_SHARE = 0.25  # of the budget it is timed at: choosing depends on it far less than the layers do
_WORDS = 16  # text tokens of a question


def selection_ms(bench: Bench, stage: Spec, work: Work) -> float:
    """Milliseconds that a stage takes to choose from all items of a request.

    Raises:
        MmfastError: The method refuses tokens like these.
    """
    spec = replace(stage, budget=_SHARE)
    total, known = 0.0, dict[int, float]()
    for n, grid in zip(work.items, work.grids, strict=True):
        if count(_SHARE, n) == n:
            continue
        if n not in known:
            tokens = _tokens(bench, n, grid if stage.site == "pre" else None)
            run(spec, tokens)  # raises here, outside the clock
            known[n] = bench.duration(partial(run, spec, tokens))
        total += known[n]
    return total


def _tokens(bench: Bench, n: int, grid: tuple[int, int, int] | None) -> Tokens:
    """Noise with every signal that the model side may supply."""

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, device=bench.device).to(bench.dtype)

    def scores(*size: int) -> Tensor:
        return torch.rand(*size, device=bench.device)

    t, h, w = grid or (1, 1, n)
    makers: dict[str, Callable[[], Any]] = {
        **{name: lambda: scores(n) for name in ("attn_first", "attn_middle", "attn_visual")},
        "attn_window": lambda: scores(n),
        "attn_text": lambda: scores(n, _WORDS),
        "text_attn": lambda: scores(_WORDS),
        "keys": lambda: noise(n, 64),
        "tile": lambda: torch.arange(n, device=bench.device) * 5 // n,
        "place": lambda: torch.cartesian_prod(*(torch.arange(k) for k in (t, h, w))).reshape(n, 3),
    }
    return Tokens(
        noise(n, bench.shape.hidden),
        attn=scores(n),
        query=noise(_WORDS, bench.shape.hidden),
        grid=grid,
        signals={name: make() for name, make in makers.items()},
    )
