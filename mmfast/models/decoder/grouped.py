"""Attention of a few queries to a long cache, without a copy of its keys for every query head.

Under a mask stock sdpa repeats keys and values for all heads that share them, at every pass and in
every layer. A pass that verifies drafts has a mask, since it reads several tokens, and would cost
several steps. Here the heads of a group are further queries of one head: the same numbers. Where
queries stand far apart in a prompt, each run of them reads the keys up to its last one alone.

A single query has no mask, and stock sdpa does share keys then, but reads them once for every head
that shares them: behind 16,384 tokens of the 0.5B shape attention takes twice as long in bfloat16
and three times as long in float32. Sums run in another order, so the last bits differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.models.reduction.probe import intercepting
from mmfast.models.wrappers import decoder_of

FEW = 512  # queries up to which a pass is no prompt
PIECE = 32  # queries that attend together where a prompt's are not next to each other


@contextmanager
def grouped(model: Any, steps: bool = False) -> Iterator[None]:
    """Let short passes of a model attend so, where its attention is sdpa and can be routed.

    `steps` takes single queries without a mask, too, whose last bits are not those of the model.
    """
    layers = getattr(decoder_of(model), "layers", ())
    modules = [getattr(layer, "self_attn", None) for layer in layers]
    around: Any = torch.compiler.disable(_attend)
    found = {
        module: partial(around, steps)
        for module in modules
        if isinstance(module, nn.Module) and _is_sdpa(module)
    }
    with ExitStack() as stack:
        with suppress(ModelError):
            # behind all that changes keys or masks
            stack.enter_context(intercepting(found, innermost=True))
        yield


def _is_sdpa(module: Any) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == "sdpa"


def _attend(
    steps: bool,
    call: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    mask = attention_mask
    plain = isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] == 1
    single = steps and mask is None and length == 1
    odd = args or kwargs.get("dropout") or kwargs.get("position_bias") is not None
    if not (plain or single) or odd or groups == 1 or length > FEW:
        return call(module, query, key, value, mask, *args, **kwargs)
    if mask is not None:
        mask = mask[..., : key.shape[2]].expand(-1, -1, length, -1)
    query = query.unflatten(1, (key.shape[1], groups))
    cuts = _pieces(mask, length, key.shape[2])
    out = [_piece(query, key, value, mask, *cut, kwargs.get("scaling")) for cut in cuts]
    whole = out[0] if len(out) == 1 else torch.cat(out, 3)
    return whole.flatten(1, 2).transpose(1, 2).contiguous(), None


def _pieces(mask: Tensor | None, length: int, keys: int) -> list[tuple[int, int, int]]:
    """Cut queries into runs `start:stop`, and say how many keys each sees the last of.

    Queries that stand far apart in a prompt see ever more of it. The mask is read, for which a
    device would have to be waited for.
    """
    if mask is None or length < 2 * PIECE or mask.device.type != "cpu":
        return [(0, length, keys)]
    shown = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    seen = shown.any(0).any(0)
    places = torch.arange(1, keys + 1)
    found = []
    for start in range(0, length, PIECE):
        own = seen[start : start + PIECE].any(0)
        found.append((start, min(start + PIECE, length), max(1, int((own * places).max()))))
    return found


def _piece(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    start: int,
    stop: int,
    keys: int,
    scale: float | None,
) -> Tensor:
    """Attention of queries `start:stop`, `[B, H, g, q, d]`, to the first `keys` keys."""
    own = query[:, :, :, start:stop]
    if mask is not None:
        mask = mask[..., start:stop, :keys].repeat(1, 1, own.shape[2], 1)
    out: Tensor = F.scaled_dot_product_attention(
        own.flatten(2, 3), key[:, :, :keys], value[:, :, :keys], attn_mask=mask, scale=scale
    ).unflatten(2, own.shape[2:4])
    return out
