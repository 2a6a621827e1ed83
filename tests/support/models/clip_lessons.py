"""Lessons on a few generated clips, encoded by the embedded model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mmfast.tiny.video import scene, tower
from mmfast.tiny.video.clips import Bank, make_row
from mmfast.tiny.video.lessons import ClipSampler


def clip_lessons(model: Any, processor: Any, clips: int) -> ClipSampler:
    """Sampler of lessons on so many clips."""
    rows = [make_row(scene.make_scene(scene.TRAIN, 9, number)) for number in range(clips)]
    *arrays, tables = zip(*rows, strict=True)
    bank = Bank(*(torch.from_numpy(np.stack(each)) for each in arrays), list(tables))
    return ClipSampler(bank, tower.encode_bank(model, bank), processor.tokenizer, 0)
