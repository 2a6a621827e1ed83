"""Helpers that several tests share: encoder checks."""

from __future__ import annotations

from typing import Any

import torch
from tiny_base import by_name
from tiny_models import Tiny

CLOSE = {"atol": 2e-5, "rtol": 2e-5}  # float32; sums run in another order


def ragged(this: Tiny, kind: str) -> dict[str, Any]:
    """Arguments of the encoder for three items, of two sizes where the family has sizes."""
    if kind == "image":
        media = {"images": [*this.images(2), *this.images(1, 3, (24, 64))]}
    else:
        media = {"videos": this.videos(3)}
    texts = [f"{{{kind}}} and {{{kind}}}", f"then {{{kind}}}?"]
    inputs = this.inputs(texts, **media)
    return {name: inputs[name] for name in this.facts.calls[kind] if name in inputs}


def features(this: Any, kind: str, call: dict[str, Any]) -> torch.Tensor:
    model = getattr(this, "model", this)
    model = model if hasattr(model, "get_image_features") else model.base_model
    kind = kind if hasattr(model, f"get_{kind}_features") else "image"  # clips as images
    method = getattr(model, f"get_{kind}_features")
    found = method(**by_name(method, call)).pooler_output
    parts = [found] if isinstance(found, torch.Tensor) else found
    return torch.cat([part.flatten(0, -2) for part in parts])
