"""Rows, rates and a request for tests of the planner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register, unregister
from mmfast.core.tokens import Tokens
from mmfast.planner.cost import Work
from mmfast.planner.planner import Planner
from mmfast.planner.rates import Rates

WORK = Work(160, 1, (128,), 24576, ((2, 8, 8),))
# A device on which everything is known: a layer takes 1 ms and 0.1 ms a token.
RATES = Rates(
    linear=((10, 2.0), (1000, 101.0)),
    attention=((10, 0.01), (1000, 50.0)),
    head=0.5,
    encode=((24576, 20.0),),
    signal=((24576, 1.0),),
)
SHARES = (0.5, 0.25, 0.1, 0.05)


def row(reduce: str | None, score: float, kept: float, **more: Any) -> dict[str, Any]:
    known = {"model": "m", "n": 1000, "seed": 1}
    return {"reduce": reduce, "score": score, "kept": kept, **known, **more}


class Choosing(dict[str, float]):
    """Choosing costs what was said of the method, else half a millisecond."""

    def __contains__(self, key: object) -> bool:
        return True

    def get(self, key: str, default: Any = None) -> float:
        return super().get(key.partition(":")[0], 0.5)


def settle(pipe_planner: Any, name: str, shares: tuple[float, ...] = SHARES) -> None:
    """Let the planner of a pipeline or an engine know rows of a method that loses nothing."""
    known = {"model": "tiny-video"}
    rows = [row(None, 0.97, 288, **known)]
    for share in shares:
        rows += [row(f"{name}:{share}", 0.97, 288 * share, **known)]
        rows += [row(f"random:{share}", 0.5, 288 * share, **known)]
    model = pipe_planner.pipe.model
    made = pipe_planner.planner = Planner(model, "tiny-video", rows, RATES, remember=False)
    made.learner.rates = Rates(**{**vars(RATES), "select": Choosing()})
    made.learner.settle = lambda *_: ""  # nothing depends on the clock
    made.learner.learn = lambda *_: None


@contextmanager
def blinding() -> Iterator[None]:
    """A reducer "blind" that throws all of use away: what it keeps is empty."""

    @register("blind")
    def on_nothing(tokens: Tokens, budget: int | None) -> Reduction:
        """Keep places, and nothing at them."""
        kept = Reduction.prune(torch.arange(budget or 1), tokens.n)
        return Reduction(kept.keep, kept.owner, torch.zeros(tokens.n))

    yield
    unregister("blind")
