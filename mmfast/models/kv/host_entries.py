"""Keys and values in host memory, of which each decode step gets those that it reads.

Some are on their way while the step before is still computed: a thread gathers and copies them, and
layers behind, the head of the model and the choice of a token take their time meanwhile.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmfast.core.kv import StepChoice
from mmfast.ops.pages import selected

Pair = tuple[Tensor, Tensor]
_AHEAD = "ahead"  # the name of a `Fetch` in the state that lies beside the entries of a layer


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "mmfast-fetch")


class Fetch:
    """Entries `[B, H, m, d]` of the first n ones, on their way to a device."""

    def __init__(self, choice: StepChoice, keys: Tensor, values: Tensor, to: torch.device) -> None:
        self._n, self._pages = int(keys.shape[2]), choice.pages
        index, _ = choice.entries(self._n)
        self._count = int(index.shape[-1])
        self._pair: Pair | Future[Pair] = _worker().submit(copied, keys, values, index, to)

    def pair(self) -> Pair:
        """Keys and values, waited for."""
        if isinstance(self._pair, Future):
            self._pair = self._pair.result()
        return self._pair

    def of(self, choice: StepChoice) -> int:
        """Return how many entries of a choice are here, the first ones; 0 for another choice."""
        return self._count if choice.pages is self._pages else 0

    def trim(self, entries: int) -> bool:
        """Return False where entries that were fetched are taken back."""
        return self._n <= entries

    def __deepcopy__(self, memo: dict[int, Any]) -> Fetch:
        twin = object.__new__(Fetch)
        twin.__dict__.update(self.__dict__, _pair=self.pair())
        return twin


def copied(keys: Tensor, values: Tensor, index: Tensor, to: torch.device) -> Pair:
    """Copy entries at `index` `[B, 1 or H, m]` to a device."""
    here = index.to(keys.device).expand(*keys.shape[:2], -1)
    keys, values = selected(keys, values, here)
    return keys.to(to), values.to(to)


def fetch(
    choice: StepChoice,
    index: Tensor,
    keys: Tensor,
    values: Tensor,
    memory: dict[str, Any],
    to: torch.device,
) -> tuple[Pair, int]:
    """Bring the entries `index` `[B, H, m]` of a choice to a device, and send for those after.

    Returns:
        Keys and values `[B, H, m, d]`, and how many entries of each head were waited for.
    """
    sent: Fetch | None = memory.pop(_AHEAD, None)
    here = 0 if sent is None else sent.of(choice)
    found = copied(keys, values, index[..., here:], to)
    if here and sent is not None:
        early = sent.pair()
        found = torch.cat([early[0], found[0]], 2), torch.cat([early[1], found[1]], 2)
    if choice.ahead is not None:
        memory[_AHEAD] = Fetch(choice.ahead, keys, values, to)
    return found, int(index.shape[-1]) - here
