"""From decoded media and questions to the inputs of a stock model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmfast.core.errors import MmfastError, ModelError


@dataclass(frozen=True)
class Shot:
    """One decoded image (uint8 RGB `[H, W, 3]`) or clip (`[T, H, W, 3]`).

    A clip has the fields of transformers' `VideoMetadata`, so that the processor keeps the true
    timestamps and never samples a second time.
    """

    kind: str
    pixels: np.ndarray[Any, Any]
    metadata: Mapping[str, Any] | None = None


def check_question(question: object) -> str:
    """Refuse a question that is no text, or blank (MmfastError)."""
    if not isinstance(question, str):
        raise MmfastError(f"question is a {type(question).__name__}; give a string")
    if not question.strip():
        raise MmfastError(f"question {question!r} is empty; ask something about the media")
    return question.strip()


def build_inputs(
    processor: Any, shots: Sequence[Sequence[Shot]], questions: Sequence[str], device: torch.device
) -> dict[str, Any]:
    """Inputs of `forward` and `generate` for a batch of questions, left-padded.

    The shots of each question are all of one kind. ModelError for a processor without a chat
    template, which writes the prompt.
    """
    chats = [
        [{"role": "user", "content": [*mine, question]}]
        for mine, question in zip(shots, questions, strict=True)
    ]
    return chat_inputs(processor, chats, device)


def chat_inputs(
    processor: Any, chats: Sequence[Sequence[Mapping[str, Any]]], device: torch.device
) -> dict[str, Any]:
    """Inputs of `forward` and `generate` for a batch of conversations, left-padded.

    A message has a `role` and a `content`, a list of texts and shots in order. ModelError for a
    processor without a chat template.
    """
    if getattr(processor, "chat_template", None) is None:
        raise ModelError(f"{type(processor).__name__} has no chat template; give one that has")
    texts = [
        processor.apply_chat_template(
            [
                {"role": message["role"], "content": [_part(part) for part in message["content"]]}
                for message in chat
            ],
            add_generation_prompt=True,
            tokenize=False,
        )
        for chat in chats
    ]
    shots = [
        [part for message in chat for part in message["content"] if isinstance(part, Shot)]
        for chat in chats
    ]
    batch = processor(text=texts, padding=True, return_tensors="pt", **_media(shots))
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def _part(part: Shot | str) -> dict[str, str]:
    return {"type": part.kind} if isinstance(part, Shot) else {"type": "text", "text": part}


def _media(shots: Sequence[Sequence[Shot]]) -> dict[str, Any]:
    from transformers.video_utils import VideoMetadata

    media: dict[str, Any] = {}
    clips = [shot for mine in shots for shot in mine if shot.kind == "video"]
    images = [[shot.pixels for shot in mine if shot.kind == "image"] for mine in shots]
    if any(images):
        media["images"] = images
    if clips:
        media["videos"] = [shot.pixels for shot in clips]
        media["video_metadata"] = [VideoMetadata(**(shot.metadata or {})) for shot in clips]
        media["do_sample_frames"] = False
    return media


def summed(counts: Sequence[tuple[int, int]], items: Sequence[int]) -> list[tuple[int, int]]:
    """Counts of images or clips added up by question, `items` of them to each."""
    rest = iter(counts)
    groups = [[next(rest) for _ in range(n)] for n in items]
    return [(sum(n for n, _ in group), sum(m for _, m in group)) for group in groups]
