"""PixelPrune: drop patches that their neighbours predict, before the vision tower."""

from __future__ import annotations

import torch

from mmfast.core.errors import SpecError, unknown
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.image import METRICS, surprise, unpredicted
from mmfast.ops.ranking import marked, stable_topk


@register(
    "pixelprune",
    paper="2604.00886",
    needs=("pixels", "grid"),
    sites=("pixel",),
    adaptive=True,
)
def pixelprune(
    tokens: Tokens,
    budget: int | None,
    *,
    threshold: float = 0.0,
    metric: str = "max",
    anchored: bool = True,
) -> Reduction:
    """Drop the patches whose pixels follow from the patches on the left and above.

    With A on the left, B above and C above A, a patch is predicted to be B if C matches A and not
    B, else A (Wang et al., 2026). At threshold 0 only exact repeats go, which is lossless. Frames
    of a video are predicted one by one; the first patch of each always stays.

    Args:
        tokens: `pixels` `[..., N, P]`, the pixels of each future token, and `grid`.
        budget: Tokens to keep, those farthest from their prediction; None drops all that match.
        threshold: Largest distance of a match, in units of the pixels; without a budget.
        metric: `max`, `mae` or `rmse` of the absolute differences, or `exact` for `max` at 0.
        anchored: Predict from kept patches and predictions, not from patches that were dropped.
    """
    if metric not in (*METRICS, "exact"):
        raise SpecError(unknown("metric of 'pixelprune'", metric, (*METRICS, "exact")))
    if threshold < 0:
        raise SpecError(f"knob threshold={threshold} of 'pixelprune' is negative; choose 0 or more")
    if metric == "exact":
        metric, threshold = "max", 0.0
    pixels = tokens.need("pixels")
    image = pixels.to(torch.promote_types(pixels.dtype, torch.float32))
    image = image.unflatten(-2, tokens.grid or (1, 1, tokens.n))  # [..., t, h, w, P]
    if budget is None:
        kept = unpredicted(image, metric, threshold, anchored=anchored and threshold > 0)
        return Reduction.prune(marked(kept.flatten(-3)), tokens.n)
    return Reduction.prune(stable_topk(surprise(image, metric).flatten(-3), budget), tokens.n)
