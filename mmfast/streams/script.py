"""How a model family writes a stream: opening, frames, question, and what follows an answer.

Written piece by piece, a stream is what the stock processor and the stock model make of the same
clip and question at once, token for token and position for position (`mmfast.streams.proof`
compares them once for every checkpoint).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.streams.piece import Piece
from mmfast.streams.wording import Wording

# A family is a line here and a file with a class `Script`.
_FILES = {
    "llava_onevision": "mmfast.streams.llava_onevision",
    "qwen2_vl": "mmfast.streams.qwen2_5_vl",
    "qwen2_5_vl": "mmfast.streams.qwen2_5_vl",
    "qwen3_vl": "mmfast.streams.qwen3_vl",
}


@dataclass(frozen=True, eq=False)
class Unit:
    """What the encoder made of one frame, or of the two frames of a temporal patch.

    Attributes:
        features: `[M, D]` tokens that are left.
        grid: Rows and columns of the tokens before any were dropped.
        times: Seconds of its frames.
        keep: `[M]` ascending, which of the rows x columns tokens they stand for; None for all.
        planes: DeepStack features `[M, D]`, one per plane.
    """

    features: Tensor
    grid: tuple[int, int]
    times: tuple[float, ...]
    keep: Tensor | None = None
    planes: tuple[Tensor, ...] = ()

    @property
    def n(self) -> int:
        """Tokens before any were dropped."""
        return self.grid[0] * self.grid[1]

    def kept(self, per_token: Tensor) -> Tensor:
        """What is left of a tensor `[..., N]` that runs along all tokens."""
        return per_token if self.keep is None else per_token[..., self.keep.to(per_token.device)]


@dataclass(frozen=True)
class Written:
    """How far a conversation is written.

    Attributes:
        phase: `blank`, `video` (frames go on) or `answered` (an exchange was remembered).
        since: Seconds of the first frame of this video.
        reached: Where on the time axis the next frame is expected, from the video's start.
        span: Rows or columns of the last frame, whichever are more.
        skipped: Positions of frames of which no token was left, since the last piece.
    """

    phase: str = "blank"
    since: float = 0.0
    reached: int = 0
    span: int = 0
    skipped: int = 0

    def snapshot(self) -> dict[str, Any]:
        """Plain values, for saving."""
        return asdict(self)


class Script(ABC):
    """Turns units and questions into pieces; holds no state of a stream.

    Args:
        model: A stock model.
        wording: Texts of the checkpoint's chat template.
        fps: Frames per second that the stream is meant to have.
    """

    axes = 1  # of a position; 3 under M-RoPE
    frames = 1  # per unit

    def __init__(self, model: Any, wording: Wording, fps: float) -> None:
        self.model, self.base, self.wording, self.fps = model, model.base_model, wording, fps
        self.embed = self.base.get_input_embeddings()

    def patch(self, state: Written, unit: Unit) -> tuple[Written, list[Piece]]:
        """Pieces of the next frame, and of the text before it where a video begins."""
        pieces = []
        if state.phase != "video":
            ids = self.wording.opening() if state.phase == "blank" else self.wording.again()
            pieces.append(self.text(ids))
            state = Written("video", since=unit.times[0])
        state, frame = self._frame(state, unit)
        return replace(state, span=max(unit.grid)), [*pieces, *frame]

    def question(self, state: Written, text: str) -> list[Piece]:
        """Pieces from what was written last to where the answer begins."""
        if state.phase == "blank":
            return [self.text(self.wording.alone(text))]
        if state.phase == "answered":
            return [self.text(self.wording.next_question(text))]
        return self._tail(state, self.wording.question(text))

    def answered(self, state: Written) -> Written:
        """After an exchange that stays in the stream."""
        return replace(state, phase="answered")

    @abstractmethod
    def _frame(self, state: Written, unit: Unit) -> tuple[Written, list[Piece]]:
        """One frame, or one temporal patch; [] where no token of it is left."""

    def _tail(self, state: Written, ids: list[int]) -> list[Piece]:
        return [self.text(ids)]

    @torch.no_grad()
    def text(self, ids: list[int]) -> Piece:
        """Text whose positions count up by one."""
        tokens = torch.tensor(ids, device=self.embed.weight.device)
        n = len(ids)
        return Piece(
            embeds=self.embed(tokens),
            relative=torch.arange(n).expand(self.axes, n).clone(),
            advance=torch.full((self.axes,), n),
            kind="text",
            fresh=False,
            ids=tokens,
        )

    def visual(self, unit: Unit) -> Tensor:
        """The unit's tokens as the language model takes them, `[M, D]`."""
        weight = self.embed.weight
        return unit.features.to(weight.device, weight.dtype)

    def placeholders(self, unit: Unit) -> Tensor:
        """Their token ids."""
        count = len(unit.features)
        return torch.full((count,), self.wording.video_id, device=self.embed.weight.device)


def script_for(model: Any, processor: Any, fps: float, system: str | None = None) -> Script:
    """The script of a model of a known family.

    Raises:
        ModelError: No script is known for the family, or its chat template cannot be streamed.
    """
    family = model.config.model_type
    if family not in _FILES:
        raise ModelError(
            f"{type(model).__name__} (model_type {family!r}) cannot watch streams; families that "
            f"do: {', '.join(sorted(_FILES))}; use pipeline('video-qa') for a clip that ends"
        )
    cls = importlib.import_module(_FILES[family]).FamilyScript
    script: Script = cls(model, Wording(processor, system), fps)
    return script
