"""Rules of selection as the papers' own code computes them: slow, plain, and apart from the ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mmfast.core.tokens import Tokens


def divprune(tokens: Tokens, budget: int) -> Tensor:
    """Every step reads the distances to all chosen rows again."""
    rows = F.normalize(tokens.x, dim=-1)
    distance = 1 - rows @ rows.T
    picks = [int(distance.topk(2, dim=0, largest=False).values[1].argmax())]
    while len(picks) < budget:
        picks.append(int(distance[torch.tensor(picks)].amin(0).argmax()))
    return torch.tensor(picks)


def evs(tokens: Tokens, budget: int) -> Tensor:
    """Cosine over full-size temporaries and a sort of everything."""
    frames = tokens.grid[0] if tokens.grid else 1
    clip = tokens.x.unflatten(0, (frames, -1))
    change = 1 - F.cosine_similarity(clip[1:], clip[:-1], dim=-1)
    change = torch.cat([255 * torch.ones_like(change[:1]), change])
    return change.flatten().argsort(descending=True, stable=True)[:budget]


def holitom_inner(tokens: Tokens, budget: int) -> Tensor:
    """One merge after the other, each on the states that the last one left."""
    attn = tokens.need("attn")
    keep = attn.argsort(descending=True, stable=True)[:budget]
    rows = F.normalize(tokens.x, dim=-1)
    states = tokens.x.clone()
    chosen = set(keep.tolist())
    for token in range(tokens.n):
        if token not in chosen:
            target = keep[(rows[keep] @ rows[token]).argmax()]
            states[target] = (states[target] + states[token]) / 2
    return keep


TEXTBOOKS: dict[str, Callable[[Tokens, int], Tensor]] = {
    "divprune": divprune,
    "evs": evs,
    "holitom_inner": holitom_inner,
}


def windows(similarity: Tensor, tau: float, longest: int) -> tuple[list[tuple[int, int]], int]:
    """Windows that save the most tokens: a gain for every pair of frames, compared one by one.

    Args:
        similarity: `[T - 1, n]` of every place with the frame after.
        tau: Above it a place stands still.
        longest: Most frames in a window.

    Returns:
        First and last frame of all segments in order, and the tokens saved.
    """
    frames = len(similarity) + 1
    gains = torch.zeros(frames, frames)
    for first in range(frames - 1):
        still = (similarity[first:] > tau).cumprod(0).sum(1)
        gains[first, first + 1 :] = still * torch.arange(1, frames - first)
    best, begins = torch.zeros(frames), torch.zeros(frames, dtype=torch.int64)
    for last in range(frames):
        most = best[last - 1] if last else torch.tensor(0.0)
        begin = last
        for width in range(2, min(last + 1, longest) + 1):
            before = best[last - width] if last >= width else 0
            total = before + gains[last - width + 1, last]
            if total > most:
                most, begin = total, last - width + 1
        best[last], begins[last] = most, begin
    segments = [(int(begins[-1]), frames - 1)]
    while segments[-1][0] > 0:
        last = segments[-1][0] - 1
        segments.append((int(begins[last]), last))
    return segments[::-1], int(best[-1])


def importance(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention with its weights kept, as `output_attentions=True` computes it.

    Args:
        query: `[1, H, L, d]`.
        key: `[1, Hkv, L, d]`.
        value: `[1, Hkv, L, d]`.

    Returns:
        The output `[1, H, L, d]` and the attention each key receives `[1, L]`.
    """
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    hidden = torch.full((length, length), torch.finfo(query.dtype).min).triu(1)
    logits = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5 + hidden
    weights = logits.softmax(-1, dtype=torch.float32).to(query.dtype)
    return weights @ value, weights.mean(1).mean(1)


def head_gather(states: Tensor, index: Tensor) -> Tensor:
    """Entries of every head by an index as wide as the states: `[1, H, N, d]`, `[H, M]`."""
    return states.gather(2, index[None, :, :, None].expand(-1, -1, -1, states.shape[-1]))
