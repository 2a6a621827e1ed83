"""LazyLLM: tokens dropped in the prompt may return while decoding."""

from __future__ import annotations

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import stable_topk


@register(
    "lazyllm",
    paper="2407.14057",
    needs=("attn",),
    sites=("llm",),
    stages=(0.25,),
    revives=True,
    text=True,
)
def lazyllm(tokens: Tokens, budget: int) -> Reduction:
    """Keep the tokens that the last query attends to; later tokens may bring others back.

    Fu et al. (2024). At every decode step the attention of the layer before a cut, which has the
    keys of all tokens that came so far, ranks them again; those within the budget that were dropped
    run through the layers behind once, at their original positions, and stay. The paper may ignore
    stored tokens again; here what has come back stays visible. Several cuts are several stages,
    `lazyllm@llm8:0.7+lazyllm@llm16:0.4`. A DynamicCache, sdpa or eager; later turns row by row.
    Calls of several tokens bring nothing back: with drafts of `generate` (`assistant_model`,
    `prompt_lookup_num_tokens`) the answer may be another, and a warning says so.

    Args:
        tokens: `attn` `[..., N]`, attention from the last query, mean over heads.
        budget: Tokens to keep, and to rank per step; ties go to the lowest index.
    """
    return Reduction.prune(stable_topk(tokens.need("attn"), budget), tokens.n)
