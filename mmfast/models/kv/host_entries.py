"""Keys and values in host memory, of which each decode step gets those that it reads.

Some are on their way before they are asked for: a thread gathers and copies them. What the next
step will read comes while layers behind, the head of the model and the choice of a token take their
time; what the next layer reads comes while the one before it computes.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

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
        width = (keys.shape[3] + values.shape[3]) * keys.element_size()
        self.nbytes = keys.shape[0] * keys.shape[1] * self._count * width
        lane = CopyLane(to) if to.type == "cuda" and torch.cuda.is_available() else None
        self._lane = lane
        work = copied if lane is None else lane.copied
        self._pair: Pair | Future[Pair] = _worker().submit(work, keys, values, index, to)

    def pair(self) -> Pair:
        """Keys and values, waited for."""
        if isinstance(self._pair, Future):
            self._pair = self._pair.result()
            if self._lane is not None:
                self._lane.hand_over(self._pair)
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


@cache
def _side(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


class CopyLane:
    """One copy to a CUDA device on a stream of its own, out of pinned memory.

    Only what is sent gets pinned: all of a long cache would take that much from the machine.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked = torch.cuda.current_stream(device).record_event()

    def copied(self, keys: Tensor, values: Tensor, index: Tensor, to: torch.device) -> Pair:
        """Copy as the function of that name does, and do not wait for the end."""
        side = _side(self._device)
        with torch.cuda.stream(side):
            side.wait_event(self._asked)  # the index is found on the stream of the model
            keys, values = _gathered(keys, values, index)
            pair = tuple(x.pin_memory().to(to, non_blocking=True) for x in (keys, values))
            self._sent = side.record_event()
        return pair[0], pair[1]

    def hand_over(self, pair: Pair) -> None:
        """Let the stream of the model wait for the copy, and keep its memory until it was read."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._sent)
        for each in pair:
            each.record_stream(stream)


def _gathered(keys: Tensor, values: Tensor, index: Tensor) -> Pair:
    here = index.to(keys.device).expand(*keys.shape[:2], -1)
    return selected(keys, values, here)


def copied(keys: Tensor, values: Tensor, index: Tensor, to: torch.device) -> Pair:
    """Copy entries at `index` `[B, 1 or H, m]` to a device."""
    keys, values = _gathered(keys, values, index)
    return keys.to(to), values.to(to)


class Brought(NamedTuple):
    """Keys and values `[B, H, m, d]` on a device, and what it took to have them there.

    `awaited` entries of each head had not been sent for, and in `ms` milliseconds nothing was
    computed because some were not there. `early` bytes had been sent for, read or not.
    """

    pair: Pair
    awaited: int
    ms: float
    early: int


def fetch(
    choice: StepChoice,
    index: Tensor,
    keys: Tensor,
    values: Tensor,
    memory: dict[str, Any],
    to: torch.device,
    name: str = _AHEAD,
) -> Brought:
    """Bring the entries `index` `[B, H, m]` of a choice to a device.

    Those that `memory` says are on their way, under `name`, are waited for; others are copied.
    """
    start = time.perf_counter()
    sent: Fetch | None = memory.pop(name, None)
    here = 0 if sent is None else sent.of(choice)
    found = copied(keys, values, index[..., here:], to)
    if here and sent is not None:
        early = sent.pair()
        found = torch.cat([early[0], found[0]], 2), torch.cat([early[1], found[1]], 2)
    ms = (time.perf_counter() - start) * 1e3
    return Brought(found, int(index.shape[-1]) - here, ms, 0 if sent is None else sent.nbytes)


def send(
    choice: StepChoice,
    keys: Tensor,
    values: Tensor,
    memory: dict[str, Any],
    to: torch.device,
    name: str = _AHEAD,
) -> int:
    """Send for entries of a choice among keys and values `[B, H, n, d]`; returns their bytes.

    They wait under `name` in `memory`, the state beside the entries of their layer.
    """
    before: Fetch | None = memory.get(name)
    sent = memory[name] = Fetch(choice, keys, values, to)
    return sent.nbytes - (0 if before is None else before.nbytes)


def under_way(memory: dict[Any, dict[str, Any]]) -> int:
    """Return the bytes that have been sent for, of all states beside the entries of a layer."""
    states = (each for mine in memory.values() for each in mine.values())
    return sum(each.nbytes for each in states if isinstance(each, Fetch))
