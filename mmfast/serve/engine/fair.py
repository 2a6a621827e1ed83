"""Who goes next: of the payer that had least, by priority, then who came first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What a queue needs to know."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def payer(self) -> str:
        """Whose share it takes."""

    @property
    def priority(self) -> int:
        """Higher goes first."""


T = TypeVar("T", bound=Waiting)


class FairQueue(Generic[T]):
    """Requests that wait.

    Work is counted in tokens. A payer that comes anew starts level with the one that had least
    among those at work, so that nobody saves up turns.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, T] = OrderedDict()
        self.served: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, item: T, active: Iterable[str] = ()) -> None:
        """Let one wait; `active` are the payers at work."""
        present = {*active, *(each.payer for each in self._waiting.values())}
        if item.payer not in present:
            floor = min((self.served.get(name, 0.0) for name in present), default=0.0)
            self.served[item.payer] = max(self.served.get(item.payer, 0.0), floor)
        self._waiting[item.id] = item

    def peek(self) -> T | None:
        """Who goes next."""
        if not self._waiting:
            return None
        order = enumerate(self._waiting.values())
        return min(order, key=lambda p: (self.served.get(p[1].payer, 0.0), -p[1].priority, p[0]))[1]

    def remove(self, name: str) -> T | None:
        """Take one out by name; None where it does not wait."""
        return self._waiting.pop(name, None)

    def count(self, payer: str, tokens: float, active: Callable[[], Iterable[str]] = tuple) -> None:
        """A payer was given work of so many tokens; `active` tells the payers at work."""
        self.served[payer] = self.served.get(payer, 0.0) + tokens
        if len(self.served) > 4096:  # payers that left; those at work stay
            keep = {*active(), *(each.payer for each in self._waiting.values()), payer}
            self.served = {name: had for name, had in self.served.items() if name in keep}
