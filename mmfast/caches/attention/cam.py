"""CaM: the values of what leaves go to the tokens behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.caches.attention.heavy import heaviest
from mmfast.core.errors import SpecError
from mmfast.core.reduction import Mix, Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import best_places, complement

_BLOCK = 1 << 17  # parts of values found at once: temporaries are 5 MB then, whatever is evicted


@policy("cam", paper="LCTmppB165", needs=("attn_sum",), role="score")
def cam(tokens: Tokens, budget: int, *, recent: float = 0.5, merge: int = 32) -> Reduction:
    """Keep as `h2o` does, and add to the values of kept tokens those of evicted ones before them.

    Zhang et al. (ICML 2024): whatever is evicted is missing in the output of attention. A token
    that leaves gives an equal part of its value to each of the next kept ones, the more surely the
    more attention it gathered beside them. Keys stay as they are, and what is added is no mean:
    those tokens then stand for it with their own attention.

    Args:
        tokens: Keys `x` `[..., H, N, d]` and `attn_sum` `[..., H, N]`, the attention each token
            received from all queries so far.
        budget: Tokens to keep in every head; a share is of all tokens.
        recent: Share of the budget that goes to the last tokens; at 1 all of it does.
        merge: Kept tokens among which the value of an evicted one is divided, at least 1; fewer
            where not so many follow it, and none where none does.

    Raises:
        SpecError: `recent` outside [0, 1], or a `merge` below 1.
    """
    if merge < 1:
        raise SpecError(f"knob merge={merge} of 'cam': choose 1 token or more")
    attn = tokens.need("attn_sum").double()
    keep = best_places(heaviest("cam", attn, budget, 0, recent), budget)
    pruned = Reduction.prune(keep, tokens.n, ordered=True)
    mix = _given_away(attn, keep, merge)
    return Reduction(pruned.keep, pruned.owner, mix=mix, own_keys=True)


def _given_away(attn: Tensor, keep: Tensor, merge: int) -> Mix:
    """Kept tokens `[..., M]`, each whole, and parts of the others of those with `attn` `[..., N]`.

    Others lie behind one another, with `merge` parts each; parts that nothing takes weigh 0.
    """
    gone, held, budget = complement(keep, attn.shape[-1]), attn.gather(-1, keep), keep.shape[-1]
    shape = *keep.shape[:-1], budget + gone.shape[-1] * merge
    output, source = keep.new_empty(shape), keep.new_empty(shape)
    weight = torch.empty(shape, dtype=torch.float32, device=keep.device)
    output[..., :budget] = torch.arange(budget, device=keep.device)
    source[..., :budget], weight[..., :budget], begin = keep, 1, budget
    for some in gone.split(max(1, _BLOCK // (keep[..., 0].numel() * merge)), -1):
        first = torch.searchsorted(keep, some.contiguous())[..., None]  # [..., E, 1] the next kept
        slots = first + torch.arange(merge, device=keep.device)
        there = slots < budget
        slots, count = slots.clamp_max(budget - 1), there.sum(-1).clamp_min(1)
        near = held.gather(-1, slots.flatten(-2)).view_as(slots) * there
        mean, left = near.sum(-1) / count, attn.gather(-1, some)
        # The mean of the draws of the paper, which merge a token or do not.
        chance = torch.where(mean > 0, left / mean.clamp_min(1e-300), (left > 0).double())
        share = (chance.clamp_max(1) / count)[..., None] * there
        here = slice(begin, begin := begin + some.shape[-1] * merge)
        output[..., here], weight[..., here] = slots.flatten(-2), share.flatten(-2)
        source[..., here] = some[..., None].expand(slots.shape).flatten(-2)
    return Mix(output, source, weight)
