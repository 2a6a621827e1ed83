"""A checkpoint's script against its stock processor: token ids and positions of a short clip.

Templates, tokenizers and position rules differ between checkpoints and versions. So before a
stream is opened its writing is compared with the stock prompt of six frames; nothing of the
weights is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.adapter import adapter_for
from mmfast.streams.piece import Piece
from mmfast.streams.script import Script, Unit, Written

_PATCHES, _SIDE, _SECONDS, _QUESTION = 3, 64, 4.0, "What is it?"


def starts(pieces: Sequence[Piece], start: Tensor | None = None) -> list[Tensor]:
    """Where each piece starts, `[A]`, and at the end where the next one would."""
    at = torch.zeros_like(pieces[0].advance) if start is None else start
    found, top = [], at.max() - 1
    for piece in pieces:
        if piece.fresh:
            at = (top + 1).expand_as(at)
        if piece.level:
            at = at.min().expand_as(at)
        found.append(at)
        top = torch.maximum(top, (piece.relative + at[:, None]).max())
        at = at + piece.advance
    return [*found, at]


def positions_of(pieces: Sequence[Piece]) -> Tensor:
    """Positions `[A, L]` of pieces that begin a conversation."""
    at = starts(pieces)
    return torch.cat([p.relative + s[:, None] for p, s in zip(pieces, at, strict=False)], dim=-1)


def prove(script: Script) -> None:
    """Compare, and settle how text behind a video is placed.

    Raises:
        ModelError: The stock prompt differs from what the script writes.
    """
    inputs = _stock(script)
    stock = script.model._prepare_position_ids_for_generation(inputs["input_ids"], dict(inputs))
    stock = stock.reshape(-1, inputs["input_ids"].shape[1])[-script.axes :]
    pieces = _written(script, inputs)
    ids = torch.cat([piece.ids for piece in pieces if piece.ids is not None])
    if ids.tolist() != inputs["input_ids"][0].tolist():
        raise ModelError(
            f"the prompt of {type(script.wording.processor).__name__} cannot be written frame by "
            "frame: its tokens differ from those of a whole clip; use pipeline('video-qa')"
        )
    if hasattr(script, "level") and not torch.equal(positions_of(pieces), stock.cpu()):
        script.level = not script.level
        pieces = _written(script, inputs)
    if not torch.equal(positions_of(pieces), stock.cpu()):
        raise ModelError(
            f"this version of transformers places the tokens of {type(script.model).__name__} in "
            "a way that streams do not know; use pipeline('video-qa')"
        )


def _stock(script: Script) -> Any:
    from transformers.video_utils import VideoMetadata

    frames = _PATCHES * script.frames
    clip = np.zeros((frames, _SIDE, _SIDE, 3), dtype=np.uint8)
    fps = script.frames / _SECONDS
    facts = VideoMetadata(frames, fps, _SIDE, _SIDE, frames / fps, "array", list(range(frames)))
    # stock code warns where nothing is said about the cap, which six small frames do not reach
    cap = hasattr(script.wording.processor.video_processor, "cap_pixels_per_frame")
    inputs = script.wording.processor(
        text=[script.wording.prompt(_QUESTION)],
        videos=[clip],
        video_metadata=[facts],
        do_sample_frames=False,
        return_tensors="pt",
        **({"cap_pixels_per_frame": False} if cap else {}),
    )
    device = script.embed.weight.device
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def _written(script: Script, inputs: Any) -> list[Piece]:
    layout = adapter_for(script.model).layout(script.base, "video", inputs)[0]
    assert layout.grid is not None
    _, rows, columns = layout.grid
    width = script.embed.weight.shape[1]
    features = torch.zeros(rows * columns, width)
    state, pieces = Written(), list[Piece]()
    for patch in range(_PATCHES):
        first = patch * _SECONDS
        step = _SECONDS / script.frames
        times = tuple(first + step * i for i in range(script.frames))
        unit = Unit(features, (rows, columns), times)
        state, new = script.patch(state, unit)
        pieces += new
    pieces += script.question(state, _QUESTION)
    return [replace(piece, embeds=piece.embeds[:0]) for piece in pieces]
