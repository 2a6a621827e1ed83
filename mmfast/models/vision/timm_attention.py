"""Attention of timm's ViTs, which does not go through transformers' attention interface.

Sizes of merged tokens enter as `attn_mask`, keys are read behind their norm, and rotary positions
are those of the patches that merged tokens stand for. A frame cache stands in the place of sdpa.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.models.families.tower import Tower, attention_of
from mmfast.models.patching import override
from mmfast.models.reduction.probe import AttentionCalls
from mmfast.models.vision.merge_pass import MergePass


@contextmanager
def noting_keys(tower: Tower, current: Callable[[], MergePass | None]) -> Iterator[None]:
    """Hand the keys of every block to the current pass, where there is one."""
    with ExitStack() as stack:
        for block in tower.blocks:
            attn: Any = attention_of(block)
            around = partial(_note, current, getattr(attn, "rotate_half", False))
            stack.enter_context(override(attn.k_norm, "forward", around))
        yield


def _note(
    current: Callable[[], MergePass | None], half: bool, call: Callable[..., Any], key: Tensor
) -> Tensor:
    """Around the norm of the keys `[B, H, n, d]`, the last step before their rotation."""
    key, work = call(key), current()
    if work is None:
        return key
    seen, rope, prefix = key.detach(), work.rope, work.plan.prefix
    if rope is not None:
        from timm.layers.pos_embed_sincos import apply_rot_embed_cat

        if rope.ndim == 2 or rope.shape[-3] == 1:  # heads turn alike, so their mean does
            seen = seen.mean(dim=1, keepdim=True)
        turned = apply_rot_embed_cat(seen[:, :, prefix:], rope, half=half)
        seen = torch.cat([seen[:, :, :prefix], turned], dim=2)
    work.note(seen)
    return key


def set_sizes(work: MergePass, hidden: Tensor, kwargs: dict[str, Any]) -> None:
    """Put sizes and rotary positions of the tokens there are into the arguments of a block."""
    if kwargs.get("attn_mask") is not None or kwargs.get("is_causal"):
        raise ModelError(
            "merging at site 'vit' takes no attn_mask and no is_causal; leave them out"
        )
    if hidden.shape[1] != work.plan.prefix + work.lengths[0]:
        raise ModelError("site 'vit' needs all patches; call eval(), or set patch_drop_rate=0")
    bias = work.bias(len(hidden), hidden.shape[1], hidden)
    if bias is not None:
        kwargs["attn_mask"] = bias
    work.rope = kwargs.get("rope")
    if work.rope is not None and work.merged is not None:
        table = work.rope[(None,) * (4 - work.rope.ndim)].expand(len(hidden), -1, -1, -1)
        places = (work.merged.keep % work.plan.start[0]).view(len(hidden), 1, -1, 1)  # [B, 1, m, 1]
        places = places.expand(-1, table.shape[1], -1, table.shape[3])
        work.rope = kwargs["rope"] = table.gather(2, places)  # [B, 1 or H, m, 2 d]


def check_timm(tower: Tower) -> None:
    """Refuse blocks that call sdpa not at all, or more than once (ModelError)."""
    for block in tower.blocks:
        attn: Any = attention_of(block)
        if not getattr(attn, "fused_attn", False) or hasattr(attn, "lambda_init"):
            raise ModelError(
                f"a frame cache reads the one call of fused attention in a block, and "
                f"{type(attn).__name__} makes another; build the model after "
                "timm.layers.set_fused_attn(True), or leave the cache out"
            )


def on_rows(
    block: Any, rows: Tensor, places: Tensor, kwargs: Mapping[str, Any], attend: Callable[..., Any]
) -> Tensor:
    """Run a block on rows `[K, D]` at `places` `[K]` of their image; `attend` is its attention."""
    rope, attn = kwargs.get("rope"), attention_of(block)
    prefix = 0 if rope is None else int(attn.num_prefix_tokens)  # type: ignore[arg-type]
    given = dict(kwargs)
    if rope is not None:  # its rows begin behind the prefix, in which nothing turns
        table = rope[(None,) * (3 - rope.ndim)]  # [1 or H, n, 2 d]: sines, then cosines
        still = torch.zeros_like(table[:, :1]).expand(-1, prefix, -1).clone()
        still[..., table.shape[-1] // 2 :] = 1
        given["rope"] = torch.cat([still, table], dim=1)[:, places]

    def around(_: Any, *qkv: Tensor, **__: Any) -> Tensor:
        found = attend(*(each[0, :, prefix:].transpose(0, 1) for each in qkv[:3]), None)
        return F.pad(found.transpose(0, 1)[None], (0, 0, prefix, 0))

    with AttentionCalls(around):  # rows stand behind an empty prefix
        out: Tensor = type(block).forward(block, F.pad(rows, (0, 0, prefix, 0))[None], **given)
    return out[0, prefix:]
