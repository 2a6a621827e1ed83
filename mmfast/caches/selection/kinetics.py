"""Kinetics: pages by their mean key, as many as a cost allows that counts the search, too."""

from __future__ import annotations

from dataclasses import dataclass

from mmfast.caches.selection.quest import chosen_pages, refuse_all_skipped, tokens_of
from mmfast.core.errors import SpecError
from mmfast.core.kv import LayerStep, StepChoice, StepSelector
from mmfast.core.registry import policy
from mmfast.ops.pages import PageTable, key_means, mean_scores


@policy("kinetics", paper="2506.05333", needs=(), role="select", moment="always")
def kinetics(budget: int | float, *, page: int = 16, skip: int = 0) -> StepSelector:
    """Read at every step the pages of the most alike mean keys that a cost has room for.

    Sadhukhan et al. (NeurIPS 2025) add up what a step computes and what it reads. Attention to an
    entry reads a key and a value and multiplies both, its page's mean is one key more to read and
    multiply: half an entry, whatever the device. So a budget is a cost in entries, of which a half
    for every page pays for the search, and the rest, in whole pages, for what is read.

    Args:
        budget: Cost of a layer's attention; a share is of that of reading all entries held. The
            newest page and what stands by place are paid first, and one page is always found.
        page: Entries of a page.
        skip: Layers at the start that read everything.

    Raises:
        SpecError: A page below 1, a negative skip, or a share that the search alone takes.
    """
    if page < 1 or skip < 0:
        raise SpecError(
            f"'kinetics' got page={page}, skip={skip}; choose at least 1 entry and 0 layers, as in "
            "'kinetics:0.1?page=16&skip=0'"
        )
    if isinstance(budget, float) and budget <= 1 / (2 * page):
        raise SpecError(
            f"'kinetics:{budget}' pays for no more than the search, which costs {1 / (2 * page):g} "
            f"with page={page}; write a larger share or '?page={4 * page}'"
        )
    return PaidPages(budget, page, skip)


@dataclass(frozen=True)
class PaidPages:
    """Pages by the product of query and mean key, mean over the heads of a group."""

    budget: int | float
    page: int = 16
    skip: int = 0
    alone: bool = False
    across: bool = False
    host: bool = False

    @property
    def beside(self) -> float:
        """A mean for each page, as large as a key."""
        return 0.5 / self.page

    def check(self, depths: int) -> None:
        """Refuse to skip every layer."""
        refuse_all_skipped("kinetics", self.skip, depths)

    def choose(self, step: LayerStep) -> StepChoice:
        """The best pages of every head that the cost leaves room for."""
        count = (step.n - 1) // self.page  # complete ones before the newest entry
        cost = tokens_of(self.budget, step.n)
        if step.depth < self.skip or cost >= step.n or count < 2:
            return StepChoice()
        wanted = max(1, pages_paid(cost, step.n, self.page))
        table = step.memory.setdefault("means", PageTable(self.page, key_means, columns=True))
        means = table.grow(step.keys, count)
        pages = chosen_pages(step, mean_scores(step.query, means), self.page, wanted, within=True)
        nbytes = means.numel() * means.element_size()
        return StepChoice(pages, self.page, count * self.page, nbytes=nbytes)


def pages_paid(cost: float, n: int, page: int) -> int:
    """Return how many pages of n entries a cost has room for, beside the newest and the search."""
    count = (n - 1) // page
    return int((cost - count / 2 - (n - count * page)) // page)
