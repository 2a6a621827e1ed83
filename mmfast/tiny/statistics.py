"""How far a share of right answers may be from the truth."""

from __future__ import annotations

import math

Z = 1.959964  # 95 %


def interval(right: int, n: int) -> list[float]:
    """Wilson score interval of a share, 95 %; it stays inside [0, 1] and is never empty.

    Args:
        right: Right answers.
        n: Questions, at least 1.

    Returns:
        Lower and upper bound.
    """
    share, spread = right / n, Z * Z / n
    middle = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return [max(0.0, middle - half), min(1.0, middle + half)]
