"""Tests on a device compute as the CPU does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def whole_numbers() -> Iterator[None]:
    """Products on the device are of all bits of float32, as on the CPU; nothing learns."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [each.allow_tf32 for each in backends]
    for each in backends:
        each.allow_tf32 = False
    with torch.no_grad():
        yield
    for each, value in zip(backends, before, strict=True):
        each.allow_tf32 = value
