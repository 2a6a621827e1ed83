"""What went wrong with stored blocks: counted without end, told within bounds."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

_KEPT = 64


class Reports:
    """The latest reports, one line each, and how often each kind of thing happened."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_KEPT)
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, line: str = "", times: int = 1) -> None:
        """Count something, and tell it if there is a line."""
        self.counts[kind] += times
        if line:
            self.lines.append(line)

    def once(self, kind: str, line: str) -> None:
        """Count something, and tell it the first time."""
        self.add(kind, "" if self.counts[kind] else line)

    def snapshot(self) -> dict[str, Any]:
        """Plain data."""
        return {"lines": list(self.lines), "counts": dict(self.counts)}

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over what was told before."""
        self.lines.extend(tree["lines"])
        self.counts.update(tree["counts"])
