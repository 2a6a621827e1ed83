"""Attention of a few queries to a long cache, without a copy of its keys for every query head.

Under a mask stock sdpa repeats keys and values for all heads that share them, at every pass and in
every layer. A pass that verifies drafts has a mask, since it reads several tokens, and would cost
several steps. Here the heads of a group are further queries of one head: the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.models.reduction.probe import intercepting
from mmfast.models.wrappers import decoder_of

FEW = 256  # queries up to which a pass is no prompt


@contextmanager
def grouped(model: Any) -> Iterator[None]:
    """Let short passes of a model attend so, where its attention is sdpa."""
    modules = [getattr(layer, "self_attn", None) for layer in decoder_of(model).layers]
    around: Any = torch.compiler.disable(_attend)
    found = {
        module: partial(around)
        for module in modules
        if isinstance(module, nn.Module) and _is_sdpa(module)
    }
    with intercepting(found, innermost=True):  # behind all that changes keys or masks
        yield


def _is_sdpa(module: Any) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == "sdpa"


def _attend(
    call: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    batch, heads, length, width = query.shape
    groups = heads // key.shape[1]
    plain = isinstance(attention_mask, Tensor) and attention_mask.ndim == 4 and groups > 1
    odd = args or kwargs.get("dropout") or kwargs.get("position_bias") is not None
    if not plain or odd or length > FEW or attention_mask.shape[1] != 1:
        return call(module, query, key, value, attention_mask, *args, **kwargs)
    mask = attention_mask[..., : key.shape[2]].expand(-1, -1, length, -1).repeat(1, 1, groups, 1)
    rows = query.reshape(batch, key.shape[1], groups * length, width)
    out = F.scaled_dot_product_attention(
        rows, key, value, attn_mask=mask, scale=kwargs.get("scaling")
    )
    return out.reshape(batch, heads, length, -1).transpose(1, 2).contiguous(), None
