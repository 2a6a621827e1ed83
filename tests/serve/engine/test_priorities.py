"""Urgent requests go first within their account; what gives way keeps its memory and its answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from scheduling import Ear, ask, clip, image, model_of, stock, together

from mmfast.attach import attach
from mmfast.serve.engine.base import Delta, Finish, Request, SamplingOptions
from mmfast.serve.engine.batch import RunningBatch
from mmfast.serve.engine.scheduler import Scheduler

LONG = "a long one " * 60


@contextmanager
def engine(family: str = "qwen3_vl", **options: Any) -> Iterator[Scheduler]:
    made = Scheduler(model_of(family), **{"chunk": 32, "memory": "200MB", "slots": 1, **options})
    try:
        yield made
    finally:
        made.close()


class Order:
    """The order in which answers end, and the tokens read of prompts."""

    def __init__(self, engine: Scheduler, requests: list[Request]) -> None:
        self.ended: list[str] = []
        self.ears: list[Ear] = []
        self._engine = engine
        batch = engine._runner.batch
        assert batch is not None
        batch.passes.clear()
        for ear in together(_Noting(engine, self.ended), requests):
            self.ears.append(ear)
        for ear in self.ears:
            assert isinstance(ear.wait(), Finish), ear.events
        self.read = sum(n for n, *_ in batch.passes)

    @property
    def texts(self) -> list[str]:
        return [ear.text for ear in self.ears]


class _Noting:
    """An engine that notes the ends of its answers."""

    model = "noting"

    def __init__(self, engine: Scheduler, ended: list[str]) -> None:
        self._engine, self._ended = engine, ended

    def submit(self, request: Request, emit: Any) -> None:
        def noted(event: Any) -> None:
            if not isinstance(event, Delta) and not request.id.startswith("plug"):
                self._ended.append(request.id)
            emit(event)

        self._engine.submit(request, noted)


def told(requests: list[Request]) -> list[str]:
    pair = model_of("qwen3_vl")
    found = []
    for each in requests:
        with attach(pair[0], each.options.reduce, each.options.cache):
            found.append(stock(pair, each))
    return found


def pausing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of what is paused, as it happens."""
    kinds: list[str] = []
    pause = RunningBatch.pause

    def noted(self: RunningBatch, urgent: Any) -> bool:
        before = set(self.paused)
        done = pause(self, urgent)
        kinds.extend(type(self.paused[n][1]).__name__ for n in set(self.paused) - before)
        return done

    monkeypatch.setattr(RunningBatch, "pause", noted)
    return kinds


@pytest.mark.parametrize("after", [1, 4])  # during the prompt, and during the answer
@pytest.mark.parametrize("cache", [None, "snapkv:20", "sink:4+window:24"])
def test_an_urgent_request_takes_the_slot_of_a_long_one(
    monkeypatch: pytest.MonkeyPatch, after: int, cache: str | None
) -> None:
    """A long prompt that has been read in part, or answered in part, gives way and goes on."""
    long = ask("long", image(1), LONG, tokens=12, cache=cache)
    short = ask("short", "hello", tokens=4, priority=5)
    kinds, rounds = pausing(monkeypatch), [0]
    with engine() as made:
        work = made._round
        ears: list[Ear] = []
        ended: list[str] = []
        noting = _Noting(made, ended)

        def round_() -> None:
            running = made._runner.batch._running if after == 4 else made._runner.batch._jobs
            rounds[0] += "long" in running
            if rounds[0] == after and len(ears) == 1:
                rounds[0] += 100
                short_in.append(1)
                made._new.append(_prepared(made, short, ended, heard))
                made._known["short"] = made._new[-1]
                made._take()
            work()

        heard: list[Any] = []
        short_in: list[int] = []
        monkeypatch.setattr(made, "_round", round_)
        ears.append(Ear(noting, long))
        ears[0].wait()
        batch = made._runner.batch
        read = sum(n for n, *_ in batch.passes)
        assert short_in and ended == ["short", "long"]
        assert not batch.paused and made._runner.nbytes == 0
    assert kinds == (["PrefillJob"] if after == 1 else ["PausedAnswer"])
    assert ["".join(e.text for e in heard if isinstance(e, Delta)), ears[0].text] == told(
        [short, long]
    )
    prompts = [end.prompt_tokens for end in (heard[-1], ears[0].events[-1])]
    assert read == sum(prompts)  # nothing was read twice


def _prepared(made: Scheduler, request: Request, ended: list[str], heard: list[Any]) -> Any:
    from mmfast.serve.engine.request import checked

    def emit(event: Any) -> None:
        heard.append(event)
        if not isinstance(event, Delta):
            ended.append(request.id)

    return made._prepared(request, emit, checked(SamplingOptions(request.sampling.max_tokens)))


def test_equal_and_foreign_requests_do_not_take_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = pausing(monkeypatch)
    requests = [
        ask("long", LONG, tokens=8, priority=1),
        ask("same", "hello", tokens=2, priority=1),
        ask("other", "hello", tokens=2, priority=9, tenant="else"),
    ]
    with engine() as made:
        order = Order(made, requests)
    assert not kinds and order.texts == told(requests)


def test_no_request_is_paused_beyond_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = pausing(monkeypatch)
    long, short = ask("long", LONG, tokens=8), ask("short", LONG[:-3], tokens=8, priority=3)
    with engine(memory=900_000) as made:  # one of them takes 700,000
        order = Order(made, [long, short])
        assert order.texts == told([long, short])
    assert not kinds


def test_the_urgent_of_an_account_are_read_first_and_each_is_answered_as_alone() -> None:
    requests = [
        ask("clip", clip(1, 6), LONG, tokens=3),
        ask("vit", image(3), LONG, tokens=3, reduce="tome@vit:0.5"),
        ask("text", LONG, tokens=3, priority=1),
        ask("image", image(2), "what?", tokens=3, priority=2),
        ask("urgent vit", image(4), "what?", tokens=3, priority=2, reduce="tome@vit:0.5"),
    ]
    with engine(slots=8) as made:
        order = Order(made, requests)
    assert order.texts == told(requests)
    place = {name: order.ended.index(name) for name in order.ended}
    assert place["image"] < place["text"] < place["clip"]
    assert place["urgent vit"] < place["vit"] and place["image"] < place["vit"]


def test_many_urgent_requests_end_in_order_and_all_are_answered() -> None:
    requests = [
        ask(f"{i}", *([image(i)] if i % 2 else []), LONG[: 40 * i] or "a", tokens=3 + i, priority=i)
        for i in range(7)
    ]
    with engine(slots=2) as made:
        order = Order(made, requests)
    assert order.texts == told(requests)
    assert order.ended.index("6") < 2 and order.ended[-1] in ("0", "1")
