"""How many visual tokens a prompt has, and how many were left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mmfast.core.trace import Trace
from mmfast.models.adapter import adapter_for


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


def summed(counts: Sequence[tuple[int, int]], items: Sequence[int]) -> list[tuple[int, int]]:
    """Counts of images or clips added up by question, `items` of them to each."""
    rest = iter(counts)
    groups = [[next(rest) for _ in range(n)] for n in items]
    return [(sum(n for n, _ in group), sum(m for _, m in group)) for group in groups]


def add_views(model: Any, kind: str, inputs: Mapping[str, Any], trace: Trace) -> None:
    """Let the trace of a call that reduced nothing be drawn too: everything was kept."""
    if any(site != "vit" for site, _, _ in trace.reductions):
        return
    for number, layout in enumerate(adapter_for(model).layout(model.base_model, kind, inputs)):
        tile = None if layout.tiles is None else torch.tensor(layout.tiles)
        trace.see(number, layout.place(), tile, (kind, number))
