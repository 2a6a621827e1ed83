"""The tower learns to read print, and to see things on pages as it did before."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from mmfast.tiny import training
from mmfast.tiny.document.prints import PARTS
from mmfast.tiny.video.model import Readout
from mmfast.tiny.video.scene import IGNORE
from mmfast.tiny.video.tower import scale_pixels, tower_features

READ = {name: size for name, size in PARTS.items() if name.startswith("own")}  # of a patch
TILES = 24  # of each thread, or ten times as many of a device
THINGS = 0.3  # share of tiles with things, whose features shall stay


class PrintTower(training.Task):
    """Tower and projector on single tiles, printed ones and others."""

    parallel = True

    def __init__(
        self, model: Any, tiles: Tensor, labels: Tensor, others: Tensor, seed: int, rate: float
    ) -> None:
        """Printed tiles `[n, 3, S, S]`, their labels `[parts of READ, n, P]`, and other tiles."""
        self.model, self.device = model.train(), model.device
        self.tiles, self.labels, self.others = tiles, labels, others
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
        self.few = self._draw(len(tiles))  # for looks

    def _draw(self, total: int) -> Tensor:
        many = TILES if self.device.type == "cpu" else 10 * TILES
        return torch.randint(total, (many,), generator=self.rng)

    def batches(self, step: int, done: float) -> list[tuple[bool, Tensor]]:
        """Random tiles for each thread, of one sort each."""
        found = []
        for _ in range(training.side_by_side(self.device)):
            printed = float(torch.rand((), generator=self.rng)) >= THINGS
            found.append((printed, self._draw(len(self.tiles if printed else self.others))))
        return found

    def loss(self, batch: tuple[bool, Tensor]) -> tuple[Tensor, training.Figures]:
        """Loss of what patches say, or of how far their features moved."""
        printed, chosen = batch
        with training.fast(self.device):
            states = self._states(self.model, self.tiles if printed else self.others, chosen)
            if printed:
                return self._read(states, chosen)
            with torch.no_grad():
                fixed = self._states(self.before, self.others, chosen)
        moved = states[0].new_zeros(())
        for now, then in zip(states, fixed, strict=True):
            moved = moved + mse_loss(now.float(), then.float()) / then.float().var()
        return 3 * moved, {"moved": moved.detach()}

    def _states(self, model: Any, tiles: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        features = tower_features(model, scale_pixels(tiles[chosen].to(self.device)))
        return features, model.model.multi_modal_projector(features)

    def _read(self, states: tuple[Tensor, ...], chosen: Tensor) -> tuple[Tensor, training.Figures]:
        named = dict(zip(READ, self.labels[:, chosen].long().to(self.device), strict=True))
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
