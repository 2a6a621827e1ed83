"""One half of a codec, a frame at a time, on buffers whose shape and place never change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.frontends.codecs.streaming import FrameStage
from mmfast.frontends.codecs.tree import tree_map, where_rows
from mmfast.ops.graphs import Graphs, graphs_for


class StaticStage:
    """The stage of a codec whose layers are all in step (Mimi), recorded.

    Args:
        stage: `codec.encoder` or `codec.decoder`.
        given: `[B, ..., n]` one frame of its input: the buffer that `run` reads from.
        graphs: What records; None: CUDA graphs on a CUDA device.

    Attributes:
        given: The input; write a frame into it.
        out: `[B, ..., m]` what the frame became.

    Raises:
        ModelError: A layer waits for later samples, so a frame in is not always a frame out.
    """

    @torch.no_grad()
    def __init__(self, stage: FrameStage, given: Tensor, graphs: Graphs | None = None) -> None:
        self.layers, self.given = stage.layers, given
        if not self.layers.in_step or stage.lookahead or stage.startup > 1:
            raise ModelError(
                "this codec holds samples back, so its steps have no fixed shape; use Mimi, or "
                "its stages as they are"
            )
        self._state = tree_map(torch.clone, self.layers.start(len(given)))
        state, out = self.layers.step(self._state, given)
        tree_map(_same_shape, self._state, state)
        self.out = torch.zeros_like(out)
        self._replay = (graphs or graphs_for(given.device)).record(self._run)
        self.reset()

    @torch.no_grad()
    def run(self) -> Tensor:
        """Take the frame in `given`; what it became is in `out`."""
        self._replay()
        return self.out

    @torch.no_grad()
    def reset(self, rows: Tensor | None = None) -> None:
        """Start streams anew (`[B]` bool, None for all)."""
        fresh = self.layers.start(len(self.given))
        if rows is not None:
            fresh = where_rows(rows, fresh, self._state)
        tree_map(lambda old, new: old.copy_(new), self._state, fresh)

    def _run(self) -> None:
        # Counts of frames stay at zero: layers in step do not look at them.
        state, out = self.layers.step(self._state, self.given)
        tree_map(lambda old, new: old.copy_(new), self._state, state)
        self.out.copy_(out)


def _same_shape(old: Tensor, new: Any) -> Tensor:
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ModelError(
            f"a state of {list(old.shape)} became one of {list(new.shape)}: the codec has no fixed "
            "shape for one frame at a time"
        )
    return old
