"""Pieces of random streams, and the same tokens run by the stock model in one go."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from tiny_models import tiny
from torch import Tensor

from mmfast.streams.memory import Memory
from mmfast.streams.script import Piece

FAMILIES = ("llava_onevision", "qwen2_5_vl", "qwen3_vl")
ROWS, COLUMNS = 3, 4
N_FRAME = ROWS * COLUMNS
STEP = 2  # positions between two frames of Qwen2.5-VL


def width(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[1])


def dtype(model: Any) -> torch.dtype:
    return model.get_input_embeddings().weight.dtype


def text(family: str, model: Any, n: int, seed: int) -> Piece:
    """A random text of n tokens."""
    axes = 1 if family == "llava_onevision" else 3
    generator = torch.Generator().manual_seed(seed)
    embeds = torch.randn(n, width(model), generator=generator).to(dtype(model))
    relative = torch.arange(n).expand(axes, n)
    return Piece(embeds, relative, torch.full((axes,), n), "text", fresh=True)


def remark(family: str, model: Any, n: int, seed: int) -> Piece:
    """Text behind frames: for Qwen2.5-VL it counts on from their rows and columns."""
    piece = text(family, model, n, seed)
    if family != "qwen2_5_vl":
        return piece
    span = max(ROWS, COLUMNS)
    moved = {"relative": piece.relative + span, "advance": piece.advance + span}
    return replace(piece, fresh=False, level=True, **moved)


def frame(family: str, model: Any, seed: int) -> Piece:
    """A random frame of 3 x 4 tokens; for Qwen3-VL between two markers, with two planes."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def rows(n: int) -> Tensor:
        return torch.randn(n, width(model), generator=generator).to(dtype(model))

    grid = torch.stack(
        [
            torch.zeros(N_FRAME, dtype=torch.int64),
            torch.arange(ROWS).repeat_interleave(COLUMNS),
            torch.arange(COLUMNS).repeat(ROWS),
        ]
    )
    if family == "llava_onevision":
        relative = torch.arange(N_FRAME)[None]
        visual = torch.ones(N_FRAME, dtype=torch.bool)
        return Piece(rows(N_FRAME), relative, torch.tensor([N_FRAME]), "frame", False, 0.5, visual)
    if family == "qwen2_5_vl":
        visual = torch.ones(N_FRAME, dtype=torch.bool)
        advance = torch.tensor([STEP, 0, 0])
        return Piece(rows(N_FRAME), grid, advance, "frame", False, 0.5, visual)
    last = 1 + max(ROWS, COLUMNS)
    marks = (torch.zeros(3, 1, dtype=torch.int64), torch.full((3, 1), last))
    relative = torch.cat([marks[0], grid + 1, marks[1]], 1)
    visual = torch.ones(N_FRAME + 2, dtype=torch.bool)
    visual[[0, -1]] = False
    planes = (rows(N_FRAME), rows(N_FRAME))
    advance = torch.full((3,), last + 1)
    return Piece(rows(N_FRAME + 2), relative, advance, "frame", False, 0.5, visual, planes)


def stream(family: str, model: Any, frames: int = 6, seed: int = 0) -> list[Piece]:
    """An opening text, frames, a remark in the middle, frames, and a question."""
    pieces = [text(family, model, 5, seed)]
    pieces += [frame(family, model, seed + i) for i in range(frames // 2)]
    pieces.append(remark(family, model, 4, seed + 1))
    pieces += [frame(family, model, seed + i) for i in range(frames // 2, frames)]
    return [*pieces, remark(family, model, 7, seed + 2)]


def positions(pieces: list[Piece]) -> Tensor:
    """Positions `[A, N]` of a prompt of these pieces, counted anew from what a piece says."""
    axes = pieces[0].relative.shape[0]
    found: list[Tensor] = []
    start = torch.zeros(axes, dtype=torch.int64)
    for piece in pieces:
        if piece.fresh:
            top = max((int(each.max()) for each in found), default=-1)
            start = torch.full((axes,), top + 1)
        if piece.level:
            start = start.min().expand(axes)
        found.append(start[:, None] + piece.relative)
        start = start + piece.advance
    return torch.cat(found, 1)


def stock(model: Any, pieces: list[Piece], places: Tensor | None = None) -> Tensor:
    """Logits `[N, V]` of the stock model for all pieces in one forward pass."""
    places = positions(pieces) if places is None else places
    extra: dict[str, Any] = {}
    if any(piece.planes for piece in pieces):
        count = max(len(piece.planes) for piece in pieces)
        none = [torch.zeros(len(piece.embeds), dtype=torch.bool) for piece in pieces]
        visual = [n if p.visual is None else p.visual for p, n in zip(pieces, none, strict=True)]
        extra["visual_pos_masks"] = torch.cat(visual)[None]
        extra["deepstack_visual_embeds"] = [
            torch.cat([piece.planes[i] for piece in pieces if piece.planes]) for i in range(count)
        ]
    with torch.no_grad():
        embeds = torch.cat([piece.embeds for piece in pieces])
        length = torch.ones(1, len(embeds), dtype=torch.int64)  # no packed sequences
        hidden = model.get_decoder()(
            inputs_embeds=embeds[None],
            position_ids=places[:, None] if len(places) > 1 else places,
            attention_mask=length,
            use_cache=False,
            **extra,
        ).last_hidden_state[0]
        return model.get_output_embeddings()(hidden).float()


def model_of(family: str, **shape: Any) -> Any:
    """A tiny random model that tests share."""
    return tiny(family, **shape).model


def same(a: Any, b: Any) -> bool:
    """Whether two trees hold the same values, bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, each.name), getattr(b, each.name)) for each in fields(a)
        )
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def state(memory: Memory) -> Any:
    """All that a memory is, rotated keys included."""
    rotated = [buffer.read(1).clone() for buffer in memory.buffers if buffer.data is not None]
    return memory.snapshot(), rotated
