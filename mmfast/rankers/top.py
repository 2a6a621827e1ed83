"""ToP: tokens are ranked early as the final layer would rank them.

In an encoder early layers are trained until their own attention ranks tokens as the final layer
does. Here the model stays as it is: a small head beside a decoder layer learns that ranking, with
a loss of pairs as there, from the hidden states that enter the layer.
"""

from __future__ import annotations

import math
from pathlib import Path

from torch import Tensor, nn

from mmfast.compressors.base import read_module
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import stable_topk
from mmfast.rankers import fitted


class RankHead(nn.Module):
    """Score of tokens before a decoder layer, shaped like the attention that it foretells.

    A query made of the last text token meets a key made of each token in every head; a token also
    has a score of its own. The score is the logarithm of the mean over heads of the exponentials.
    """

    name = "top"

    def __init__(self, width: int, layer: int, *, inner: int = 96, heads: int = 6) -> None:
        super().__init__()
        self.config = {"width": width, "layer": layer, "inner": inner, "heads": heads}
        self.seen, self.asked = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, inner), nn.Linear(width, inner)
        self.own = nn.Linear(width, heads)

    def forward(self, x: Tensor, last: Tensor) -> Tensor:
        """Score tokens `[..., N, D]` for the last text token `[..., D]`: `[..., N]` float32."""
        heads = self.config["heads"]
        seen, asked = self.seen(x), self.asked(last)[..., None, :]
        query, key = (
            layer(each).unflatten(-1, (heads, -1))  # [..., N or 1, H, d]
            for layer, each in ((self.query, asked), (self.key, seen))
        )
        score = (query * key).sum(-1) / math.sqrt(key.shape[-1]) + self.own(seen)
        found: Tensor = score.float().logsumexp(-1) - math.log(heads)
        return found


def load(path: str | Path) -> RankHead:
    """Read a head, on the CPU in float32; ModelError where the file is none."""
    found: RankHead = read_module(path, "ranking", RankHead)
    return found


@register("top", kind="ranker", paper="2306.14393", needs=("x", "query"), sites=("llm",), layer=2)
def top(tokens: Tokens, budget: int, *, path: str = "") -> Reduction:
    """Keep the tokens that a trained head expects the final layer to attend to.

    Li et al., KDD 2023 (ToP): which tokens matter is known best in the final layer, and early
    layers are taught its ranking. Here the model stays frozen, and a small head reads the hidden
    states of the tokens and of the last text token before layer K. It is distilled, by LambdaRank,
    to the order in which the last query attends to them in the final layer.

    Args:
        tokens: Hidden states `x` `[..., N, D]`, and of the text `query` `[..., T, D]`.
        budget: Tokens to keep; ties go to the lowest index.
        path: File of the weights; "" is `rankers/top-K.safetensors` beside the model's checkpoint.
    """
    head: RankHead = fitted("top", path, tokens, load)
    score = head(tokens.x.float(), tokens.need("query")[..., -1, :].float())
    return Reduction.prune(stable_topk(score, budget), tokens.n)
