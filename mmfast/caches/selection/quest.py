"""Quest: bounds of a page's keys tell which pages a query may need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.kv import LayerStep, StepChoice, StepSelector
from mmfast.core.registry import policy
from mmfast.ops.pages import PageTable, bound_scores, key_bounds


@policy("quest", paper="2406.10774", needs=(), role="select", moment="always")
def quest(budget: int | float, *, page: int = 16, skip: int = 2) -> StepSelector:
    """Read at every step the pages whose keys can have the largest products with the query.

    Tang et al. (ICML 2024): of every page of consecutive entries the largest and the smallest
    number of each channel of its keys are kept. From them follows how large the product of the
    query and a key of the page can be, and the pages with the largest of these bounds are read, in
    every head its own. Bounds are found once, when a page is full.

    Args:
        budget: Entries to read in every head, in whole pages; a share is of the entries held at
            the step. The page of the newest entry is read beside them.
        page: Entries of a page.
        skip: Layers at the start that read everything.

    Raises:
        SpecError: A page below 1 or a negative skip.
    """
    if page < 1 or skip < 0:
        raise SpecError(
            f"'quest' got page={page}, skip={skip}; choose at least 1 entry and 0 layers, as in "
            "'quest:0.1?page=16&skip=2'"
        )
    return BoundedPages(budget, page, skip)


@dataclass(frozen=True)
class BoundedPages:
    """Pages by the bound on the product with the query, mean over the heads of a group."""

    budget: int | float
    page: int = 16
    skip: int = 2
    alone: bool = False
    across: bool = False
    host: bool = False

    @property
    def beside(self) -> float:
        """Bounds of each page, as large as an entry."""
        return 1 / self.page

    def check(self, depths: int) -> None:
        """Refuse to skip every layer."""
        refuse_all_skipped("quest", self.skip, depths)

    def choose(self, step: LayerStep) -> StepChoice:
        """The best pages of every head."""
        count = (step.n - 1) // self.page  # complete ones before the newest entry
        wanted = pages_of(self.budget, step.n, self.page)
        if step.depth < self.skip or wanted >= count:
            return StepChoice()
        pages, nbytes = best_pages(step, self.page, wanted, count, columns=True)
        return StepChoice(pages, self.page, count * self.page, nbytes=nbytes)


def best_pages(
    step: LayerStep, page: int, wanted: int, count: int, columns: bool = False
) -> tuple[Tensor, int]:
    """Numbers `[B, H, P]` of the best of `count` pages and of those that stay, and bytes read.

    The bounds are kept up in `step.memory["bounds"]`, by `columns` where no row is read alone.
    """
    table = step.memory.setdefault("bounds", PageTable(page, key_bounds, columns))
    bounds = table.grow(step.keys, count)
    score = bound_scores(step.query, bounds)
    return chosen_pages(step, score, page, wanted), bounds.numel() * bounds.element_size()


def chosen_pages(
    step: LayerStep, score: Tensor, page: int, wanted: int, within: bool = False
) -> Tensor:
    """Numbers `[B, H, P]` of the pages with the highest scores `[B, H, count]`.

    Pages with an entry that stays come on top: beside those wanted, or `within` their number.
    """
    count = score.shape[-1]
    if step.stays is not None:
        stays = step.stays[: count * page].view(count, page).any(-1)
        score, forced = score.masked_fill(stays, torch.inf), int(stays.sum())
        wanted = max(wanted, forced) if within else wanted + forced
    return score.topk(min(count, wanted), sorted=False).indices


def pages_of(budget: int | float, n: int, page: int) -> int:
    """Return how many pages a budget of entries is, of n; at least 1."""
    return max(1, round(tokens_of(budget, n) / page))


def tokens_of(budget: int | float, n: int) -> int:
    """Return how many of n entries a budget is; at least 1."""
    return max(1, round(budget * n)) if isinstance(budget, float) else budget


def refuse_all_skipped(name: str, skip: int, depths: int) -> None:
    """Refuse (SpecError) knobs under which no layer reads a part."""
    if skip >= depths:
        raise SpecError(
            f"{name!r} with skip={skip} reads everything in all {depths} layers of full attention "
            f"that this model has; write '{name}:0.1?skip=0'"
        )
