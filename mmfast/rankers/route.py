"""A router in front of generation: the question decides how many tokens are worth reading.

Semantic routers of language models send the prompts that profit to a dear way of answering, and all
others to a cheap one. Here the ways are reductions, such as `divprune:8`, `divprune:32` and `all`,
and a small head learned for which questions a model gives the same answer as on all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import gelu

from mmfast.compressors.base import read_module
from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.spec import Spec, parse, run
from mmfast.core.tokens import Tokens
from mmfast.rankers import fitted

ALL = "all"  # a way that keeps every token
SIGNALS = {"x", "grid", "query"}  # what a way may read: the router's own file names it, not a model


def way_of(text: str) -> Spec | None:
    """Read a way: a reducer at `pre` that reads features, raster and question; None for `all`.

    SpecError for anything else, as the signals of a model are prepared before the way is known.
    """
    if text == ALL:
        return None
    stages = parse(text)
    fits = len(stages) == 1 and stages[0].method.kind == "reducer" and stages[0].site == "pre"
    if not fits or not {*stages[0].method.needs} <= SIGNALS or stages[0].method.scope != "item":
        raise SpecError(
            f"{text!r} is no way for a router; give {ALL!r} or one reducer at site 'pre' that "
            "reads features, raster and question alone, such as 'divprune:32'"
        )
    return stages[0]


class BudgetRouter(nn.Module):
    """Log-odds that a question keeps its answer under each way but the last.

    The mean of the question's embeddings goes through one hidden layer. The ways stand from cheap
    to dear, and the last one is taken where no other is trusted.
    """

    name = "route"

    def __init__(self, width: int, ways: Sequence[str], *, inner: int = 96) -> None:
        super().__init__()
        self.config: dict[str, Any] = {"width": width, "ways": list(ways), "inner": inner}
        if len(ways) < 2:
            raise SpecError(f"a router chooses among two ways or more, not {list(ways)}")
        self.specs = [way_of(way) for way in ways]
        self.enter = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner))
        self.leave = nn.Linear(inner, len(ways) - 1)

    def forward(self, question: Tensor) -> Tensor:
        """Judge mean embeddings `[..., D]` of K ways: `[..., K - 1]`, float32."""
        found: Tensor = self.leave(gelu(self.enter(question.float())))
        return found

    def choose(self, question: Tensor, sure: float) -> tuple[Tensor, Tensor]:
        """Choose for mean embeddings `[..., D]`.

        Returns:
            The first way whose probability is at least `sure`, else the last, `[...]` int64, and
            the probabilities `[..., K - 1]`.
        """
        chance = self(question).sigmoid()
        trusted = nn.functional.pad(chance >= sure, (0, 1), value=True)
        return trusted.int().argmax(-1), chance


def load(path: str | Path) -> BudgetRouter:
    """Read the weights, on the CPU in float32; ModelError where the file holds none."""
    found: BudgetRouter = read_module(path, "ranking", BudgetRouter)
    return found


@register(
    "route", kind="ranker", paper="2510.08731", needs=("x", "query"), adaptive=True, routes=True
)
def route(tokens: Tokens, budget: None, *, sure: float = 0.9, path: str = "") -> Reduction:
    """Let the question choose one of several reductions, cheap where the answer stays the same.

    Wang et al., 2025 (When to Reason): a classifier of the prompt switches reasoning on only where
    it pays. Here a small head reads the mean embedding of the question and chooses how many visual
    tokens are read. It was taught by the model itself: a way is right for a question if the answer
    is the one on all tokens. Rows of a batch go their own ways; all clips of a prompt go the same
    one, as they share the question. The trace says which.

    Args:
        tokens: Features `x` `[N, D]`, the embedded text `query` `[T, D]`, and a `grid` where a
            way reads it.
        budget: None: the ways have budgets of their own.
        sure: Least probability, in [0, 1], that the answer stays as it is.
        path: File of the weights; "" is `rankers/route.safetensors` beside the model's checkpoint.
    """
    if not 0.0 <= sure <= 1.0:
        raise SpecError(f"knob sure={sure} of 'route' is no probability; give 0 to 1, such as 0.9")
    judge: BudgetRouter = fitted("route", path, tokens, load)
    way, chance = judge.choose(tokens.need("query").float().mean(-2), sure)
    number = int(way)
    spec, last = judge.specs[number], len(judge.specs) - 1
    count = None if spec is None else spec.count(tokens.n, tokens.grid[0] if tokens.grid else 1)
    found = Reduction.identity(tokens.n, device=tokens.x.device)
    if spec is not None and count != tokens.n:
        chosen = run(spec, tokens)
        assert isinstance(chosen, Reduction)
        found = chosen
    most = float(chance[number] if number < last else chance.max())
    why = f"{most:.2f} sure" if number < last else f"others at most {most:.2f} sure"
    return replace(found, note=f"{judge.config['ways'][number]} ({why})")
