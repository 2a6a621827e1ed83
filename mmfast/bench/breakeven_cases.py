"""Clips from a handful of tokens to thousands, and several prompts at once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from mmfast.bench.cases import Case
from mmfast.bench.presets import Preset
from mmfast.core.errors import MmfastError

# Tokens along the side of one frame, then frames of the shape's own size.
SIDES, FRAMES = (3, 5, 7, 10), (1, 2, 4, 8, 16)
TINY_SIDES, TINY_FRAMES = (2, 3), (1, 4, 8, 16, 64, 128)


def shapes(preset: Preset) -> list[tuple[Preset, int]]:
    """(shape, frames) with ever more visual tokens.

    Raises:
        MmfastError: The family's prompts cannot be made of any size.
    """
    if preset.family != "llava_onevision":
        raise MmfastError(
            f"--break-even takes LLaVA-OneVision shapes and tiny, not {preset.name!r}"
        )
    tiny = preset.name == "tiny"
    sides, frames = (TINY_SIDES, TINY_FRAMES) if tiny else (SIDES, FRAMES)
    small = [(_shrunk(preset, side), 1) for side in sides]
    return small + [(preset, count) for count in frames]


def _shrunk(preset: Preset, side: int) -> Preset:
    """The shape with frames of `side` x `side` tokens: two patches each way to a token."""
    patches = 2 * side
    size = patches * int(preset.vision["patch_size"])
    vision = {**preset.vision, "image_size": size}
    return replace(preset, vision=vision, grid=(patches, patches))


@dataclass
class Many(Case):
    """A case whose prompt comes `batch` times."""

    batch: int = 1

    @classmethod
    def of(cls, case: Case, batch: int) -> Many:
        """The case, several times at once."""
        values = {each.name: getattr(case, each.name) for each in fields(case)}
        prompt = {k: v.repeat(batch, *[1] * (v.ndim - 1)) for k, v in case.prompt.items()}
        return cls(**{**values, "prompt": prompt}, batch=batch)

    def features(self) -> dict[str, Any]:
        """Fresh `mm_encoder_outputs` `[B, N + 1, D]`."""
        out = super().features()["video"]
        out.pooler_output = out.pooler_output.repeat(self.batch, 1, 1)
        return {"video": out}
