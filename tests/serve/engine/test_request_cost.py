"""A request is charged in advance with what it is expected to take."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from scheduling import ask, image, model_of, together

from mmfast.serve.engine.scheduler import FairQueue, Scheduler


@dataclass(frozen=True)
class Entry:
    id: str
    payer: str
    cost: float
    priority: int = 0


def test_an_account_of_long_answers_gets_no_more_tokens_than_one_of_short_ones() -> None:
    """Whatever runs at once, both get an equal share of the tokens while both are waiting."""
    for slots in (1, 4):
        queue: FairQueue[Entry] = FairQueue()
        for i in range(400):
            queue.push(Entry(f"l{i}", "long", 90.0 if i % 2 else 110.0))
            queue.push(Entry(f"s{i}", "short", 10.0))
        taken = {"long": 0.0, "short": 0.0}
        running: list[Entry] = []
        for _ in range(300):
            while len(running) < slots:
                entry = queue.peek(lambda each: each.cost, running)
                assert entry is not None
                queue.remove(entry.id)
                running.append(entry)
                taken[entry.payer] += entry.cost
            done = min(running, key=lambda each: each.cost)
            running.remove(done)
            queue.count(done.payer, done.cost)
        assert abs(taken["long"] - taken["short"]) <= 110 * (slots + 1)


def test_without_the_charge_in_advance_long_answers_take_more() -> None:
    """Four slots are filled before any work is counted."""
    for charged in (True, False):
        queue: FairQueue[Entry] = FairQueue()
        for i in range(4):
            queue.push(Entry(f"l{i}", "long", 100.0))
        for i in range(8):
            queue.push(Entry(f"s{i}", "short", 10.0))
        running: list[Entry] = []
        for _ in range(4):
            entry = queue.peek(lambda e, charged=charged: e.cost if charged else 0.0, running)
            assert entry is not None and queue.remove(entry.id)
            running.append(entry)
        assert sum(e.payer == "long" for e in running) == (0 if charged else 4)


def test_order_within_an_account_is_by_priority_then_age() -> None:
    dice = random.Random(0)
    queue: FairQueue[Entry] = FairQueue()
    given = [Entry(f"{i}", "one", dice.random() * 99, dice.randrange(3)) for i in range(50)]
    for entry in given:
        queue.push(entry)
    found = []
    while (entry := queue.peek(lambda e: e.cost)) is not None:
        found.append(queue.remove(entry.id))
    assert found == sorted(given, key=lambda e: -e.priority)


@pytest.fixture(scope="module")
def engine() -> Any:
    made = Scheduler(model_of("qwen3_vl"), chunk=48, memory="200MB", slots=1)
    yield made
    made.close()


def test_the_length_of_answers_is_learnt_by_account(engine: Scheduler) -> None:
    """Visual tokens, prompt and max_tokens at first; the observed length of answers later."""
    seen: dict[str, float] = {}
    cost = engine._cost

    def noted(answer: Any) -> float:
        seen.setdefault(answer.id, cost(answer))
        return cost(answer)

    engine._cost = noted  # type: ignore[method-assign]
    for i, tokens in enumerate((2, 2, 3)):
        requests = [
            ask(f"short-{i}", image(i), "what?", tokens=tokens, tenant="short"),
            ask(f"wide-{i}", image(i), "what?", tokens=40 if i == 2 else 2, tenant="short"),
            ask(f"other-{i}", "hello", tokens=40, tenant="long"),
        ]
        ends = {ear.name: ear.wait() for ear in together(engine, requests)}
        for name in ("short", "wide", "other"):
            prompt = ends[f"{name}-{i}"].prompt_tokens
            answer = seen[f"{name}-{i}"] - prompt
            assert 0 < answer <= (40 if name == "other" or i == 2 else 2)
            if name == "wide" and i == 2:
                assert prompt > 10 and answer < 10  # 40 are asked for, about 2 expected
            if name == "other" and i == 0:
                assert answer == 40
    assert engine._queue.lengths["short"] < 20 < engine._queue.lengths["long"]
    visual = ends["short-2"].trace["visual_tokens"]
    assert visual and seen["short-2"] > visual
