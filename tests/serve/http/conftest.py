"""The embedded model's engine, which the tests of a file share: a server that ends closes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    from mmfast.serve.engine.scheduler import Scheduler

    made = Scheduler(None, slots=4, queue=12, name="mmfast-tiny-scenes")
    yield made
    made.close()
