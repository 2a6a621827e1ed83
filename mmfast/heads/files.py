"""Heads on disk: weights as safetensors, what they are as JSON beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mmfast.core.errors import ModelError
from mmfast.core.registry import get


def save_head(head: Any, path: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write `path` (`….safetensors`) and the JSON file of the same name.

    Args:
        head: A head with a `config` that names it under `head`.
        path: Where to; folders are made.
        dtype: Of the numbers in the file; None as they are.
    """
    weights = Path(path).with_suffix(".safetensors")
    weights.parent.mkdir(parents=True, exist_ok=True)
    state = {
        name: t.detach().to("cpu", dtype).contiguous() for name, t in head.state_dict().items()
    }
    save_file(state, weights)
    weights.with_suffix(".json").write_text(json.dumps(head.config, indent=1) + "\n")


def load_head(path: str | Path, trunk: Any) -> nn.Module:
    """The head of a file on a language model.

    Args:
        path: The `.safetensors` file; the `.json` of the same name lies beside it.
        trunk: The model's parts, as the head's class wants them.

    Raises:
        ModelError: A file is missing or broken, or the head is of another model.
    """
    weights = Path(path).with_suffix(".safetensors")
    try:
        config = json.loads(weights.with_suffix(".json").read_text())
        state = load_file(weights)
        make = get(config.pop("head"), "head").fn
    except (OSError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"the head {weights.name!r} cannot be read: {reason}; "
            "name a .safetensors file that save_head wrote, with its .json beside it"
        ) from error
    head: nn.Module = make(trunk, **config)
    try:
        head.load_state_dict(state)
    except RuntimeError as error:
        raise ModelError(
            f"the head {weights.name!r} does not fit {type(trunk).__name__} of width "
            f"{trunk.width}: {str(error).splitlines()[-1].strip()}; load it on its own model"
        ) from error
    return head.eval()
