"""One request: how many tokens of which kind, and what the encoder has to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.adapter import adapter_for, tower_of
from mmfast.models.inner import INNER
from mmfast.models.records import features_given
from mmfast.models.signals import TOWER_SIGNALS

_PIXELS = ("pixel_values", "pixel_values_videos", "input_features")


@dataclass(frozen=True)
class Work:
    """What one call has to do.

    Attributes:
        prompt: Tokens of a row, visual ones included.
        rows: Rows of the batch.
        items: Visual tokens of each image or video that a method may touch.
        pixels: Numbers the encoder reads; 0 where it does not run.
        grids: Raster of each item, None where it has none.
        tiled: Some image is cut into tiles.
        attentive: The encoder has attention that signals can be read from.
    """

    prompt: int
    rows: int = 1
    items: tuple[int, ...] = ()
    pixels: int = 0
    grids: tuple[tuple[int, int, int] | None, ...] = ()
    tiled: bool = False
    attentive: bool = True

    @property
    def visual(self) -> int:
        """Visual tokens of the whole batch."""
        return sum(self.items)

    def lacks(self, site: str, need: str) -> str | None:
        """Why a method at `site` cannot have a signal; None where it can."""
        if need == "x":
            return None
        if need == "query":
            text = self.prompt * self.rows - self.visual
            return None if text > 0 else "the prompt has no text"
        if site == "llm":
            if need in INNER:
                return None
            return f"{need!r} does not exist inside the language model"
        if site == "pre" and need in TOWER_SIGNALS:
            if not self.attentive:
                return "the encoder has no attention to read"
            return None if self.pixels else f"{need!r} comes from the encoder, which does not run"
        if need == "grid":
            return None if all(self.grids) else "the tokens are no full raster (image tiles)"
        if need == "tile":
            return None if self.tiled else "no image is cut into tiles"
        known = {"place", "sizes"} | ({"pixels"} if site == "pixel" else set())
        return None if need in known else f"{need!r} is not known to the planner"


def work_of(model: Any, inputs: Mapping[str, Any]) -> Work:
    """Read a request off what the processor returned.

    Raises:
        ModelError: The family is unknown, or there is nothing visual in the inputs.
    """
    adapter = adapter_for(model)
    layouts = [
        layout
        for kind in features_given(inputs)
        for layout in adapter.layout(model.base_model, kind, inputs)
    ]
    if not layouts:
        raise ModelError("inputs hold no image and no video; a plan is about visual tokens")
    rows, prompt = inputs["input_ids"].shape
    return Work(
        prompt=int(prompt),
        rows=int(rows),
        items=tuple(len(layout.content()) for layout in layouts),
        pixels=pixels_of(inputs),
        grids=tuple(layout.grid for layout in layouts),
        tiled=any(layout.tiles is not None for layout in layouts),
        attentive=tower_depth(model) > 0,
    )


def tower_depth(model: Any) -> int:
    """Blocks of the vision tower; 0 where the family's encoder is no stack of blocks."""
    try:
        return len(tower_of(model).blocks)
    except (ModelError, StopIteration, AttributeError):
        return 0


def pixels_of(inputs: Mapping[str, Any], names: Sequence[str] = _PIXELS) -> int:
    """How many numbers the encoder reads."""
    found = [inputs.get(name) for name in names]
    return sum(value.numel() for value in found if isinstance(value, Tensor))
