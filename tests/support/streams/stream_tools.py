"""What the tests of streams share: models with chat templates, clips, and the stock way round."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tiny_models import tiny
from torch import Tensor

import mmfast
from mmfast.models.loading import load
from mmfast.models.prompt import Shot, user_inputs
from mmfast.models.vision.frames.cache import FrameCache

FAMILIES = ("llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
EMBEDDED = "embedded"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>\n{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ place }}{% endif %}{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


@dataclass
class Watcher:
    """A model that can watch, its processor, and clips for it."""

    family: str
    model: Any
    processor: Any
    size: tuple[int, int]

    def clip(self, frames: int, seed: int = 0) -> Any:
        """Random frames `[T, H, W, 3]`, each with one quarter unlike the frame before."""
        rng = np.random.default_rng(seed)
        found = [rng.integers(0, 256, (*self.size, 3), dtype=np.uint8)]
        half = self.size[0] // 2, self.size[1] // 2
        for _ in range(frames - 1):
            y, x = (int(rng.integers(2)) * side for side in half)
            found.append(found[-1].copy())
            found[-1][y : y + half[0], x : x + half[1]] = rng.integers(0, 256, (*half, 3))
        return np.stack(found)


@functools.cache
def watcher(family: str, seed: int = 0) -> Watcher:
    """A tiny random model of a family with a chat template, or the embedded one."""
    if family == EMBEDDED:
        model, processor = load(None, "cpu", "float32")
        return Watcher(family, model, processor, (96, 96))
    this = tiny(family, seed=seed)
    processor = copy.copy(this.processor)
    place = this.facts.placeholder("video")
    processor.chat_template = "{% set place = " + repr(place) + " %}" + TEMPLATE
    return Watcher(family, this.model, processor, (this.shape.height, this.shape.width_px))


def seconds(frames: int, fps: float = 2.0, start: float = 0.0) -> list[float]:
    """Times of frames at an even rate."""
    return [start + i / fps for i in range(frames)]


def shot(frames: Sequence[Any], times: Sequence[float], fps: float = 2.0) -> Shot:
    """A clip cut out of an even video, as the pipelines hand it to a processor."""
    facts = {
        "total_num_frames": len(frames),
        "fps": fps,
        "duration": len(frames) / fps,
        "frames_indices": [round(time * fps) for time in times],
    }
    return Shot("video", np.stack(frames), facts)


def stock(this: Watcher, *turns: Any) -> dict[str, Any]:
    """Stock inputs of a conversation; turns are lists of texts and shots, the user's first."""
    roles = ("user", "assistant")
    chat = [{"role": roles[i % 2], "content": list(turn)} for i, turn in enumerate(turns)]
    return user_inputs(this.processor, [chat], this.model)


@torch.no_grad()
def stock_logits(this: Watcher, *turns: Any) -> Tensor:
    """Logits `[V]` where the answer begins."""
    logits: Tensor = this.model(**stock(this, *turns)).logits[0, -1].float()
    return logits


@torch.no_grad()
def seen_by_decoder(this: Watcher, inputs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the text model in a stock forward pass."""
    seen: list[dict[str, Any]] = []
    handle = this.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    try:
        this.model(**inputs)
    finally:
        handle.remove()
    return seen[0]


def pipe_of(family: str, **options: Any) -> Any:
    """`video-stream` on a tiny model, two frames per second."""
    this = watcher(family)
    model = (this.model, this.processor)
    return mmfast.pipeline("video-stream", model=model, **{"fps": 2.0, "sized_for": 8, **options})


@functools.cache
def shared_pipe(family: str) -> Any:
    """The same for several tests; do not change it."""
    return pipe_of(family)


@functools.cache
def full_pipe(family: str) -> Any:
    """With a gate, a frame cache and a reducer, all of which have state."""
    return pipe_of(
        family, reduce="dtd:0.5", gate=0.001, frame_cache=FrameCache(watcher(family).model, 0.5)
    )


def answer_logits(session: Any, question: str) -> Tensor:
    """Logits `[V]` where the answer to a question begins, on a branch."""
    logits: Tensor = session.stream.branch(question)[1]
    return logits


def splits(n: int) -> list[list[int]]:
    """Every way to cut n frames into runs."""
    found = []
    for cuts in range(2 ** (n - 1)):
        runs = [1]
        for i in range(n - 1):
            if cuts >> i & 1:
                runs.append(1)
            else:
                runs[-1] += 1
        found.append(runs)
    return found
