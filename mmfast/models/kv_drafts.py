"""Drafts under a policy that acts at every step: each sees what would be left at its own turn.

Assisted decoding brings several tokens at once. The cache is thinned before the call only, as the
drafts may be taken back; what each of them would have seen leave is hidden from it by a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import ModelError
from mmfast.models.kv_evict import basis, settled
from mmfast.models.kv_notes import KIND, PADDING, PINNED, fill
from mmfast.models.lengths import is_short
from mmfast.models.probe import intercepting


class Drafts:
    """Masks for calls that bring drafts.

    Args:
        plan: Position policies that act at every step, perhaps with a score behind prompts.
        cache: Gives the cache of the call that this thread is in; None where it brings a prompt.
    """

    def __init__(self, plan: CachePlan, cache: Callable[[], Any]) -> None:
        self._plan, self._cache = plan, cache

    @contextmanager
    def watching(self, modules: dict[int, nn.Module]) -> Iterator[None]:
        """Stand around attention modules, by decoder layer."""
        around: Any = torch.compiler.disable(self._around)
        with intercepting({module: partial(around, i) for i, module in modules.items()}):
            yield

    def _around(
        self,
        index: int,
        call: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        mask = attention_mask
        cache = self._cache()
        if cache is not None and query.shape[2] > 1 and index < len(cache.layers):
            layer = cache.layers[index]
            if is_short(layer) and layer.notes is not None:
                seen = self._seen(layer, query.shape[2])
                mask = hidden(module, query, mask, seen)
        return call(module, query, key, value, mask, *args, **kwargs)

    def _seen(self, layer: Any, drafts: int) -> Tensor:
        """What each of the last tokens sees, `[B, 1 or H, drafts, n]`."""
        notes = fill(layer)
        kinds = notes[KIND].long()
        groups = max(note.shape[1] for note in notes.values())
        kinds = kinds.expand(-1, groups, -1)
        seen = torch.zeros(*kinds.shape[:2], drafts, kinds.shape[2], dtype=torch.bool)
        for b in range(len(kinds)):
            plan = settled(self._plan, basis(layer, b))
            for g in range(groups):
                pinned = notes[PINNED][b].expand(groups, -1)[g] if PINNED in notes else None
                seen[b, g] = _turns(plan, kinds[b, g].cpu(), pinned, drafts)
        return seen.to(kinds.device)


def _turns(plan: CachePlan, kinds: Tensor, pinned: Tensor | None, drafts: int) -> Tensor:
    """`[drafts, n]` of one row and head."""
    n = len(kinds)
    alive = (kinds[: n - drafts] != PADDING).nonzero()[:, 0]
    seen = torch.zeros(drafts, n, dtype=torch.bool)
    for turn in range(drafts):
        if turn:  # the cache is thinned before the first of them already
            stays = plan.standing(kinds[alive])
            stays = stays if pinned is None else stays | pinned.cpu()[alive]
            alive = alive[stays]
        alive = torch.cat([alive, torch.tensor([n - drafts + turn])])
        seen[turn, alive] = True
    return seen


def hidden(module: Any, query: Tensor, mask: Any, seen: Tensor) -> Any:
    """The mask with more hidden.

    Args:
        module: The attention module.
        query: `[B, H, L, d]`.
        mask: None, bool or additive `[B | 1, 1, L, S or more]`.
        seen: `[B, 1 or Hkv, L or 1, S]` bool, what may be seen at most; causal.

    Raises:
        ModelError: Attention that takes no such mask.
    """
    kind = str(getattr(getattr(module, "config", None), "_attn_implementation", ""))
    if "flash" in kind or not (mask is None or isinstance(mask, Tensor)):
        raise ModelError(
            f"tokens of one call see different entries under this cache policy, which {kind!r} "
            "attention cannot; call model.set_attn_implementation('sdpa'), ask one by one, or "
            "leave out the draft"
        )
    if seen.shape[1] > 1:
        seen = seen.repeat_interleave(query.shape[1] // seen.shape[1], 1)
    if mask is not None and mask.dtype == torch.bool:
        return seen & mask[..., : seen.shape[-1]]
    if mask is None and kind != "eager":
        return seen
    low = torch.finfo(query.dtype).min
    if mask is None:
        mask = torch.zeros(1, dtype=query.dtype, device=query.device)
        return mask.expand(seen.shape).masked_fill(~seen, low)
    return mask[..., : seen.shape[-1]].masked_fill(~seen, low)
