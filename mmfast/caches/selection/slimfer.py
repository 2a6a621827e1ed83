"""SlimInfer: blocks of a prompt in host memory, brought while the layer before computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mmfast.caches.selection.quest import chosen_pages, pages_of
from mmfast.core.errors import SpecError
from mmfast.core.kv import LayerStep, StepChoice, StepSelector
from mmfast.core.registry import policy
from mmfast.ops.pages import PageTable


@policy("slimfer", paper="2508.06447", needs=(), role="select", moment="always")
def slimfer(budget: int | float, *, block: int = 16, unit: int = 4) -> StepSelector:
    """Keep all in host memory, and bring each step the blocks it needs, a layer ahead of their use.

    Long et al. (AAAI 2026): a prompt loses blocks of hidden states at some layers, and between two
    of these layers the same blocks are read, so that it is known without a guess what the next
    layer needs. The first layer, and the first behind every cut, compares its query with the mean
    key of each `unit` of tokens; a block counts as much as its best unit, in the attention to all
    of them, mean over the heads. Layers behind it read the same blocks, and while one computes,
    those of the next come from host memory. The cuts are the reducer `slimfer`'s:
    `reduce="slimfer:0.5"` with `cache="slimfer:0.25"`.

    Args:
        budget: Entries to read, the same in every head, in whole blocks; a share is of those that
            the layer holds at the step. The block of the newest entry is read beside them.
        block: Entries of a block, counted among those that the layer holds.
        unit: Entries of a block that share a mean key; `block` is a multiple of it.

    Raises:
        SpecError: A block below 1, or a unit that does not divide it.
    """
    if block < 1 or unit < 1 or block % unit:
        raise SpecError(
            f"'slimfer' got block={block}, unit={unit}; choose blocks of whole units, as in "
            "'slimfer:0.25?block=16&unit=4'"
        )
    return BlocksBelow(budget, block, unit)


@dataclass(frozen=True)
class BlocksBelow:
    """Blocks that the first of several layers with the same entries chooses for all of them."""

    budget: int | float
    block: int = 16
    unit: int = 4
    alone: bool = False
    across: bool = True
    host: bool = True

    @property
    def beside(self) -> float:
        """A mean for each unit, as large as a key."""
        return 0.5 / self.unit

    def check(self, depths: int) -> None:
        """Every layer reads a part."""

    def choose(self, step: LayerStep) -> StepChoice:
        """The blocks of the layer before where it holds the same, else those of this query."""
        count = (step.n - 1) // self.block  # complete ones before the newest entry
        wanted = pages_of(self.budget, step.n, self.block)
        if wanted >= count:
            return StepChoice()
        last: StepChoice | None = step.shared.get("blocks") if step.same else None
        if last is not None:
            return replace(last, nbytes=0)
        units = step.memory.setdefault("units", PageTable(self.block, partial(means, self.unit)))
        units = units.grow(step.keys, count, step.query.device)
        pages = chosen_pages(step, self._score(step, units)[:, None], self.block, wanted)
        nbytes = units.numel() * units.element_size()
        choice = StepChoice(pages, self.block, count * self.block, nbytes=nbytes, onward=True)
        step.shared["blocks"] = choice
        return choice

    def _score(self, step: LayerStep, units: Tensor) -> Tensor:
        """Attention `[B, P]` to the best unit of each block; `units` `[B, H, P, units d]`."""
        keys = units.unflatten(-1, (self.block // self.unit, -1)).flatten(2, 3)  # [B, H, U, d]
        logits = torch.einsum("bhgd,bhud->bhgu", step.query, keys).mul_(step.scale)
        precise = torch.promote_types(logits.dtype, torch.float32)
        share = logits.softmax(-1, dtype=precise).mean((1, 2))  # [B, U]
        best: Tensor = share.unflatten(-1, (units.shape[2], -1)).amax(-1)
        return best


def means(unit: int, blocks: Tensor) -> Tensor:
    """Mean keys `[..., block / unit * d]` of the units of blocks `[..., block, d]`."""
    mean: Tensor = blocks.unflatten(-2, (-1, unit)).mean(-2).flatten(-2)
    return mean
