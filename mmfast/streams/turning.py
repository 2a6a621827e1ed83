"""Move live blocks to other positions: rotated anew from the keys before RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmfast.models.rotary import Angles, Rotary
from mmfast.streams.buffers import RAW, ROTATED, Buffer
from mmfast.streams.places import Live, Start


class Turner:
    """Rotates keys of every layer of one model.

    Args:
        rotary: The model's rotary embedding.
        attentions: Attention module per layer.
    """

    def __init__(self, rotary: Rotary, attentions: Sequence[Any]) -> None:
        self._rotary = rotary
        self._attentions = attentions
        self.axes = rotary.axes
        self.layers = len(attentions)

    def device(self, layer: int) -> torch.device:
        """Where a layer computes."""
        found: torch.device = next(self._attentions[layer].parameters()).device
        return found

    def rotate(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys `[H, m, d]` before RoPE of a layer, rotated to positions `[A, m]`."""
        return self._rotary.rotate(self._attentions[layer], keys, positions)

    def move(
        self, buffers: Sequence[Buffer], blocks: Sequence[Live], starts: Sequence[Start]
    ) -> list[Live]:
        """Rotate every block that does not stand where it is to start.

        Args:
            buffers: Of all layers; they hold these blocks from their beginning.
            blocks: In the order of the buffers.
            starts: Where each is to start.

        Returns:
            The blocks at their new places.
        """
        moved = [start != b.start for b, start in zip(blocks, starts, strict=True)]
        if not any(moved):
            return list(blocks)
        first, end = moved.index(True), len(moved) - moved[::-1].index(True)
        even = all(block.even for block in blocks)
        known: dict[torch.device, Angles] = {}
        for layer, buffer in enumerate(buffers):
            if not even:
                known = {}
            self._move(layer, buffer, blocks, starts, (first, end), known)
        return [replace(b, start=start) for b, start in zip(blocks, starts, strict=True)]

    def move_layer(
        self, layer: int, buffer: Buffer, blocks: Sequence[Live], starts: Sequence[Start]
    ) -> None:
        """The same in one layer, for blocks at the beginning of its buffer."""
        moved = [start != b.start for b, start in zip(blocks, starts, strict=True)]
        if any(moved):
            ends = (moved.index(True), len(moved) - moved[::-1].index(True))
            self._move(layer, buffer, blocks, starts, ends, {})

    def _move(
        self,
        layer: int,
        buffer: Buffer,
        blocks: Sequence[Live],
        starts: Sequence[Start],
        ends: tuple[int, int],
        known: dict[torch.device, Angles],
    ) -> None:
        """Rotate blocks `ends[0]` to `ends[1]`, with angles that layers of a device share."""
        at = sum(block.size_at(layer) for block in blocks[: ends[0]])
        range_ = range(*ends)
        stop = at + sum(blocks[i].size_at(layer) for i in range_)
        raw = buffer.read(RAW, at, stop)
        if not raw.shape[1]:
            return
        if raw.device not in known:
            places = torch.cat([blocks[i].positions(layer, starts[i]) for i in range_], 1)
            known[raw.device] = self._rotary.angles(places, raw, layer)
        turned = self._rotary.turn(self._attentions[layer], raw, known[raw.device])
        buffer.read(ROTATED, at, stop).copy_(turned)
