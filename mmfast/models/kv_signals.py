"""What a KV policy reads from the attention of a decoder layer, per KV head and exact."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.caches.plan import CachePlan
from mmfast.models.kv_notes import TOTAL, WINDOW
from mmfast.models.kv_prompt import Part
from mmfast.models.probe import probing
from mmfast.models.scores import head_mass

# The part of a prompt that this thread's call brings (None in a decode step), and its padding
# `[B, n]`; None in the place of both: look away.
Now = Callable[[], tuple[Part | None, Tensor | None] | None]


class Attention:
    """Sums the attention that the entries of a cache receive, while it is computed.

    Args:
        plan: What is read.
        steps: Decode steps count, too.
        now: See `Now`.
    """

    def __init__(self, plan: CachePlan, steps: bool, now: Now) -> None:
        self._window = plan.window
        self._total = "attn_sum" in plan.needs
        self._steps, self._now = steps, now
        self._local = threading.local()

    @property
    def reads(self) -> bool:
        """Whether the plan reads attention at all."""
        return bool(self._window) or self._total

    @contextmanager
    def watching(self, modules: Mapping[int, nn.Module]) -> Iterator[None]:
        """Watch attention modules, by decoder layer."""
        look: Any = torch.compiler.disable(self._look)
        hooks = {module: partial(look, index) for index, module in modules.items()}
        with probing(hooks, levels=self._total):
            yield

    def take(self, index: int) -> dict[str, Tensor]:
        """Notes `[B, H, n]` to add, from the call that this thread is in, of one layer."""
        found: dict[str, Tensor] = self._local.__dict__.pop(str(index), {})
        return found

    def _look(
        self,
        index: int,
        _: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float | None,
        causal: bool,
        lse: Tensor | None = None,
    ) -> None:
        now = self._now()
        if now is None or (now[0] is None and not self._steps):
            return
        part, ok = now
        new = query.shape[2] - (part.drafts if part else 0)
        total, window = [], []
        for row in range(len(query)):
            places = torch.arange(new, device=query.device)
            if ok is not None:
                places = places[ok[row, :new].to(query.device)]
            if self._total:
                total.append(head_mass(query, key, row, places, mask, scaling, causal, lse))
            if self._window and part is not None:
                recent = places[max(0, len(places) - max(0, self._window - part.rest)) :]
                window.append(head_mass(query, key, row, recent, mask, scaling, causal))
        self._local.__dict__[str(index)] = {
            name: torch.stack(rows) for name, rows in ((TOTAL, total), (WINDOW, window)) if rows
        }
