"""IVC-Prune: keep the tokens whose places are the model's coordinates, and the foreground."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import index_mask, one_by_one, snap, stable_topk


@register(
    "ivc_prune",
    paper="2602.03060",
    needs=("rope", "values", "text_values"),
    sites=("llm",),
    stages=(16 / 28,),
)
def ivc_prune(
    tokens: Tokens, budget: int, *, anchors: float = 0.4, seeds: float = 0.01
) -> Reduction:
    """Keep implicit visual coordinates, and the tokens whose values are like the question's.

    Sun et al., ICLR 2026. Coordinates are the tokens whose rotary angles are nearest to no turn
    (largest mean cosine) and to a quarter turn (largest mean sine), half each. Seeds are the tokens
    that the text resembles most, by a softmax of products of values; text and seeds together then
    rank all tokens. Defaults are those of the reference for Qwen2.5-VL, which keeps half of the
    tokens from layer 16 of 28 on.

    Args:
        tokens: `rope` `[..., N, 2]`, mean cosine and sine; `values` `[..., N, H * d]` and
            `text_values` `[..., T, H, d]` of the layer before.
        budget: Tokens to keep; ties go to the lowest index.
        anchors: Share of coordinates in the budget, from 0 to 1.
        seeds: Seeds as a share of all tokens, at least one.
    """
    if not (0 <= anchors <= 1 and 0 <= seeds <= 1):
        raise SpecError(
            f"knobs anchors={anchors}, seeds={seeds} of 'ivc_prune' are no shares; "
            "choose from 0 to 1"
        )

    def prune(item: Tokens) -> Reduction:
        text = item.need("text_values").double()  # [T, H, d]
        values = item.need("values").double().unflatten(-1, text.shape[1:])  # [N, H, d]
        turn, each = snap(item.need("rope").double()), round(anchors * budget / 2)
        places = [stable_topk(turn[:, side], each) for side in (0, 1)]
        first = index_mask(torch.cat(places)[:budget], item.n)
        from_text = _resemblance(text, values)
        count = min(max(1, round(seeds * item.n)), budget - int(first.sum()))
        chosen = stable_topk(snap(from_text.mean(0)), count)
        both = torch.cat([from_text, _resemblance(values[chosen], values)])
        first[chosen] = True
        score = snap(both.mean(0)).masked_fill(first, torch.inf)
        return Reduction.prune(stable_topk(score, budget), item.n)

    return one_by_one(prune, tokens)


def _resemblance(queries: Tensor, values: Tensor) -> Tensor:
    """Softmax over the tokens of products of values `[K, H, d]` and `[N, H, d]`, `[K, N]`."""
    product = torch.einsum("khd,nhd->hkn", queries, values) / values.shape[-1] ** 0.5
    share: Tensor = product.softmax(-1).mean(0)
    return share
