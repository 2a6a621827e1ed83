"""Cells of a product that run by default; their many like are slow."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Any

import pytest


def in_turn_or_slow(*axes: Collection[Any], every: int = 3) -> list[Any]:
    """One cell of the product in `every`, each value of an axis in turn; the others are slow."""
    assert all(len(axis) >= every for axis in axes), "a value would never have its turn"
    return [
        pytest.param(*cell, marks=[pytest.mark.slow] if sum(places) % every else [])
        for cell, places in zip(
            product(*axes), product(*(range(len(axis)) for axis in axes)), strict=True
        )
    ]
