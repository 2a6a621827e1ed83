"""The tower learns to read print, and to see things on pages as it did before."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from mmfast.tiny import training
from mmfast.tiny.document.readout import PARTS
from mmfast.tiny.video.model import Readout
from mmfast.tiny.video.scene import IGNORE
from mmfast.tiny.video.tower import scale_pixels, tower_features

READ = {name: size for name, size in PARTS.items() if name.startswith("own")}  # of a patch
ReadTiles = tuple[Tensor, Tensor]  # `[n, 3, S, S]` and labels `[parts of READ, n, P]`
TILES = 24  # of each thread, or ten times as many of a device
OTHERS = 0.4  # share of tiles without print, whose features shall stay


class PrintTower(training.Task):
    """Tower and projector on single tiles, printed ones and others.

    Features of others are held, too loosely for shapes if these were not also read from them.
    """

    parallel = True

    def __init__(
        self, model: Any, printed: ReadTiles, others: ReadTiles, seed: int, rate: float
    ) -> None:
        self.model, self.device = model.train(), model.device
        self.printed, self.others = printed, others
        self.rng = torch.Generator().manual_seed(seed)
        vision, text = model.config.vision_config, model.config.text_config
        widths = vision.hidden_size, text.hidden_size
        self.heads = [Readout(width, READ).to(self.device) for width in widths]
        body = torch.nn.ModuleList([model.model.vision_tower, model.model.multi_modal_projector])
        if self.device.type == "cpu":  # the gradient of the fused kernel takes half of a step
            model.model.vision_tower.set_attn_implementation("eager")
        self.before = copy.deepcopy(model).eval().requires_grad_(False)
        heads = torch.nn.ModuleList(self.heads).parameters()
        self.optimiser = training.FastOptimiser.of(body, heads, rate)

    def _draw(self, total: int) -> Tensor:
        many = TILES if self.device.type == "cpu" else 10 * TILES
        return torch.randint(total, (many,), generator=self.rng)

    def batches(self, step: int, done: float) -> list[tuple[bool, Tensor]]:
        """Random tiles for each thread, of one sort each."""
        found = []
        for _ in range(training.side_by_side(self.device)):
            printed = float(torch.rand((), generator=self.rng)) >= OTHERS
            found.append((printed, self._draw(len((self.printed if printed else self.others)[0]))))
        return found

    def loss(self, batch: tuple[bool, Tensor]) -> tuple[Tensor, training.Figures]:
        """Loss of what patches say, and without print of how far their features moved."""
        printed, chosen = batch
        tiles, labels = self.printed if printed else self.others
        with training.fast(self.device):
            states = self._states(self.model, tiles[chosen])
            loss, figures = self._read(states, labels[:, chosen].long().to(self.device))
            if printed:
                return loss, figures
            with torch.no_grad():
                fixed = self._states(self.before, tiles[chosen])
        moved = states[0].new_zeros(())
        for now, then in zip(states, fixed, strict=True):
            moved = moved + mse_loss(now.float(), then.float()) / then.float().var()
        return loss + 3 * moved, {**figures, "moved": moved.detach()}

    def _states(self, model: Any, tiles: Tensor) -> tuple[Tensor, Tensor]:
        features = tower_features(model, scale_pixels(tiles.to(self.device)))
        return features, model.model.multi_modal_projector(features)

    def _read(self, states: tuple[Tensor, ...], labels: Tensor) -> tuple[Tensor, training.Figures]:
        named = dict(zip(READ, labels, strict=True))
        loss = states[0].new_zeros(())
        for head, x in zip(self.heads, states, strict=True):
            loss = loss + head.loss(x.float(), named)
        return loss, {"loss": loss.detach(), "read": self._right(states[1], named)}

    def _right(self, tokens: Tensor, named: dict[str, Tensor]) -> training.Figures:
        """Share of the labelled tokens that are read rightly, by label."""
        outs = self.heads[1](tokens.detach().float())
        marks = {name: (outs[name].argmax(-1) == label)[label != IGNORE]
                 for name, label in named.items()}  # fmt: skip
        return {name: mark.float().mean() for name, mark in marks.items() if len(mark)}
