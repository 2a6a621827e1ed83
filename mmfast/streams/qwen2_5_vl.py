"""Qwen2-VL and Qwen2.5-VL as a stream: one long video whose temporal patches have three positions.

Rows and columns of all patches count from the video's start, and so does the text behind it. The
time axis counts patches (Qwen2-VL) or their seconds (Qwen2.5-VL).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmfast.streams.piece import Piece
from mmfast.streams.script import Script, Unit, Written
from mmfast.streams.wording import Wording

# Patches this near to a multiple of the stream's interval are taken to stand on it.
_JITTER = 0.02
# Part of a position that rounding of times may cost before the floor.
_SLACK = 0.01


class FamilyScript(Script):
    """Three axes; see the module's docstring."""

    axes = 3
    frames = 2

    def __init__(self, model: Any, wording: Wording, fps: float) -> None:
        super().__init__(model, wording, fps)
        vision = model.config.vision_config
        self.frames = vision.temporal_patch_size
        self.per_second: float | None = getattr(vision, "tokens_per_second", None)
        # How text behind a video is placed; `proof` finds out what the installed model does.
        self.level = True

    def _frame(self, state: Written, unit: Unit) -> tuple[Written, list[Piece]]:
        at = self._place(state, unit.times[0])
        features, ahead = self.visual(unit), self._interval(state, unit, at)
        if not len(features):  # patches are counted all the same
            return replace(state, skipped=state.skipped + 1), []
        positions = unit.kept(raster(*unit.grid))
        positions[0] += at - state.reached  # 0 where the frame came when it was expected
        piece = Piece(
            embeds=features,
            relative=positions,
            advance=torch.tensor([at - state.reached + ahead, 0, 0]),
            kind="frame",
            fresh=False,
            time=unit.times[0],
            visual=torch.ones(len(features), dtype=torch.bool),
            planes=unit.planes,
            ids=self.placeholders(unit),
        )
        return replace(state, reached=at + ahead, skipped=0), [piece]

    def _place(self, state: Written, time: float) -> int:
        """Position on the time axis, from the video's start."""
        if self.per_second is None:
            return state.reached + state.skipped
        seconds, since = self.frames / self.fps, time - state.since
        index = round(since / seconds)
        if abs(since / seconds - index) <= _JITTER:  # as stock code computes it, in float32
            interval = self.per_second * torch.tensor(seconds, dtype=torch.float32)
            return int((torch.tensor(index) * interval).long())
        return math.floor(self.per_second * since + _SLACK)

    def _interval(self, state: Written, unit: Unit, at: int) -> int:
        """How much further the next patch is expected; it corrects what turns out wrong."""
        if self.per_second is None:
            return 1
        return self._place(state, unit.times[0] + self.frames / self.fps) - at

    def _tail(self, state: Written, ids: list[int]) -> list[Piece]:
        piece = self.text(ids)
        if not self.level:
            return [replace(piece, fresh=True)]
        span = state.span
        return [
            replace(piece, relative=piece.relative + span, advance=piece.advance + span, level=True)
        ]


def raster(rows: int, columns: int) -> Tensor:
    """Positions `[3, rows * columns]` of one patch: time 0, row, column."""
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(y), y, x]).reshape(3, -1)
