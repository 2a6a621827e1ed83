"""Heads for a stock model: made from its own classes, started from its own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmfast.core.errors import ModelError
from mmfast.core.registry import get
from mmfast.heads.files import load_head as load_file
from mmfast.models.backbone import Backbone


def backbone_of(model: Any) -> Backbone:
    """The model as a trunk; one that is a trunk already stays it."""
    return model if isinstance(model, Backbone) else Backbone(model)


def make_head(name: str, model: Any, *, start: str = "last", **options: Any) -> Any:
    """A new head for a causal language model.

    Args:
        name: A registered head, such as `mctp` or `mtp`.
        model: `…ForCausalLM`, or a `Backbone` of one.
        start: `last` copies the model's last decoder layer into every module, where the inner
            width is the same all of it, else all but the feed-forward part; `random` does not.
        options: Of the head: `modules`, `ffn`, `window` …

    Raises:
        SpecError: There is no such head.
        ModelError: The model or the options do not fit.
    """
    make = get(name, "head").fn
    if start not in ("last", "random"):
        raise ModelError(f"unknown start {start!r} of a head; choices: 'last', 'random'")
    trunk = backbone_of(model)
    try:
        head = make(trunk, **options)
    except TypeError as error:
        raise ModelError(f"head {name!r}: {error}; see the options of its class") from error
    if start == "last":
        for layer in getattr(head, "layers", ()):
            copy_weights(trunk.decoder.layers[-1], layer)
    return head


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy the weights of the same name and shape."""
    ours = target.state_dict()
    with torch.no_grad():
        for name, weight in source.state_dict().items():
            if name in ours and ours[name].shape == weight.shape:
                ours[name].copy_(weight)


def load_head(path: str | Path, model: Any) -> Any:
    """The head of a file on a model; see `mmfast.heads.files.load_head`."""
    return load_file(path, backbone_of(model))
