"""Causal attention to chosen blocks of keys, exact on them.

On a CPU each block of queries gathers the keys that it reads before its own block, once for all
query heads that share the choice, and these heads are rows of one product without a mask, which is
what flash attention is fastest at. Its own block is causal by itself. Both are merged by their
log-sum-exps. On CUDA the choice is a block mask of FlexAttention, if its kernel takes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from mmfast.core.blocks import BlockChoice
from mmfast.ops.attention import attend

_TILE, _WIDEST = 16, 64  # queries or keys of a tile of the kernel: the least, and the most wanted


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, choice: BlockChoice, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of the last L of S tokens to the keys chosen.

    Args:
        query: `[Hq, L, d]`.
        key: `[H, S, d]`.
        value: `[H, S, d]`.
        choice: For each of the Hq heads, or of the H ones.
        scale: Factor of the logits; None: `d ** -0.5`.

    Returns:
        The output `[Hq, L, d]`, and the log-sum-exps of the queries `[Hq, L]` in float32.
    """
    if query.is_cuda and kernel_takes(query, choice):
        return flex_block_attention(query, key, value, choice, scale)
    heads, length, width = query.shape
    groups = len(choice.blocks)
    out = torch.empty_like(query)
    levels = torch.empty(heads, length, dtype=torch.float32, device=query.device)
    rows = query.view(groups, -1, length, width) if query.is_contiguous() else None
    rows = query.reshape(groups, -1, length, width) if rows is None else rows
    for group in range(groups):
        mine = group * len(key) // groups
        part = slice(group * heads // groups, (group + 1) * heads // groups)
        _attend_group(
            rows[group], key[mine], value[mine], choice, group, scale, out[part], levels[part]
        )
    return out, levels


def kernel_takes(query: Tensor, choice: BlockChoice) -> bool:
    """Return True if tiles of the FlexAttention kernel fit; its products are of 16 and more."""
    return choice.size % _TILE == 0 and query.shape[-1] >= _TILE and query.dtype != torch.float64


def _attend_group(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    choice: BlockChoice,
    head: int,
    scale: float | None,
    out: Tensor,
    levels: Tensor,
) -> None:
    """Write the outputs `[G, L, d]` and levels `[G, L]` of the heads of one choice."""
    size, length = choice.size, query.shape[1]
    before = key.shape[0] - length
    placed = key, value
    if choice.order is not None:
        order = choice.order[head]
        placed = key.index_select(0, order), value.index_select(0, order)
    for row, start in enumerate(range(0, length, size)):
        stop = min(start + size, length)
        mine, first = query[:, start:stop], before + start
        own = slice(first, before + stop)
        found = _attend(mine, key[own], value[own], True, scale)
        places = choice.seen(head, row, first)
        if len(places):
            keys, values = (_taken(x, places) for x in placed)
            found = _merged(found, _attend(mine, keys, values, False, scale))
        out[:, start:stop], levels[:, start:stop] = found


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """Rows `[n, d]` of x at ascending places, as a view where they are one run."""
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places):
        return x[first : last + 1]
    return x.index_select(0, places)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of `[G, c, d]` queries to `[n, d]` keys, which the G heads share, and levels."""
    heads, count, width = query.shape
    if causal:
        q, k, v = query[None], key.expand(1, heads, -1, -1), value.expand(1, heads, -1, -1)
    else:  # heads are rows: more of them in one product
        q, k, v = query.reshape(1, 1, heads * count, width), key[None, None], value[None, None]
    out, level = attend(q, k, v, None, causal, scale)
    if level is None:
        logits = q.float() @ k.float().transpose(-1, -2)
        logits = logits * (width**-0.5 if scale is None else scale)
        if causal:
            hidden = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1)
            logits = logits.masked_fill(hidden, -torch.inf)
        level = logits.logsumexp(-1)
    return out.reshape(heads, count, -1), level.reshape(heads, count)


def _merged(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to the keys of both, which have none in common."""
    level = torch.logaddexp(one[1], two[1])
    shares = ((part[1] - level).exp()[..., None].to(one[0].dtype) for part in (one, two))
    return one[0] * next(shares) + two[0] * next(shares), level


def flex_block_attention(
    query: Tensor, key: Tensor, value: Tensor, choice: BlockChoice, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The same by FlexAttention, compiled on CUDA."""
    if choice.order is not None:
        order = choice.order if len(choice.order) == len(key) else None
        if order is None:  # each query head has an order of its own
            times = len(choice.order) // len(key)
            key, value = (x.repeat_interleave(times, 0) for x in (key, value))
            order = choice.order
        index = order[..., None].expand(-1, -1, key.shape[-1])
        key, value = key.gather(1, index), value.gather(1, index)
    mask = flex_mask(choice, len(query), query.shape[1], key.shape[1])
    run: Any = torch.compile(flex_attention, dynamic=True) if query.is_cuda else flex_attention
    given = [x[None].contiguous() for x in (query, key, value)]
    # Tiles lie within blocks, and short chunks stay with this kernel: that for decoding has others.
    tile = min(choice.size & -choice.size, _WIDEST)
    options: Any = {"BLOCK_M": tile, "BLOCK_N": tile, "FORCE_USE_FLEX_ATTENTION": True}
    out, aux = run(
        *given,
        block_mask=mask,
        scale=scale,
        enable_gqa=len(query) != len(key),
        return_aux=AuxRequest(lse=True),
        kernel_options=options if query.is_cuda else None,
    )
    return out[0], aux.lse[0].float()


def flex_mask(choice: BlockChoice, heads: int, length: int, n: int) -> BlockMask:
    """The choice as a block mask `[1, Hq, L, S]`; keys lie in the order of the choice."""
    size, device = choice.size, choice.blocks.device
    times, before = heads // len(choice.blocks), n - length
    blocks = choice.blocks.repeat_interleave(times, 0)  # [Hq, q, k]
    wide = choice.wide
    places = torch.arange(n, device=device).expand(heads, -1)
    if choice.order is not None:
        places = choice.order.repeat_interleave(times, 0)
    columns = torch.zeros(heads, n, dtype=torch.bool, device=device)
    if choice.columns is not None:
        columns = choice.columns.repeat_interleave(times, 0).gather(1, places)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        place, first = places[h, k], q // size * size + before
        chosen = blocks[h, q // size, k // wide] | columns[h, k]
        return torch.where(place < first, chosen, place <= q + before)

    # Tiles of the kernel are squares; blocks of keys of another width are looked up in them.
    rows, tiles = blocks.shape[1], -(-n // size)
    starts = torch.arange(rows, device=device) * size + before
    padded = torch.nn.functional.pad(places, (0, tiles * size - n), value=n + size)
    cut = padded.view(heads, 1, tiles, size)
    marked = torch.nn.functional.pad(columns, (0, tiles * size - n)).view(heads, 1, tiles, size)
    picked = blocks[..., None]
    if wide != size:
        each = blocks.repeat_interleave(wide, -1)[..., :n]
        each = torch.nn.functional.pad(each, (0, tiles * size - n))
        picked = each.view(heads, rows, tiles, size)
    early, own = cut < starts[:, None, None], cut < starts[:, None, None] + size
    some = (early & (picked | marked)).any(-1) | (own & ~early).any(-1)
    counts, index = _listed(some)
    made: BlockMask = BlockMask.from_kv_blocks(
        counts, index, BLOCK_SIZE=size, mask_mod=rule, seq_lengths=(length, n)
    )
    return made


def _listed(some: Tensor) -> tuple[Tensor, Tensor]:
    """Number of True entries of the last axis, and their indices first, in a batch of one."""
    index = (~some).to(torch.int8).argsort(dim=-1, stable=True)
    return some.sum(-1, dtype=torch.int32)[None], index.to(torch.int32)[None]
