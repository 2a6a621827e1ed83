"""Fixtures of the engines on Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint() -> Iterator[Path]:
    """A checkpoint that never ends an answer by itself."""
    from mmfast.bench.suites.serve.faults import endless_model

    with endless_model() as path:
        yield path
