"""Scope of the embedded models: questions and pictures like those that they were trained on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from mmfast.models.prompt import Shot

# Colours of things, panels and digits as they are drawn, on textures with channels within DIM.
PALETTE = [(225, 45, 40), (50, 190, 60), (50, 90, 235), (235, 215, 50), (180, 60, 210)]
PALETTE += [(240, 240, 240), (12, 12, 12), (250, 245, 200)]
DIM, SIDE = (12, 125), 96  # SIDE in pixels is that of the encoder's input


class ScopeWarning(UserWarning):
    """A question or a picture is unlike all that the embedded model was trained on."""


def scope_note(tokenizer: Any, shots: Sequence[Shot], question: str) -> str:
    """Return one line on what is unlike the training data of an embedded model, or ""."""

    def pieces(text: str) -> int:  # one for a word of the training grammar
        return len(tokenizer.encode(text, add_special_tokens=False))

    words = dict.fromkeys(re.findall(r"[^\W\d_]+", question.lower()))
    other = [word for word in words if min(pieces(word), pieces(f" {word}")) > 1]
    parts = [f"this question ({', '.join(other)})"] if other else []
    parts += [f"this {shot.kind}" for shot in shots if is_foreign(shot.pixels)][:1]
    told = "the embedded model was trained on moving shapes and digits on plain grounds alone; "
    end = " is outside of that, so the answer means little: name a model"
    return told + " and ".join(parts) + end if parts else ""


def is_foreign(pixels: Any) -> bool:
    """Tell whether an image `[H, W, 3]` or clip `[T, H, W, 3]` is unlike drawn scenes.

    Drawn frames, also as H.264 and JPEG, have at most 3 % of other colours and at least 79 % of
    ground, and median steps of at most 6 in light and 4 in colour between neighbours.
    """
    frames = pixels.reshape(-1, *pixels.shape[-3:])
    chosen = sorted({0, len(frames) // 2, len(frames) - 1})
    strange, dim, light, colour = np.mean([_figures(frames[i]) for i in chosen], 0)
    bare = len(frames) > 1 and dim > 0.999  # there is something in every clip
    return bool(bare or strange > 0.1 or dim < 0.6 or light > 8 or colour > 7)


def _figures(frame: Any) -> tuple[float, ...]:
    """Shares of other colours and of ground, and median steps in light and in colour."""
    small = Image.fromarray(frame).resize((SIDE, SIDE), Image.Resampling.BOX)
    picture = np.asarray(small, np.float32)
    dim = (picture.min(-1) >= DIM[0]) & (picture.max(-1) <= DIM[1])
    away = np.linalg.norm(picture[~dim][:, None] - np.array(PALETTE), axis=-1).min(-1)
    light = picture.mean(-1, keepdims=True)
    steps = [np.abs(np.diff(each, axis=1)).max(-1) for each in (light, picture - light)]
    return (away > 55).sum() / dim.size, dim.mean(), *map(np.median, steps)
