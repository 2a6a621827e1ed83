"""LLaVA-OneVision as a stream: frames follow each other, one newline token ends the video."""

from __future__ import annotations

from dataclasses import replace

import torch

from mmfast.streams.piece import Piece
from mmfast.streams.script import Script, Unit, Written


class FamilyScript(Script):
    """Plain positions: every frame counts on by its tokens, dropped ones included."""

    def _frame(self, state: Written, unit: Unit) -> tuple[Written, list[Piece]]:
        features, skipped = self.visual(unit), state.skipped
        if not len(features):  # its positions are counted all the same
            return replace(state, skipped=skipped + unit.n), []
        piece = Piece(
            embeds=features,
            relative=unit.kept(torch.arange(unit.n))[None] + skipped,
            advance=torch.tensor([unit.n + skipped]),
            kind="frame",
            fresh=False,
            time=unit.times[0],
            visual=torch.ones(len(features), dtype=torch.bool),
            ids=self.placeholders(unit),
        )
        return replace(state, skipped=0), [piece]

    def _tail(self, state: Written, ids: list[int]) -> list[Piece]:
        """The newline has the id of a frame's tokens and an embedding of its own."""
        piece = self.text([self.wording.video_id, *ids])
        newline = self.base.image_newline.to(piece.embeds)
        return [
            replace(
                piece,
                embeds=torch.cat([newline[None], piece.embeds[1:]]),
                relative=piece.relative + state.skipped,
                advance=piece.advance + state.skipped,
            )
        ]
