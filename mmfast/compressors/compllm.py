"""Text in segments, each read by the language model itself into fewer embeddings (CompLLM)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mmfast.compressors.base import Compressor, check_rank
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens


class CompLLM(Compressor, name="compllm"):
    """Weights beside those of a frozen language model: a LoRA, one linear layer and a mark.

    A segment of S tokens gets `ceil(S / tokens)` marks behind it, the embedding of the token that
    ends a text. The model reads both with the LoRA in the linear layers of its decoder layers
    (`models.decoder.concepts`), and the linear layer turns the last hidden states of the marks into
    embeddings. `tokens` is the rate, `shapes` tells the outputs and inputs of each linear layer by
    its name. Untrained, the LoRA changes nothing.
    """

    def __init__(
        self,
        width: int,
        tokens: int,
        shapes: Mapping[str, Sequence[int]],
        *,
        segment: int = 20,
        rank: int = 16,
        alpha: float = 32.0,
    ) -> None:
        super().__init__()
        known = {name: [int(size) for size in shape] for name, shape in shapes.items()}
        check_rank(rank, known.values())
        self.config = {"width": width, "tokens": tokens, "shapes": known}
        self.config |= {"segment": segment, "rank": rank, "alpha": alpha}
        self.rate, self.segment, self.scale = tokens, segment, alpha / rank
        self.mark: Tensor
        self.register_buffer("mark", torch.zeros(width))
        # A dot would make a parameter one of a submodule.
        self.keys = {name: name.replace(".", "/") for name in known}
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for name, (out, into) in known.items():
            self.down[self.keys[name]] = nn.Parameter(torch.randn(rank, into) / math.sqrt(into))
            self.up[self.keys[name]] = nn.Parameter(torch.zeros(out, rank))
        self.leave = nn.Linear(width, width)

    @torch.no_grad()
    def start(self, mark: Tensor, size: float) -> None:
        """Begin with a mark `[D]`, and embeddings of about the root mean square `size`."""
        self.mark.copy_(mark)
        nn.init.zeros_(self.leave.bias)
        self.leave.weight.copy_(size * torch.eye(len(mark)))  # what it reads is normalised

    def count(self, n: int) -> int:
        """Embeddings of a segment of `n` tokens."""
        return -(-n // self.rate)


def owners(n: int, first: int, segment: int, rate: int) -> Tensor:
    """Output that each of `n` tokens belongs to, `[n]`; the first ones stay alone."""
    found, total = list(range(min(first, n))), min(first, n)
    for start in range(first, n, segment):
        length = min(segment, n - start)
        count = -(-length // rate)
        found += [total + place * count // length for place in range(length)]
        total += count
    return torch.tensor(found, dtype=torch.int64)


@register(
    "compllm",
    kind="compressor",
    paper="2509.19228",
    needs=("x", "concepts", "concept_owner"),
    rate=True,
)
def compllm(
    tokens: Tokens,
    budget: int | None,
    *,
    path: str = "",
    recent: int = 32,
    first: int = 1,
    memory: int = 256,
) -> Reduction:
    """Replace the text before a question by fewer embeddings, which the model made of segments.

    Positions are counted anew, and an embedding stands for the last of the tokens that it belongs
    to. A segment that was read before is not read again, in whatever prompt it stands.

    Args:
        tokens: `x` `[N, D]`; signals `concepts` `[M, D]`, and `concept_owner` `[N]`, the output
            that each token belongs to.
        budget: None; in a spec it is the rate by which text shrinks.
        path: File of the weights; "" is the one beside the model's checkpoint.
        recent: Last tokens of a prompt that stay as they are: the question.
        first: Tokens that stay at the beginning of a conversation, such as the one that starts it.
        memory: MiB of embeddings of segments that are held, least recently used first to go.
    """
    owner = tokens.need("concept_owner")
    m = int(owner[-1]) + 1
    last = torch.searchsorted(owner, torch.arange(m, device=owner.device), right=True) - 1
    return replace(Reduction.merge(last, last[owner]), vectors=tokens.need("concepts"))
