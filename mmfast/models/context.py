"""The context of a model: how long a prompt may be, and which of its tokens stand for media."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmfast.core.errors import ContextError
from mmfast.models.families.tower import KINDS

_SCALED = ("linear", "dynamic", "yarn")  # RoPE by a factor, beyond what the weights were made for


def placeholders(model: Any) -> set[int]:
    """Return the token ids that stand for media in prompts of a model."""
    ids = (getattr(model.config, f"{kind}_token_id", None) for kind in KINDS)
    return {each for each in ids if each is not None}


def longest_prompt(model: Any) -> int | None:
    """Return the positions that a decoder was made for, RoPE scaling included; None: no bound."""
    config = model.config.get_text_config()
    places = getattr(config, "max_position_embeddings", None)
    if not places:
        return None
    scaled = [
        (rope.get("original_max_position_embeddings") or places) * rope["factor"]
        for rope in _ropes(config)
        if rope.get("rope_type") in _SCALED and rope.get("factor")
    ]
    return int(max(places, *scaled)) if scaled else int(places)


def check_length(model: Any, inputs: Mapping[str, Any], reduced: bool = False) -> None:
    """Refuse (ContextError) prompts `input_ids` `[B, n]` that are longer than the context.

    Media count where each of their tokens is a position of its own: not where they are `reduced`
    behind the prompt, nor under M-RoPE, which counts a picture by its edges.
    """
    most, ids = longest_prompt(model), inputs["input_ids"]
    if most is None or ids.shape[1] <= most:
        return
    real = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    media = real & torch.isin(ids, torch.tensor(sorted(placeholders(model)), device=ids.device))
    if reduced or any("mrope_section" in rope for rope in _ropes(model.config.get_text_config())):
        real, media = real & ~media, torch.zeros_like(media)
    row = int(real.sum(1).argmax())
    whole, shown = int(real[row].sum()), int(media[row].sum())
    if whole > most:
        fix = "ask in fewer words" if whole - shown > most else "give fewer or smaller media"
        told = f", {shown:,} of them of media," if shown else ""
        raise ContextError(
            f"a prompt of {whole:,} tokens{told} is longer than the {most:,} that this "
            f"{type(model).__name__} reads; {fix}"
        )


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of RoPE, one for each type of layer where these differ."""
    found = getattr(config, "rope_parameters", None) or {}
    return [found, *(each for each in found.values() if isinstance(each, Mapping))]
