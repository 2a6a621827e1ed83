"""Training of the vision tower and projector: labels of every patch, then features of the bank."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mmfast.tiny.training import Figures, Log, Optimiser, Task, progress
from mmfast.tiny.video.clips import Bank, make_bank
from mmfast.tiny.video.model import Readout
from mmfast.tiny.video.scene import SIZES, PatchLabels, patch_offsets, patch_values


class PatchReadout(Readout):
    """Linear read-outs of one feature vector per patch."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__(width, {**SIZES, "row": side, "column": side, "offset": 2})
        self.side = side

    def judge(self, x: Tensor, truth: PatchLabels) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and share of the patches with things or digits right: x `[n, P, D]`."""
        outs = {name: out.float() for name, out in self(x).items()}
        total, right = x.new_zeros(()), dict[str, Tensor]()
        for name, label in truth.classes.items():
            weight = outs[name].new_full((SIZES[name],), 1.0)
            weight[0] = 0.2  # most patches show nothing
            total = total + cross_entropy(outs[name].flatten(0, 1), label.flatten(), weight)
            some = label > 0
            right[name] = (outs[name].argmax(-1) == label)[some].float().mean()
        spot = torch.arange(self.side**2, device=x.device).expand(len(x), -1)
        for name, label in (("row", spot // self.side), ("column", spot % self.side)):
            total = total + 0.2 * cross_entropy(outs[name].flatten(0, 1), label.flatten())
        inside = ~truth.offset.isnan()
        gap = (outs["offset"] - truth.offset.nan_to_num())[inside].abs().mean()
        right["offset"] = gap.detach()
        return total + 0.5 * gap, right


def scale_pixels(frames: Tensor) -> Tensor:
    """Scale uint8 pixels to the tower's range, as the processor does."""
    return frames.float() / 127.5 - 1.0


def tower_features(model: Any, pixels: Tensor) -> Tensor:
    """Features before the projector: `[n, 3, S, S]` to `[n, P, D]`."""
    out = model.model.vision_tower(pixels, output_hidden_states=True)
    features: Tensor = out.hidden_states[model.config.vision_feature_layer]
    return features


def pooled_tokens(model: Any, features: Tensor) -> Tensor:
    """Projector and 2 x 2 pooling: `[n, P, D]` to `[n, P / 4, H]`."""
    tokens: Tensor = model.model.apply_pooling(model.model.multi_modal_projector(features))
    return tokens


class TowerTask(Task):
    """Tower and projector on single frames; both stay as they are after this stage."""

    def __init__(
        self,
        model: Any,
        bank: Bank,
        seed: int,
        size: int = 64,
        rate: float = 2e-3,
        readouts: Iterable[nn.Parameter] = (),
    ) -> None:
        self.model, self.device, self.size = model.train(), model.device, size
        self.tables = len(bank.tables)
        self.frames, self.truth = bank.frames.to(self.device), PatchTruth(bank, self.device)
        self.rng = torch.Generator().manual_seed(seed)
        vision, text = model.config.vision_config, model.config.text_config
        side = vision.image_size // vision.patch_size
        self.fine = PatchReadout(vision.hidden_size, side)
        self.coarse = PatchReadout(text.hidden_size, side // 2)
        for read in (self.fine, self.coarse):
            read.to(self.device)
        body = nn.ModuleList([model.model.vision_tower, model.model.multi_modal_projector])
        heads = [*self.fine.parameters(), *self.coarse.parameters(), *readouts]
        self.optimiser = Optimiser.of(body, heads, rate)

    def batches(self, step: int, done: float) -> list[tuple[list[int], list[int]]]:
        """Random frames: clips and times."""
        clips = torch.randint(self.tables, (self.size,), generator=self.rng).tolist()
        times = torch.randint(self.frames.shape[1], (self.size,), generator=self.rng).tolist()
        return [(clips, times)]

    def loss(self, batch: tuple[list[int], list[int]]) -> tuple[Tensor, Figures]:
        """Loss on patches of the tower and on pooled tokens of the projector."""
        clips, times = (torch.tensor(part).to(self.device) for part in batch)
        features = tower_features(self.model, scale_pixels(self.frames[clips, times]))
        patches, cells = self.truth(clips, times)
        loss, right = self.fine.judge(features, patches)
        tokens = pooled_tokens(self.model, features)
        cell_loss, cell_right = self.coarse.judge(tokens, cells)
        more, whole = self.judge_frames(features, tokens, clips, times)
        total = loss + cell_loss + more
        return total, {"loss": total.detach(), "patches": right, "cells": cell_right, **whole}

    def judge_frames(
        self, features: Tensor, tokens: Tensor, clips: Tensor, times: Tensor
    ) -> tuple[Tensor, Figures]:
        """Further loss on frames at times of clips, for a world that asks about more."""
        return features.new_zeros(()), {}


class PatchTruth:
    """The `patch_labels` of any frames of a bank at once, on a device."""

    def __init__(self, bank: Bank, device: torch.device) -> None:
        self.owners = [part.to(device) for part in (bank.patches, bank.cells)]
        values = [patch_values(table) for table in bank.tables]
        self.values = {
            name: torch.tensor([value[name] for value in values], device=device) for name in SIZES
        }
        places = torch.from_numpy(np.stack([table.place for table in bank.tables]))
        self.places = places.to(device)  # [n, THINGS, T, 2]

    def __call__(self, clips: Tensor, times: Tensor) -> tuple[PatchLabels, PatchLabels]:
        """Labels of the patches and of the cells of frames `[n]` at times `[n]` of clips."""
        fine, coarse = (self._labels(owners, clips, times) for owners in self.owners)
        return fine, coarse

    def _labels(self, owners: Tensor, clips: Tensor, times: Tensor) -> PatchLabels:
        owner = owners[clips, times].long()  # [n, P]
        classes = {name: value[clips].gather(1, owner) for name, value in self.values.items()}
        places = self.places[clips, :, times]  # [n, THINGS, 2]
        return PatchLabels(classes, patch_offsets(owner, places))


@torch.no_grad()
def scale_projector(model: Any, bank: Bank, rms: float) -> None:
    """Rescale the projector's output to a root mean square that suits the untrained decoder."""
    pixels = scale_pixels(bank.frames[:8].flatten(0, 1).to(model.device))
    tokens = pooled_tokens(model, tower_features(model, pixels))
    factor = rms / float(tokens.pow(2).mean().sqrt())
    layer = model.model.multi_modal_projector.linear_2
    layer.weight.mul_(factor)
    layer.bias.mul_(factor)


def encoded_clips(model: Any, many: int, seed: int, log: Log) -> tuple[Bank, Tensor]:
    """Draw clips, and encode them by the tower and projector of a model: see `encode_bank`."""
    with log.stage("bank", clips=many):
        show = partial(progress, "clips", total=many)
        bank = make_bank(many, seed, os.cpu_count() or 1, show)
        return bank, encode_bank(model, bank)


@torch.no_grad()
def encode_bank(model: Any, bank: Bank) -> Tensor:
    """Pooled visual tokens of every clip: float16 `[n, T, P, H]`."""
    model.eval()
    parts = []
    for some in bank.frames.split(32):
        frames = some.to(model.device)
        tokens = pooled_tokens(model, tower_features(model, scale_pixels(frames.flatten(0, 1))))
        parts.append(tokens.unflatten(0, frames.shape[:2]).half())
    return torch.cat(parts)
