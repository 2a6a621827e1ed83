"""Scripts of the model families, and the proof of a script against its stock processor.

Positions of frames follow each family: Qwen2-VL and Qwen2.5-VL see a stream as one long video
whose rows and columns count from its start and whose time axis counts patches (Qwen2-VL) or their
seconds (Qwen2.5-VL). Templates, tokenizers and position rules differ between checkpoints and
versions, so before a stream is opened its script is compared with the stock prompt of six frames;
the weights are not run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.families.adapter import adapter_for
from mmfast.streams.script import EncodedUnit, Piece, Script, Wording, WrittenState

# Patches this near to a multiple of the stream's interval are taken to stand on it.
_JITTER = 0.02
# Part of a position that rounding of times may cost before the floor.
_SLACK = 0.01


class QwenScript(Script):
    """Three axes; see the module's docstring."""

    axes = 3

    def __init__(self, model: Any, wording: Wording, fps: float) -> None:
        super().__init__(model, wording, fps)
        vision = model.config.vision_config
        self.per_second: float | None = getattr(vision, "tokens_per_second", None)
        # How text behind a video is placed; `proof` finds out what the installed model does.
        self.level = True

    def _frame(self, state: WrittenState, unit: EncodedUnit) -> tuple[WrittenState, list[Piece]]:
        at = self._place(state, unit.times[0])
        ahead = self._interval(state, unit, at)
        if not len(unit.features):  # patches are counted all the same
            return replace(state, skipped=state.skipped + 1), []
        positions = unit.kept(raster(*unit.grid))
        positions[0] += at - state.reached  # 0 where the frame came when it was expected
        piece = self.frame(unit, positions, [at - state.reached + ahead, 0, 0])
        return replace(state, reached=at + ahead, skipped=0), [piece]

    def _place(self, state: WrittenState, time: float) -> int:
        if self.per_second is None:
            return state.reached + state.skipped
        seconds, since = self.frames / self.fps, time - state.since
        index = round(since / seconds)
        if abs(since / seconds - index) <= _JITTER:  # as stock code computes it, in float32
            interval = self.per_second * torch.tensor(seconds, dtype=torch.float32)
            return int((torch.tensor(index) * interval).long())
        return math.floor(self.per_second * since + _SLACK)

    def _interval(self, state: WrittenState, unit: EncodedUnit, at: int) -> int:
        """Expected distance of the next patch; the next place corrects an error."""
        if self.per_second is None:
            return 1
        return self._place(state, unit.times[0] + self.frames / self.fps) - at

    def _tail(self, state: WrittenState, ids: list[int]) -> list[Piece]:
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


class Qwen3Script(Script):
    """Three axes, DeepStack planes, times as text."""

    axes = 3

    def __init__(self, model: Any, wording: Wording, fps: float) -> None:
        super().__init__(model, wording, fps)
        self._end = wording.text(wording.processor.vision_end_token)

    def _frame(self, state: WrittenState, unit: EncodedUnit) -> tuple[WrittenState, list[Piece]]:
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


class OneVisionScript(Script):
    """Plain positions: every frame counts on by its tokens, dropped ones included."""

    def _frame(self, state: WrittenState, unit: EncodedUnit) -> tuple[WrittenState, list[Piece]]:
        skipped = state.skipped
        if not len(unit.features):  # its positions are counted all the same
            return replace(state, skipped=skipped + unit.n), []
        positions = unit.kept(torch.arange(unit.n))[None] + skipped
        piece = self.frame(unit, positions, [unit.n + skipped])
        return replace(state, skipped=0), [piece]

    def _tail(self, state: WrittenState, ids: list[int]) -> list[Piece]:
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


_PATCHES, _SIDE, _SECONDS, _QUESTION = 3, 64, 4.0, "What is it?"


_SCRIPTS: dict[str, type[Script]] = {
    "llava_onevision": OneVisionScript,
    "qwen2_vl": QwenScript,
    "qwen2_5_vl": QwenScript,
    "qwen3_vl": Qwen3Script,
}


def check_watches(model: Any) -> None:
    """Refuse a model whose family cannot watch streams; the ModelError names those that do."""
    family = model.config.model_type
    if family not in _SCRIPTS:
        clips = "video" in adapter_for(model).media
        instead = "'video-qa') for a clip that ends" if clips else "'image-qa') for a picture"
        raise ModelError(
            f"{type(model).__name__} (model_type {family!r}) cannot watch streams; families that "
            f"do: {', '.join(sorted(_SCRIPTS))}; use pipeline({instead}"
        )


def script_for(model: Any, processor: Any, fps: float, system: str | None = None) -> Script:
    """The script of a model of a known family; ModelError where there is none that fits."""
    check_watches(model)
    return _SCRIPTS[model.config.model_type](model, Wording(processor, system), fps)


def starts(pieces: Sequence[Piece]) -> list[Tensor]:
    """Starts of the pieces, `[A]` each, and at the end the start of a further one."""
    at = torch.zeros_like(pieces[0].advance)
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
    """Compare with the stock prompt, else ModelError; settle how text behind a video is placed."""
    if any(weight.is_meta for weight in script.model.parameters()):
        raise ModelError(
            f"{type(script.model).__name__} is offloaded, and streams read weights where they lie; "
            "load it without offload_folder and with a device_map of devices, or use "
            "pipeline('video-qa')"
        )
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
    state, pieces = WrittenState(), list[Piece]()
    for patch in range(_PATCHES):
        first = patch * _SECONDS
        step = _SECONDS / script.frames
        times = tuple(first + step * i for i in range(script.frames))
        unit = EncodedUnit(features, (rows, columns), times)
        state, new = script.patch(state, unit)
        pieces += new
    pieces += script.question(state, _QUESTION)
    return [replace(piece, embeds=piece.embeds[:0]) for piece in pieces]
