"""Oracles of methods made of scores, selectors, leftovers and budgets; see oracles.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from oracle_base import Answer

ORACLES: Mapping[str, Callable[..., Answer]] = {}
