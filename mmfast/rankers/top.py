"""ToP: tokens are ranked early as the final layer would rank them.

In an encoder early layers are trained until their own attention ranks tokens as the final layer
does. Here the model stays as it is: a small head beside a decoder layer learns that ranking, with
the loss of the paper, from the hidden states that enter the layer.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.compressors.base import placed, read_weights
from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import stable_topk

FOLDER = "rankers"  # beside the weights of a checkpoint


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


def training(layer: int) -> str:
    """The command that trains a head."""
    return f"python -m mmfast.rankers.train --layers {layer}"


def file_of(folder: str | Path, layer: int) -> Path:
    """The file of the head of a layer beside a checkpoint."""
    return Path(folder) / FOLDER / f"top-{layer}.safetensors"


def find(home: str | Path, layer: int, path: str = "") -> Path:
    """The file of the head of a layer: `path`, or the one beside the checkpoint `home`.

    ModelError with the command that trains it where there is none, or it is another layer's.
    """
    file = Path(path) if path else file_of(home, layer)
    if not file.is_file():
        known = sorted(each.stem.split("-")[-1] for each in file.parent.glob("top-*.safetensors"))
        have = f" (there are heads of layers {', '.join(known)})" if known else ""
        missing = f"no file {path!r}" if path else f"{str(home)!r} has no {FOLDER}/{file.name}"
        raise ModelError(
            f"'top@llm{layer}' is learned, and {missing}{have}; train a head with "
            f"`{training(layer)}`, or name a file: top@llm{layer}:0.25?path=FILE"
        )
    mine = load(file).config["layer"]
    if mine != layer:
        raise ModelError(
            f"{str(file)!r} holds the head of layer {mine}, not of {layer}; write top@llm{mine}, "
            f"or train one ({training(layer)})"
        )
    return file


def load(path: str | Path) -> RankHead:
    """Read a head, on the CPU in float32; ModelError where the file is none."""

    def make(config: dict[str, Any]) -> RankHead:
        if config.pop("name") != RankHead.name:
            raise ValueError("it holds another kind of module")
        return RankHead(**config)

    found: RankHead = read_weights(path, "ranking", make)
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
    if not Path(path).is_file():
        raise ModelError(
            f"'top' is learned and {path!r} is no file; attach it to a model that has weights, or "
            f"name a file: top:{budget}?path=FILE"
        )
    head: RankHead = placed(path, tokens.x.device, torch.float32, load)
    width = head.config["width"]
    if width != tokens.x.shape[-1]:
        raise ModelError(
            f"{path!r} is for states of width {width}, and these have {tokens.x.shape[-1]}; train "
            f"a head on this model ({training(head.config['layer'])})"
        )
    score = head(tokens.x.float(), tokens.need("query")[..., -1, :].float())
    return Reduction.prune(stable_topk(score, budget), tokens.n)
