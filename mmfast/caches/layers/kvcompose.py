"""KVCompose: heads choose for themselves, and layers by what their choices are worth together."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import best_places, snap, stable_topk


@policy(
    "kvcompose",
    paper="2509.05165",
    needs=("attn_repeated", "depth", "layers_attn"),
    role="score",
    uneven=True,
)
def kvcompose(tokens: Tokens, budget: int, *, chunk: int = 2048, first: bool = False) -> Reduction:
    """Keep in each head what the model attends to when it reads its prompt again, by layer.

    Akulov et al. (2025): the best tokens of all heads of a layer, the second-best ones and so on
    are composite tokens, which score by the mean over heads. Those of all layers compete for one
    budget, so that a layer whose heads agree on much keeps more. In a layer all heads keep equally
    many. A head scores a token by the attention it gets, plus the mean of that over heads.

    Args:
        tokens: `attn_repeated` `[..., H, N]`, the largest attention that an entry receives while
            the prompt is read once more, mean over the query heads of a key head; `depth`, the
            number of the layer among those that are thinned; and `layers_attn` `[..., H, L, M]`,
            the scores of the composite tokens of all L layers, -1 where a layer has fewer.
        budget: Tokens to keep in every head, mean over the layers; a share is of all tokens.
        chunk: Tokens of a chunk, at least 1, in which the prompt is read; the whole prompt at once
            as published.
        first: Give the first layer the best score of any layer at each rank, so that it keeps most.

    Raises:
        MmfastError: Conversations of a batch whose layers keep different numbers of tokens.
    """
    counts = _counts(tokens.need("layers_attn").double(), budget, first)
    mine = counts[..., int(tokens.need("depth"))].flatten()
    if bool((mine != mine[0]).any()):
        raise MmfastError(
            f"'kvcompose' keeps {mine.unique().tolist()} tokens in a layer of the conversations of "
            "a batch; reduce them one by one"
        )
    count = min(max(int(mine[0]), 1), tokens.n)
    if count == tokens.n:
        return Reduction.identity(tokens.n, tuple(tokens.x.shape[:-2]), tokens.x.device)
    score = snap(_joint(tokens.need("attn_repeated")))
    return Reduction.prune(best_places(score, count), tokens.n, ordered=True)


def composite(attn: Tensor) -> Tensor:
    """Scores `[N]`, falling, of the composite tokens of heads that entries `[H, N]` attend to."""
    return snap(_joint(attn).sort(dim=-1, descending=True).values.mean(-2))


def _joint(attn: Tensor) -> Tensor:
    attn = attn.double()
    return attn + attn.mean(-2, keepdim=True)


def _counts(tables: Tensor, budget: int, first: bool) -> Tensor:
    """Composite tokens `[..., L]` of each layer among the best of all, of tables `[..., L, M]`."""
    layers, n = tables.shape[-2:]
    if first:
        tables = torch.cat([tables.amax(-2, keepdim=True), tables[..., 1:, :]], -2)
    owner = stable_topk(tables.flatten(-2), budget * layers) // n
    counts = torch.zeros(*owner.shape[:-1], layers, dtype=torch.int64, device=owner.device)
    return counts.scatter_add(-1, owner, torch.ones_like(owner))
