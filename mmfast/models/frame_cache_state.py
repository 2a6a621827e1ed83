"""What a frame cache remembers of one stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Reference:
    """One frame as the tower saw it, patch by patch possibly at different times.

    Attributes:
        layout: What a frame must match to be compared: number of patches, rows and columns.
        patches: `[n, D]` input of the first block, each patch as it was when computed last.
        keys: Per block `[n, H, d]`, as attended (rotated where the tower has rotary positions).
        values: Per block `[n, H, d]`.
        outputs: By block, `[n, D]` output of those that are read: the last one, feature layers,
            DeepStack taps.
        since: Frames since one was computed whole.
    """

    layout: tuple[int, ...]
    patches: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    outputs: Mapping[int, Tensor]
    since: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.patches, *self.keys, *self.values, *self.outputs.values())
        return sum(t.numel() * t.element_size() for t in tensors)


@dataclass(eq=False)
class FrameCacheState:
    """A stream's place in a frame cache: one reference frame, and counts.

    `FrameCache.using` puts the next reference in once a pass has succeeded; tensors are replaced,
    never written, so a snapshot costs nothing and stays as it was.

    Attributes:
        reference: None before the first frame.
        frames: Frames so far (temporal patches, where the tower takes two frames at once).
        whole: How many of them were computed whole.
        patches: Patches so far.
        computed: How many of them were computed.
    """

    reference: Reference | None = field(default=None, repr=False)
    frames: int = 0
    whole: int = 0
    patches: int = 0
    computed: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, the same after any number of frames."""
        return 0 if self.reference is None else self.reference.nbytes

    def stats(self) -> dict[str, int]:
        """The counts, and the bytes held."""
        names = ("frames", "whole", "patches", "computed", "nbytes")
        return {name: getattr(self, name) for name in names}

    def snapshot(self) -> dict[str, Any]:
        """The state as plain containers and tensors."""
        counts = {name: getattr(self, name) for name in ("frames", "whole", "patches", "computed")}
        if self.reference is None:
            return {**counts, "reference": None}
        tree = {**vars(self.reference), "layout": list(self.reference.layout)}
        tree["outputs"] = [[block, rows] for block, rows in self.reference.outputs.items()]
        return {**counts, "reference": tree}

    @classmethod
    def restore(cls, tree: Mapping[str, Any]) -> FrameCacheState:
        """The state of a snapshot."""
        state = cls(**{**tree, "reference": None})
        kept = tree["reference"]
        if kept is not None:
            state.reference = Reference(
                tuple(kept["layout"]),
                kept["patches"],
                tuple(kept["keys"]),
                tuple(kept["values"]),
                {int(block): rows for block, rows in kept["outputs"]},
                kept["since"],
            )
        return state
