"""Scores on a grid, so that equal tokens tie on every device and in every order of summation."""

from __future__ import annotations

from torch import Tensor

# Scores this close differ by rounding only: float64 is a million times finer.
ROUNDING = 2.0**-30


def snap(score: Tensor) -> Tensor:
    """Round a float64 score to multiples of 2^-30.

    Rounding noise of float64 is a million times smaller, so equal tokens get equal bits; and up to
    four million snapped cosines add up without any rounding at all.
    """
    return (score / ROUNDING).round_().mul_(ROUNDING)
