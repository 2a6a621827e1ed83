"""Give chosen tokens a part of their nearest neighbours, and one more token the rest."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmfast.core.reduction import Mix, Reduction
from mmfast.ops.gather_rows import gather_rows
from mmfast.ops.unit import unit_rows

_STEP = 2.0**30  # cosines are compared in whole numbers of these
_CHUNK, _CHUNK_CUDA = 1 << 18, 1 << 25  # similarities held at once: 2 MB stay in cache


def neighbour_merge(
    attn: Tensor,
    keys: Tensor,
    listed: Tensor,
    rest: Tensor,
    *,
    neighbours: int = 32,
    raw: bool = False,
) -> Reduction:
    """Outputs for the listed tokens, and one summary of the others.

    A listed token becomes itself plus its nearest other tokens (cosine of keys), each weighted
    by its attention; the summary is the attention-weighted sum of the rest, at the place of the
    most attended of them. Weights are then scaled to 1 in each output.

    Args:
        attn: `[..., N]`.
        keys: `[..., N, d]`.
        listed: `[..., m]` chosen tokens. One that is listed twice is its own neighbour and gives
            one output, which `order` names twice.
        rest: `[..., r]` tokens of the summary, ascending, r >= 1.
        neighbours: How many tokens a listed one takes in, at most all others.
        raw: Leave weights as they are: 1 for the token itself, attention for the others.

    Returns:
        A Reduction with a mix; `order` is that of `listed`, the summary last. All tokens that are
        not listed are owned by the summary, though listed ones may hold a part of them.
    """
    n = attn.shape[-1]
    attn = attn.double()
    source, near = _neighbours(unit_rows(keys.double()), listed, rest, neighbours)
    weight = attn.gather(-1, near).unflatten(-1, (listed.shape[-1], -1)) if near.numel() else None
    scale = torch.ones_like(listed, dtype=torch.float64)
    if raw and listed.ndim == 1:  # a token listed twice is still one output
        scale = 1.0 - (listed[:, None] == listed).tril(-1).any(-1).double()
    elif weight is not None:
        scale = 1 / (1 + weight.sum(-1))
    heaviest = rest.gather(-1, attn.gather(-1, rest).argmax(-1, keepdim=True))
    outputs = _standing(listed, heaviest, n)
    slots = outputs.owner.gather(-1, torch.cat([listed, heaviest], dim=-1))
    own, last = slots[..., :-1], slots[..., -1:]
    share = attn.gather(-1, rest)
    if not raw:
        total = share.sum(-1, keepdim=True)
        share = torch.where(total > 0, share / total, 1 / rest.shape[-1])
    parts = [(own, listed, scale), (last.expand(rest.shape), rest, share)]
    if weight is not None:
        parts.append((own.gather(-1, source), near, (weight * scale[..., None]).flatten(-2)))
    mix = Mix(*(torch.cat(column, dim=-1) for column in zip(*parts, strict=True)))
    return replace(outputs, mix=mix, order=slots)


def _standing(listed: Tensor, heaviest: Tensor, n: int) -> Reduction:
    """Who stands for the outputs: the listed tokens, and the heaviest one for all others."""
    target = heaviest.expand(*heaviest.shape[:-1], n).contiguous().scatter_(-1, listed, listed)
    keep = torch.cat([listed, heaviest], dim=-1)
    if listed.ndim == 1:
        keep = keep.unique()
    return Reduction.merge(keep, target)


def _neighbours(rows: Tensor, listed: Tensor, rest: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Pairs of (place in `listed`, its neighbour), `[..., m * count]` each, for `most` or fewer."""
    n, m = rows.shape[-2], listed.shape[-1]
    candidates = torch.cat([listed, rest], dim=-1)  # [..., C]
    count = min(most, candidates.shape[-1] - 1)
    others = gather_rows(rows, candidates)
    place = torch.arange(m, device=rows.device)
    near: list[Tensor] = []
    at_once = _CHUNK_CUDA if rows.is_cuda else _CHUNK
    step = max(16, at_once // max(1, rows.shape[:-2].numel() * candidates.shape[-1]))
    for start in range(0, m, step):
        block = place[start : start + step]
        cosine = others[..., start : start + len(block), :] @ others.transpose(-1, -2)
        # Whole numbers with the index in the low digits: ties go to the lowest index everywhere.
        key = (cosine * _STEP).round().long() * n + (n - 1 - candidates)[..., None, :]
        key[..., torch.arange(len(block), device=rows.device), block] = torch.iinfo(key.dtype).min
        best = key.topk(count, dim=-1).indices  # [..., block, count]
        near.append(candidates[..., None, :].expand(key.shape).gather(-1, best).flatten(-2))
    source = place.repeat_interleave(count).expand(*listed.shape[:-1], -1)
    return source, torch.cat([source[..., :0], *near], dim=-1)
