"""Qwen3-VL as a stream: every temporal patch stands alone between its time and an end token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mmfast.streams.piece import Piece
from mmfast.streams.qwen2_5_vl import raster
from mmfast.streams.script import Script, Unit, Written
from mmfast.streams.wording import Wording


class FamilyScript(Script):
    """Three axes, DeepStack planes, times as text."""

    axes = 3
    frames = 2

    def __init__(self, model: Any, wording: Wording, fps: float) -> None:
        super().__init__(model, wording, fps)
        self.frames = model.config.vision_config.temporal_patch_size
        self._end = wording.text(wording.processor.vision_end_token)

    def _frame(self, state: Written, unit: Unit) -> tuple[Written, list[Piece]]:
        # as the processor writes it: the mean of the first and the last frame's time
        seconds = (unit.times[0] + unit.times[-1]) / 2
        start = self.wording.processor.vision_start_token
        head = self.text(self.wording.text(f"<{seconds:.1f} seconds>{start}"))
        tail, features = self.text(self._end), self.visual(unit)
        before, behind = len(head.embeds), len(tail.embeds)
        span = max(unit.grid)
        visual = torch.zeros(before + len(features) + behind, dtype=torch.bool)
        visual[before : before + len(features)] = True
        positions = [head.relative, unit.kept(raster(*unit.grid)) + before]
        ids = [head.ids, self.placeholders(unit), tail.ids]
        piece = replace(
            head,
            embeds=torch.cat([head.embeds, features, tail.embeds]),
            relative=torch.cat([*positions, tail.relative + before + span], dim=-1),
            advance=torch.full((self.axes,), before + span + behind),
            kind="frame",
            time=unit.times[0],
            visual=visual,
            planes=unit.planes if len(features) else (),
            ids=torch.cat([each for each in ids if each is not None]),
        )
        return state, [piece]
