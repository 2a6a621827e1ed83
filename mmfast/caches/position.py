"""Sinks: the first tokens, which attention leans on whatever they say."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import marked


@policy("sink", paper="2309.17453", needs=(), role="position", moment="always")
def sink(tokens: Tokens, budget: int, *, positions: str = "original") -> Reduction:
    """Keep the first tokens of the conversation.

    StreamingLLM (Xiao et al., ICLR 2024) is `sink:4?positions=new+window:4096`: a model puts the
    attention it has no use for on the first tokens, and breaks when they leave. Only N of `x`
    `[..., N, d]` is read; a share is of all tokens.

    Args:
        tokens: As above.
        budget: Tokens to keep.
        positions: `new` has positions inside the cache: the sinks stand right before the window,
            however long ago they were said, so no distance is longer than the model has learned.
            For one window behind a number of sinks. `original` leaves them where they were.
    """
    keep = torch.arange(budget, device=tokens.x.device)
    return Reduction.prune(keep.expand(*tokens.x.shape[:-2], -1), tokens.n)


@policy("window", needs=(), role="position", moment="always")
def window(tokens: Tokens, budget: int) -> Reduction:
    """Keep the most recent tokens, of whatever kind.

    Only N of `x` `[..., N, d]` is read; a share is of all tokens.
    """
    keep = torch.arange(tokens.n - budget, tokens.n, device=tokens.x.device)
    return Reduction.prune(keep.expand(*tokens.x.shape[:-2], -1), tokens.n)


@policy("streamingvlm", paper="2510.09608", needs=("kind",), role="position", moment="always")
def streamingvlm(
    tokens: Tokens, budget: int, *, sink: float = 0.125, text: float = 0.125
) -> Reduction:
    """Keep the first text, the latest text and the latest video, in windows of their own.

    Xu et al. (2025): what was said lasts longer than what was seen. `streamingvlm:4096` has the
    published 512 + 512 text tokens, and 3072 for the last seconds of video. What one part does
    not fill the others take: video first, then text.

    Args:
        tokens: `kind` `[..., N]`; separators and markers go with the video. `x` `[..., H, N, d]`
            only says how many heads there are.
        budget: Tokens to keep, text and video together; a share is of all tokens.
        sink: The first text tokens: a share of the budget below 1, a number from 1.
        text: The last text tokens, likewise.

    Raises:
        SpecError: A negative sink or text.
    """
    if min(sink, text) < 0:
        raise SpecError(f"knobs sink={sink}, text={text} of 'streamingvlm': choose 0 or more")
    first = min(_tokens(sink, budget), budget)
    last = min(_tokens(text, budget), budget - first)
    keep = marked(_windows(tokens.need("kind") == 0, budget, first, last))
    lead = tokens.x.shape[:-2]
    if len(lead) == keep.ndim:  # kinds are the same for all heads
        keep = keep[..., None, :]
    return Reduction.prune(keep.expand(*lead, budget), tokens.n)


def _tokens(part: float, budget: int) -> int:
    return round(part) if part >= 1 else round(part * budget)


def _windows(text: Tensor, budget: int, first: int, last: int) -> Tensor:
    """Mark `budget` tokens `[..., N]`; `text` is bool, the others are video."""
    words = text.sum(-1, keepdim=True)
    frames = text.shape[-1] - words
    first_words = words.clamp_max(first)
    last_words = (words - first_words).clamp_max(last)
    seen = torch.minimum(budget - first_words - last_words, frames)
    last_words = budget - first_words - seen  # video that is not there leaves room for text
    rank = torch.where(text, text.cumsum(-1), (~text).cumsum(-1)) - 1  # within its own kind
    stays = (rank < first_words) | (rank >= words - last_words)
    return torch.where(text, stays, rank >= frames - seen)
