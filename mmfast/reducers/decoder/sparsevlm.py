"""SparseVLM: words that speak of the picture rate its tokens, and dropped ones are recycled."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.clustering import dpc_knn
from mmfast.ops.ranking import one_by_one, snap, stable_topk
from mmfast.ops.similarity import unit_rows


@register(
    "sparsevlm",
    paper="2410.04417",
    needs=("x", "query", "attn_text"),
    sites=("llm",),
    stages=(3 / 32, 7 / 32, 1 / 2),
    adaptive=True,
)
def sparsevlm(
    tokens: Tokens, budget: int | None, *, rate: float = 0.5, recycle: float = 0.3, group: int = 10
) -> Reduction:
    """Keep the tokens that words about the picture attend to, and clusters of the best others.

    Zhang et al., ICML 2025. Raters are the text tokens whose likeness to the visual tokens is above
    the mean of all text; their mean attention ranks the visual tokens. Of those dropped, the best
    are clustered by density peaks and stay as the means of their clusters. The cuts lie where the
    reference has them: behind layers 2, 6 and 15 of 32. Likeness is the softmax of cosines of
    hidden states at the cut, where the paper multiplies embeddings in front of the first layer;
    hidden states have a few channels that would decide a product alone.

    Args:
        tokens: Hidden states `x` `[..., N, D]` and `query` `[..., T, D]`, and `attn_text`
            `[..., N, T]`, attention from each text token, mean over heads.
        budget: Tokens to keep, clusters included; None drops a share (`rate`) of the tokens beyond
            the rank of the raters' attention.
        rate: The share without a budget, from 0 to 1.
        recycle: Share of dropped tokens that are clustered, from 0 (all are lost) to 1.
        group: Tokens to a cluster, about; small budgets keep as many tokens as clusters at least.
    """
    if not (0 <= rate <= 1 and 0 <= recycle <= 1 and group >= 1):
        raise SpecError(
            f"knobs rate={rate}, recycle={recycle}, group={group} of 'sparsevlm' do not fit; "
            "choose shares from 0 to 1 and a group from 1"
        )

    def reduce(item: Tokens) -> Reduction:
        rating = item.need("attn_text")[:, raters(item.x, item.need("query"))].double()
        if budget is None:
            kept = item.n - int(rate * (item.n - int(torch.linalg.matrix_rank(rating))))
            count = _clusters(item.n - kept, recycle, group)
        else:
            kept = _kept(item.n, budget, recycle, group)
            count = budget - kept
        order = stable_topk(rating.mean(-1), item.n)
        best, rest = order[:kept], order[kept:]
        pool = rest[: int(recycle * len(rest)) + 1].sort().values if count else rest[:0]
        return _recycled(item.x, best, pool, count)

    return one_by_one(reduce, tokens)


def raters(x: Tensor, query: Tensor) -> Tensor:
    """Mark the text tokens `[T, D]` that are more like the visual ones `[N, D]` than the mean."""
    alike = unit_rows(x.double()) @ unit_rows(query.double()).T
    share = snap(alike.softmax(-1).mean(0))
    above = share > snap(share.mean())
    return above | ~above.any()  # equal words are all raters


def _clusters(dropped: int, recycle: float, group: int) -> int:
    """Count the clusters that the reference makes of so many dropped tokens."""
    pool = min(dropped, int(recycle * dropped) + 1) if recycle else 0
    return min(pool, pool // group + 1)


def _kept(n: int, budget: int, recycle: float, group: int) -> int:
    """Count the tokens that stay as they are, so that with the clusters the budget is met."""
    kept = budget
    while kept > (budget + 1) // 2 and kept + _clusters(n - kept, recycle, group) > budget:
        kept -= 1
    return kept


def _recycled(x: Tensor, best: Tensor, pool: Tensor, count: int) -> Reduction:
    """Keep `best` and the means of `count` clusters of `pool`; all other tokens are dropped."""
    if not count:
        return Reduction.prune(best, len(x))
    centres, member = dpc_knn(x[pool].float(), count, count)
    target = torch.full((len(x),), -1, device=x.device)
    target[best], target[pool] = best, pool[centres][member]
    return Reduction.merge(torch.cat([best, pool[centres]]), target)
