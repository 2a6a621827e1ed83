"""Losses of the heads that draft along time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.heads.base import AudioHead

IGNORED = -100


@dataclass(frozen=True, eq=False)
class HeadLoss:
    """What training a head says.

    Attributes:
        loss: The weighted sum, to be differentiated.
        terms: Per module its mean cross-entropy, detached.
        right: Per module the share of labels that its best guess is.
    """

    loss: Tensor
    terms: list[float]
    right: list[float]


def head_loss(
    head: AudioHead,
    hidden: Tensor,
    embeds: Tensor,
    labels: Tensor,
    *,
    segments: Tensor | None = None,
    rows: slice | None = None,
    teacher: Tensor | None = None,
    share: float = 1.0,
) -> HeadLoss:
    """The loss of a head on whole sequences; the backbone gets no gradient.

    Args:
        head: In training.
        hidden: `[B, T, D]` hidden states of the backbone, as `head.reads` says.
        embeds: `[B, T, D]` embeddings of the tokens.
        labels: `[B, T]` the token at every place, -100 where none is to be guessed.
        segments: `[B, T]` number of the sequence that a token is of, where several are packed
            into a row: they do not see each other.
        rows: Rows of the vocabulary among which the guesses are; labels lie within.
        teacher: `[B, T, rows]` logits of the backbone, whose place t is about token t + 1: the
            modules then also learn to say what the backbone would.
        share: Of the teacher in the loss, in [0, 1]; 1 is the teacher alone, where there is one.

    Raises:
        ModelError: Shapes do not fit, or no label is there.
    """
    if labels.shape != hidden.shape[:2] or embeds.shape != hidden.shape:
        raise ModelError(
            f"hidden states {list(hidden.shape)}, embeddings {list(embeds.shape)} and labels "
            f"{list(labels.shape)} differ; they are [B, T, D], [B, T, D] and [B, T]"
        )
    mask = None
    if segments is not None or head.window:
        alone = labels.new_zeros(labels.shape) if segments is None else segments
        mask = packed_mask(alone, hidden.dtype, head.window)
    total = hidden.new_zeros(())
    terms, right = [], []
    for k, states in enumerate(head(hidden.detach(), embeds.detach(), mask)):
        chosen, target = _places(labels, segments, k)
        if not chosen.any():
            continue
        logits = head.output(k, states[:, : chosen.shape[1]][chosen], rows or slice(None))
        target = target[chosen] - (0 if rows is None else rows.start or 0)
        hard = F.cross_entropy(logits.float(), target)
        term = hard
        if teacher is not None:
            soft = teacher[:, k + 1 : k + 1 + chosen.shape[1]][chosen].float().softmax(-1)
            term = (1 - share) * hard + share * F.cross_entropy(logits.float(), soft)
        total = total + head.weights()[k] * term
        terms.append(float(hard.detach()))
        right.append(float((logits.argmax(-1) == target).float().mean()))
    if not terms:
        raise ModelError("no label behind the second token; use longer sequences or fewer -100")
    return HeadLoss(total, terms, right)


def _places(labels: Tensor, segments: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """Places `[B, T - k - 2]` that module k guesses at, and the tokens there."""
    n = max(0, labels.shape[1] - k - 2)
    target = labels[:, k + 2 :]
    chosen = target != IGNORED
    if segments is not None:
        chosen = chosen & (segments[:, :n] == segments[:, k + 2 :])
    return chosen, target


def packed_mask(segments: Tensor, dtype: torch.dtype, window: int = 0) -> Tensor:
    """`[B, 1, T, T]` added to scores: causal, each sequence of a row by itself."""
    n = segments.shape[1]
    near = torch.ones(n, n, dtype=torch.bool, device=segments.device).tril()
    if window:
        near = near.triu(1 - window)
    seen = (segments[:, :, None] == segments[:, None]) & near
    mask = torch.zeros(seen.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
