"""Oracles of methods that run inside the language model; see oracles.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from oracle_base import Answer

ORACLES: Mapping[str, Callable[..., Answer]] = {}
