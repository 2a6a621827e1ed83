"""Helpers that several tests share: attach states."""

from __future__ import annotations

import copy
import sys
from typing import Any

from tiny_models import Tiny
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING

# Dynamo puts names into the modules it has compiled and takes them back when the code is collected,
# which may be in the midst of any later test.
COMPILED = ("__compiled_fn", "__builtins_dict__", "__resume_at", "__import_", "___")


def snapshot(this: Tiny) -> dict[str, Any]:
    """Everything an attach could leave behind."""
    skip = {"rope_deltas"}  # stock state of M-RoPE models
    state: dict[str, Any] = {"config": copy.deepcopy(this.model.config.to_dict())}
    for name, module in this.model.named_modules():
        own = {k: v for k, v in module.__dict__.items() if k not in skip}
        state[name] = {k: len(v) if k.endswith("_hooks") else id(v) for k, v in own.items()}
    state["attention"] = dict(AttentionInterface())
    state["masks"] = dict(AttentionMaskInterface())
    state["layers"] = (dict(DYNAMIC_LAYER_TYPE_MAPPING), dict(STATIC_LAYER_TYPE_MAPPING))
    names = ("cache_utils", "masking_utils", "modeling_utils", "generation.utils")
    code = {sys.modules[type(module).__module__] for module in this.model.modules()}
    for module in {*code, *(sys.modules[f"transformers.{name}"] for name in names)}:
        if module.__name__.startswith("transformers"):
            own = {k: id(v) for k, v in vars(module).items() if not k.startswith(COMPILED)}
            state[module.__name__] = own
    for kind in {type(module) for module in this.model.modules()} | {DynamicCache}:
        state[str(kind)] = {k: id(v) for k, v in vars(kind).items() if not k.startswith("_abc")}
    return state
