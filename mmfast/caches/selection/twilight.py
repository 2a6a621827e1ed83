"""Twilight: as many entries as hold a share of the attention, whatever their number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.caches.selection.quest import best_pages, pages_of, refuse_all_skipped
from mmfast.core.errors import SpecError
from mmfast.core.kv import LayerStep, StepChoice, StepSelector
from mmfast.core.reduction import gather_rows
from mmfast.core.registry import policy
from mmfast.core.spec import Budget
from mmfast.ops.pages import PageTable, heaviest, level_codes, level_logits, marked_places


@policy("twilight", paper="2502.02770", needs=(), role="select", moment="always", adaptive=True)
def twilight(budget: Budget, *, base: float = 0.25, page: int = 16, skip: int = 2) -> StepSelector:
    """Read at every step the fewest entries that hold a share of the estimated attention.

    Lin et al. (NeurIPS 2025): `quest` names candidates, generously; a copy of their keys in four
    bits tells how the attention of each query head is spread over them and the newest page, and the
    heaviest that hold the share together are read. Heads that share a key head read what any of
    them needs. A layer with flat attention reads more than one with sharp attention.

    Args:
        budget: Share of the attention, in (0, 1]; None is 0.85, and 1.0 reads everything.
        base: Share of the entries held that are candidates, in whole pages.
        page: Entries of a page.
        skip: Layers at the start that read everything.

    Raises:
        SpecError: A budget or base that is no share, a page below 1 or a negative skip.
    """
    share = 0.85 if budget is None else budget
    fair = isinstance(share, float) and 0 < share <= 1 and 0 < base <= 1
    if not isinstance(share, float) or not fair or page < 1 or skip < 0:
        raise SpecError(
            f"'twilight' got {budget!r}, base={base}, page={page}, skip={skip}; write a share of "
            "the attention, and a base in (0, 1], as 'twilight:0.85?base=0.25'"
        )
    return MassCover(share, float(base), page, skip)


@dataclass(frozen=True)
class MassCover:
    """Entries by estimated attention, until they hold a share of it."""

    share: float
    base: float = 0.25
    page: int = 16
    skip: int = 2
    alone: bool = False
    across: bool = False
    host: bool = False

    @property
    def beside(self) -> float:
        """Bounds of each page, and keys in four bits."""
        return 1 / self.page + 0.125

    def check(self, depths: int) -> None:
        """Refuse to skip every layer."""
        refuse_all_skipped("twilight", self.skip, depths)

    def choose(self, step: LayerStep) -> StepChoice:
        """The heaviest entries of every head, at least one."""
        page, count = self.page, (step.n - 1) // self.page
        if step.depth < self.skip or not count:
            return StepChoice()
        wanted = min(count, pages_of(self.base, step.n, page))
        pages, nbytes = best_pages(step, page, wanted, count)  # [B, H, P]
        mass, copied = self._mass(step, pages, count)
        needed = heaviest(mass, self.share).any(2)[..., : pages.shape[2] * page]  # [B, H, P page]
        places = (pages[..., None] * page + torch.arange(page, device=pages.device)).flatten(2)
        if step.stays is not None:
            needed |= step.stays[places]
        order, real = marked_places(needed)
        chosen = places.gather(-1, order)
        return StepChoice(chosen, 1, count * page, real, nbytes + copied)

    def _mass(self, step: LayerStep, pages: Tensor, count: int) -> tuple[Tensor, int]:
        """Attention `[B, H, G, P * page + t]` to candidates and the newest page; bytes read."""
        table = step.memory.setdefault("codes", PageTable(self.page, level_codes))
        codes = gather_rows(table.grow(step.keys, count), pages)
        bounds = gather_rows(step.memory["bounds"].grow(step.keys, count), pages)
        estimated = level_logits(step.query, codes, bounds, self.page)
        newest = step.query.float() @ step.keys[:, :, count * self.page :].float().transpose(2, 3)
        mass = torch.cat([estimated, newest], -1).mul_(step.scale).softmax(-1)
        return mass, codes.numel() + bounds.numel() * bounds.element_size()
