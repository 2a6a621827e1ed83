"""Workers on a real Ray: roles that change while answers go on, and one that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine_requests import Inbox, asked, events, eventually
from scheduling import ask, image

from mmfast.core.errors import SpecError
from mmfast.planner.roles import COMBINED
from mmfast.serve.engine.base import Failure, Finish
from mmfast.serve.engine.scheduler import Scheduler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason='needs Ray: pip install "mmfast[ray]"'),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of its own code
    pytest.mark.timeout(1200),  # on a busy machine; a minute on a quiet one
]
LONG = 300


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Any]:
    from mmfast.serve.ray.engine import RayEngine

    made = RayEngine(str(checkpoint), device="cpu", slots=8, queue=8, workers=3, cpus=2)
    yield made
    made.close()


def test_roles_change_while_answers_go_on_and_a_killed_worker_is_replaced(
    engine: Any, checkpoint: Path
) -> None:
    gauges = engine.health().gauges
    assert [gauges[f"worker_{i}_{COMBINED}"] for i in range(3)] == [1.0] * 3
    with pytest.raises(SpecError, match="acts inside the model"):
        engine.submit(asked("wrong", reduce="fastv@llm3:0.5"), Inbox().append)
    requests = [asked(f"r-{i}", i % 4, LONG, (None, "evs:0.5")[i % 2]) for i in range(6)]
    requests.append(ask("many", *(image(i, (48, 48)) for i in range(4)), "compare", tokens=12))
    inboxes = [Inbox() for _ in requests]
    engine.board.change({0: "encode", 1: "prefill", 2: "decode"})
    for number, (request, inbox) in enumerate(zip(requests, inboxes, strict=True)):
        engine.submit(request, inbox.append)
        if number == 2:  # each answer ends on the worker where it began
            eventually(lambda: inboxes[0] and inboxes[2], 600)
            engine.board.change({0: "decode", 1: "encode", 2: "prefill"})
        if number == 4:
            engine.board.change(dict.fromkeys(range(3), COMBINED))
    eventually(lambda: all(inbox.over for inbox in inboxes), 900)
    here = Scheduler(str(checkpoint), device="cpu")
    for request, inbox in zip(requests, inboxes, strict=True):
        assert isinstance(inbox[-1], Finish), inbox[-1]
        assert inbox.text == Inbox(events(here, request)).text
    here.close()
    first, fourth = (inboxes[i][-1].trace["workers"]["decode"] for i in (0, 3))
    assert first != fourth  # the role had gone to another worker

    board = engine.board
    board.change({0: "encode", 1: "prefill", 2: "decode"})
    broken = Inbox()
    engine.submit(asked("broken", 0, 2000), broken.append)
    eventually(lambda: bool(broken), 600)
    os.kill(engine.workers("broken")["decode"], signal.SIGKILL)
    eventually(lambda: broken.over, 600)
    assert isinstance(broken[-1], Failure) and broken[-1].kind == "replica_lost"
    after = Inbox(events(engine, asked("after", 1, 3)))  # by others, or by the one that replaces it
    assert isinstance(after[-1], Finish), after[-1]
    eventually(lambda: engine.health().gauges["workers_live"] == 3, 600)
