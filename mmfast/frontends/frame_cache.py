"""Which patches of a frame to compute anew, and when to start over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.budget import count
from mmfast.core.errors import MmfastError
from mmfast.ops.ranking import stable_topk


@dataclass(frozen=True)
class Refresh:
    """When a patch is computed anew. A patch that did not change at all never is.

    Attributes:
        share: Share of a frame's patches, the most changed ones; exact where that many changed.
        threshold: Instead of a share, the change from which a patch counts.
        cut: The whole frame is computed if the patches that would not be differ by more than this
            on average: a scene cut, a lamp switched on. None never does so.
        every: Frames from one that is computed whole to the next, equal frames apart; None for any
            number.

    Raises:
        MmfastError: A value out of range, or both or none of share and threshold.
    """

    share: float | None = 0.25
    threshold: float | None = None
    cut: float | None = 0.05
    every: int | None = 32

    def __post_init__(self) -> None:
        if (self.share is None) == (self.threshold is None):
            raise MmfastError(
                f"frame cache with refresh={self.share} and threshold={self.threshold}; "
                "give one of them, for example refresh=0.25"
            )
        if self.share is not None and not 0.0 < self.share <= 1.0:
            raise MmfastError(f"refresh={self.share} is no share of patches; choose 0 to 1")
        for name in ("threshold", "cut"):
            value = getattr(self, name)
            if value is not None and not value >= 0.0:
                raise MmfastError(f"{name}={value} is no change of a patch; choose 0 or more")
        if self.every is not None and self.every < 1:
            raise MmfastError(
                f"every={self.every} never computes a frame; choose 1 or more, or None"
            )

    @property
    def whole(self) -> bool:
        """Whether every frame is computed whole."""
        return self.share == 1.0 or self.every == 1

    def choose(self, change: Tensor, since: int) -> Tensor | None:
        """Patches to compute anew, ascending; None for all of them.

        Args:
            change: `[n]` of each patch since it was computed last.
            since: Which frame this is, counted from the last one computed whole.
        """
        n = change.shape[0]
        if self.share is not None:
            first = stable_topk(change, count(self.share, n) or 1)
            rows = first[change[first] > 0]
        else:
            rows = (change > (self.threshold or 0.0)).nonzero()[:, 0]
        if not bool(change.any()):
            return rows  # the frame is the reference, however old that is
        due = self.every is not None and since >= self.every
        if due or len(rows) == n or self._is_cut(change, rows):
            return None
        return rows.sort().values

    def _is_cut(self, change: Tensor, rows: Tensor) -> bool:
        """Whether too much change would be left out."""
        if self.cut is None:
            return False
        stale = torch.ones_like(change).index_fill(0, rows, 0.0)
        return bool((change * stale).sum() > self.cut * stale.sum())


def changes(patches: Tensor, reference: Tensor) -> Tensor:
    """How far each patch moved from its reference, `[n]` float32.

    The squared distance as a share of how far the patches of both frames lie from the frame's
    mean: 0 where nothing changed, about 1 on average where a picture gives way to another.

    Args:
        patches: Embedded patches `[n, D]`.
        reference: `[n, D]`, each as it was when it was computed last.
    """
    x, r = patches.float(), reference.float()
    spread = sum((each - each.mean(0)).square().sum(-1).mean() for each in (x, r))
    distance = (x - r).square().sum(-1)
    return distance / torch.as_tensor(spread).clamp_min(torch.finfo(torch.float32).tiny)
