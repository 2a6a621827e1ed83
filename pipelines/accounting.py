"""When the first token came, what the encoder took, how many visual tokens were left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mmfast.core.trace import Trace
from mmfast.models.adapter import adapter_for


class FirstToken:
    """A `generate` streamer that only notes when the first new token arrives."""

    def __init__(self) -> None:
        self.at = 0.0
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, then with every new token."""
        if self._prompt_seen and not self.at:
            self.at = time.perf_counter()
        self._prompt_seen = True

    def end(self) -> None:
        """Called after the last token."""


@dataclass
class Stopwatch:
    """Milliseconds added up."""

    ms: float = 0.0


@contextmanager
def encoder_timer(model: Any) -> Iterator[Stopwatch]:
    """Add up the time spent inside the vision tower."""
    watch, started = Stopwatch(), [0.0]

    def before(*_: Any) -> None:
        started[0] = time.perf_counter()

    def after(*_: Any) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        watch.ms += (time.perf_counter() - started[0]) * 1e3

    tower = model.get_encoder("image")
    handles = [tower.register_forward_pre_hook(before), tower.register_forward_hook(after)]
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def token_counts(
    model: Any, kind: str, inputs: Mapping[str, Any], trace: Trace
) -> list[tuple[int, int]]:
    """Visual tokens of every image or clip of a batch: before, and after the last stage.

    Separators are not counted: no method may drop them.
    """
    layouts = adapter_for(model).layout(model.base_model, kind, inputs)
    full = [len(layout.content()) for layout in layouts]
    left = dict(enumerate(full))
    for site, item, reduction in trace.reductions:
        if site != "vit":  # inside the encoder patches are counted, and its output is restored
            left[item] = reduction.m
    return [(n, left[item]) for item, n in enumerate(full)]
