"""Cross-entropy over codebooks, plain or with the adaptive weights of LiveSpeech (2406.02897)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, eq=False)
class CodeLoss:
    """Loss of a head.

    Attributes:
        loss: Scalar to minimise.
        each: `[K]` mean cross-entropy per codebook, unweighted; 0 where there is no target.
        right: `[K]` share of codes whose likeliest entry is the true one.
    """

    loss: Tensor
    each: Tensor
    right: Tensor


def code_loss(logits: Tensor, codes: Tensor, weights: Tensor | None = None) -> CodeLoss:
    """Mean over the codes that are there.

    Args:
        logits: `[..., K, V]`.
        codes: `[..., K]`; what is outside 0..V-1 (no code, -100) is left out.
        weights: `[..., K]` of each code; None weighs all alike.
    """
    size = logits.shape[-1]
    there = (codes >= 0) & (codes < size)
    target = codes.where(there, 0)
    lost = -F.log_softmax(logits.float(), -1).gather(-1, target[..., None])[..., 0]
    lost = lost * there
    flat = there.flatten(0, -2)
    number = flat.sum(0).clamp(min=1)  # [K]
    weighted = lost if weights is None else lost * weights
    hits = (logits.argmax(-1) == codes).flatten(0, -2).sum(0)
    each = lost.detach().flatten(0, -2).sum(0) / number
    return CodeLoss(weighted.sum() / there.sum().clamp(min=1), each, hits / number)


@torch.no_grad()
def adaptive_weights(
    logits: Tensor, codes: Tensor, power: float = 0.1, ceiling: float = 0.5
) -> Tensor:
    """Weights that let a codebook count as far as the ones before it are right already.

    The first codebook weighs 1, codebook q the product of the probabilities of the true codes
    before it, to the power; a code that is likelier than the ceiling is left out, and what
    remains is scaled so that the heaviest code of a frame weighs 1.

    Args:
        logits: `[..., K, V]`.
        codes: `[..., K]`.
        power: λ: 0.1 as published, 0.05 with groups.
        ceiling: p_max; 1 leaves nothing out.

    Returns:
        `[..., K]`, no gradient.
    """
    there = (codes >= 0) & (codes < logits.shape[-1])
    target = codes.where(there, 0)
    logp = F.log_softmax(logits.float(), -1).gather(-1, target[..., None])[..., 0]
    logp = logp * there
    before = F.pad(logp.cumsum(-1)[..., :-1], (1, 0))  # sum over the codebooks in front
    weights = (power * before).exp() * (logp.exp() <= ceiling) * there
    most = weights.amax(-1, keepdim=True)
    return weights / torch.where(most > 0, most, 1.0)
