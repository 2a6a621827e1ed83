"""The prompt of a stream, piece by piece: opening, frames, question, and the turn after an answer.

The checkpoint's own chat template is run on short sample conversations and its text is cut at the
placeholder of the video. So the pieces together are what the stock processor and the stock model
make of the same clip and question at once, token for token and position for position
(`mmfast.streams.families` compares them once for every checkpoint).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError, ModelError
from mmfast.core.reduction import Reduction
from mmfast.models.context import check_length
from mmfast.models.prompt import check_question, marked_text
from mmfast.streams.archive.files import value


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive tokens of one conversation.

    A piece starts where the one before it says (`advance` behind that one's start), or, where it is
    `fresh`, on every axis one behind the highest position so far. A `level` piece starts on every
    axis where the lowest axis of that start is: text after a video of the Qwen2 families counts on
    from the rows and columns of the frames, not from their times, which run ahead; its `relative`
    holds how far the last frame's rows or columns reach.

    Attributes:
        embeds: `[n, D]` input of the language model.
        relative: `[A, n]` int64 positions from the start of the piece; A is 1, or 3 under M-RoPE.
        advance: `[A]` int64 from the start of this piece to the start of the next one.
        kind: `text` or `frame`.
        time: Seconds of the frame on the stream's clock; None for text.
        visual: `[n]` bool, which tokens are visual; None for text.
        planes: DeepStack features `[visual tokens, D]`, one per plane.
        ids: `[n]` token ids, for repetition rules and transcripts.
    """

    embeds: Tensor
    relative: Tensor
    advance: Tensor
    kind: str
    fresh: bool
    time: float | None = None
    visual: Tensor | None = None
    planes: tuple[Tensor, ...] = ()
    ids: Tensor | None = None
    level: bool = False


_SAMPLE = "What is it?"
# A reply that no template writes by itself; what comes behind it opens the next turn.
_REPLY = "mmfastreply"


class Wording:
    """Texts of a stream, as token ids; ModelError where no chat template fits a stream."""

    def __init__(self, processor: Any, system: str | None = None) -> None:
        if getattr(processor, "chat_template", None) is None:
            raise ModelError(f"{type(processor).__name__} has no chat template; give one that has")
        self.processor, self.system = processor, system
        self.tokenizer = processor.tokenizer
        self.video: str = processor.video_token
        self.video_id: int = processor.video_token_id
        opening, _ = self._cut([self._user(_SAMPLE, video=True)], 2)
        if _SAMPLE in opening:
            raise ModelError(
                f"the chat template of {type(processor).__name__} puts the question before the "
                "video, so no frame can be read before it is known; use pipeline('video-qa')"
            )
        self._opening = opening

    def opening(self) -> list[int]:
        """From the start of the conversation up to the first frame."""
        return self._ids(self._opening, after=True, special=True)

    def question(self, text: str) -> list[int]:
        """From behind the last frame to where the answer begins."""
        said, marks = self._marked(text)
        _, tail = self._cut([self._user(said, video=True)], 2)
        return self._ids(tail, before=True, marks=marks)

    def prompt(self, text: str) -> str:
        """The stock prompt about one video, with its placeholder."""
        return self._render([self._user(self._checked(text), video=True)])

    def alone(self, text: str) -> list[int]:
        """A whole prompt without a video."""
        said, marks = self._marked(text)
        return self._ids(self._render([self._user(said)]), special=True, marks=marks)

    def again(self) -> list[int]:
        """From behind an answer up to the first frame that follows it."""
        turns = [self._user(_SAMPLE, True), self._said(), self._user(_SAMPLE, True)]
        return self._ids(self._cut(turns, 3)[1].partition(_REPLY)[2], after=True)

    def next_question(self, text: str) -> list[int]:
        """From behind an answer to where the next begins, where no frame came between them."""
        said, marks = self._marked(text)
        turns = [self._user(_SAMPLE, True), self._said(), self._user(said)]
        return self._ids(self._cut(turns, 2)[1].partition(_REPLY)[2], marks=marks)

    def text(self, text: str) -> list[int]:
        """Any text that stands alone between special tokens."""
        return self._ids(text)

    def _checked(self, text: str) -> str:
        text = check_question(text)
        for token in (self.video, getattr(self.processor, "image_token", None)):
            if token and token in text:
                raise MmfastError(
                    f"question {text!r} holds the placeholder {token!r}; leave it out"
                )
        return text

    def _marked(self, text: str) -> tuple[str, Mapping[str, Any]]:
        """A question with the control tokens in it marked as text, and what reads the marks."""
        return marked_text(self.tokenizer, self._checked(text))

    def _user(self, text: str, video: bool = False) -> dict[str, Any]:
        content = [{"type": "video"}] if video else []
        return {"role": "user", "content": [*content, {"type": "text", "text": text}]}

    def _said(self) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "text", "text": _REPLY}]}

    def _render(self, turns: list[dict[str, Any]]) -> str:
        if self.system is not None:
            system = {"role": "system", "content": [{"type": "text", "text": self.system}]}
            turns = [system, *turns]
        text: str = self.processor.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False
        )
        return text

    def _cut(self, turns: list[dict[str, Any]], parts: int) -> list[str]:
        cut = self._render(turns).split(self.video)
        if len(cut) != parts:
            raise ModelError(
                f"the chat template of {type(self.processor).__name__} wrote {len(cut) - 1} "
                f"placeholders {self.video!r} for {parts - 1} videos; a stream needs one each"
            )
        return cut

    def _ids(
        self,
        text: str,
        before: bool = False,
        after: bool = False,
        special: bool = False,
        marks: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a text between placeholders, which are there while it is cut into tokens."""
        full = self.video * before + text + self.video * after
        opening: list[int] = []
        if marks and special:  # marks are read without what a tokenizer puts in front
            opening, special = self.tokenizer("")["input_ids"], False
        ids: list[int] = self.tokenizer(full, add_special_tokens=special, **(marks or {}))[
            "input_ids"
        ]
        return opening + ids[int(before) : len(ids) - int(after)]


@value
@dataclass(frozen=True, eq=False)
class EncodedUnit:
    """Encoded tokens of one frame, or of the two frames of a temporal patch, at `times` seconds.

    `features` and each plane of DeepStack are `[M, D]`. `keep` `[M]`, ascending, tells which tokens
    of the `grid` are left, None for all.
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

    def reduced(self, found: Reduction) -> EncodedUnit:
        """Apply a reduction to the features and all planes."""
        features, *planes = (found.apply(x) for x in (self.features, *self.planes))
        return replace(self, features=features, planes=tuple(planes), keep=found.keep)

    def kept(self, per_token: Tensor) -> Tensor:
        """Select the kept tokens of a tensor `[..., N]` that runs along all of them."""
        return per_token if self.keep is None else per_token[..., self.keep.to(per_token.device)]


@value
@dataclass(frozen=True)
class WrittenState:
    """Position of a stream in its conversation; a value.

    `phase` is `blank`, `video` (frames go on) or `answered` (an exchange was remembered). `since`
    is the seconds of the first frame of this video, `reached` the place on the time axis where the
    next frame is expected, from the video's start. `span` is the larger of rows and columns of the
    last frame; `skipped` counts positions of frames of which no token was left, since the last
    piece.
    """

    phase: str = "blank"
    since: float = 0.0
    reached: int = 0
    span: int = 0
    skipped: int = 0


class Script(ABC):
    """Turns units and questions into pieces; holds no state of a stream."""

    axes = 1  # of a position; 3 under M-RoPE

    def __init__(self, model: Any, wording: Wording, fps: float) -> None:
        self.model, self.base, self.wording, self.fps = model, model.base_model, wording, fps
        self.embed = self.base.get_input_embeddings()
        self.frames: int = getattr(model.config.vision_config, "temporal_patch_size", 1)  # per unit

    def patch(self, state: WrittenState, unit: EncodedUnit) -> tuple[WrittenState, list[Piece]]:
        """Pieces of the next frame, and of the text before it where a video begins."""
        pieces = []
        if state.phase != "video":
            ids = self.wording.opening() if state.phase == "blank" else self.wording.again()
            pieces.append(self.text(ids))
            state = WrittenState("video", since=unit.times[0])
        state, frame = self._frame(state, unit)
        return replace(state, span=max(unit.grid)), [*pieces, *frame]

    def question(self, state: WrittenState, text: str) -> list[Piece]:
        """Pieces from what was written last to where the answer begins.

        ContextError for a question that is longer than all that the model reads.
        """
        written = {"blank": self.wording.alone, "answered": self.wording.next_question}
        ids = written.get(state.phase, self.wording.question)(text)
        check_length(self.model, {"input_ids": torch.tensor([ids])})
        return [self.text(ids)] if state.phase in written else self._tail(state, ids)

    def answered(self, state: WrittenState) -> WrittenState:
        """After an exchange that stays in the stream."""
        return replace(state, phase="answered")

    @abstractmethod
    def _frame(self, state: WrittenState, unit: EncodedUnit) -> tuple[WrittenState, list[Piece]]:
        """Pieces of one frame, or one temporal patch; [] where no token of it is left."""

    def _tail(self, state: WrittenState, ids: list[int]) -> list[Piece]:
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

    def frame(self, unit: EncodedUnit, relative: Tensor, advance: list[int]) -> Piece:
        """Visual tokens alone, at positions `[A, M]`."""
        return Piece(
            embeds=self.visual(unit),
            relative=relative,
            advance=torch.tensor(advance),
            kind="frame",
            fresh=False,
            time=unit.times[0],
            visual=torch.ones(len(unit.features), dtype=torch.bool),
            planes=unit.planes,
            ids=self.placeholders(unit),
        )

    def visual(self, unit: EncodedUnit) -> Tensor:
        """The unit's tokens as the language model takes them, `[M, D]`."""
        weight = self.embed.weight
        return unit.features.to(weight.device, weight.dtype)

    def placeholders(self, unit: EncodedUnit) -> Tensor:
        """Their token ids."""
        count = len(unit.features)
        return torch.full((count,), self.wording.video_id, device=self.embed.weight.device)
