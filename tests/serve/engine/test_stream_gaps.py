"""Gaps of running streams, counted in the work of chunks: two at most, beside any prompt and spec.

torch's own counter counts what every thread of the engine multiplies between two tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from scheduling import Ear, ask, clip, image, model_of, stock
from torch.utils.flop_counter import FlopCounterMode

from mmfast.attach import attach
from mmfast.serve.engine import runner
from mmfast.serve.engine.base import Delta, Finish, Request
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.serve.engine.slicer import Slicer

FAMILY, CHUNK = "llava_onevision", 32
LONG = "what is it? " * 20


class Work:
    """The floating point operations of the threads of one engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._counters: list[FlopCounterMode] = []
        self.own: Counter[str] = Counter()  # of answers that step alone, by name
        round_ = runner.ModelRunner.round

        def counted(stock_: Any) -> Any:
            def call(*args: Any) -> Any:
                with self._counter():
                    return stock_(*args)

            return call

        monkeypatch.setattr(runner.ModelRunner, "round", counted(round_))
        advance = runner.SequentialRunner._advance

        def advanced(self_: Any, own: Any, *rest: Any) -> Any:
            before = self.total
            try:
                return advance(self_, own, *rest)
            finally:
                self.own[own.answer.id] += self.total - before

        monkeypatch.setattr(runner.SequentialRunner, "_advance", advanced)
        monkeypatch.setattr(Slicer, "look", lambda slicer: None)  # no clock decides
        run = Slicer.run

        def watched(self_: Slicer, call: Any, *rest: Any) -> Any:
            return run(self_, counted(call), *rest)

        monkeypatch.setattr(Slicer, "run", watched)

    @contextmanager
    def _counter(self) -> Iterator[None]:
        made = FlopCounterMode(display=False)
        self._counters.append(made)
        with made:
            yield

    @property
    def total(self) -> int:
        return sum(each.get_total_flops() for each in self._counters)


def alone(request: Request) -> str:
    pair, options = model_of(FAMILY), request.options
    with attach(pair[0], options.reduce or None, options.cache or None):
        return stock(pair, request)


def chunk_flops() -> int:
    """Operations of the stock model on a prompt of a chunk."""
    model, _ = model_of(FAMILY)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(input_ids=torch.ones(1, CHUNK, dtype=torch.int64), logits_to_keep=1)
    return int(counter.get_total_flops())


LAZY = "lazyllm@llm1:0.3"
CASES = [
    # one after the other
    pytest.param([("lazyllm@llm1:0.6+lazyllm@llm2:0.3", ""), (LAZY, "")], id="lazy"),
    pytest.param(
        [("ivc_prune:0.5", ""), ("fastv@llm1:0.5?tokens=all", ""), ("divprune:0.5", "")],
        id="reducers",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        [("", "h2o:20"), ("fastv@llm2:0.5", ""), ("", "quant:8"), ("", "")],
        id="policies",
        marks=pytest.mark.slow,
    ),
]


def gaps(
    monkeypatch: pytest.MonkeyPatch, running: list[Request], late: list[Request]
) -> tuple[list[Ear], list[list[int]]]:
    """Answer requests, the last after the first tokens; return the work between those tokens."""
    work = Work(monkeypatch)
    made = Scheduler(model_of(FAMILY), chunk=CHUNK, slots=16, context=8192)
    marks: list[list[tuple[int, int]]] = [[] for _ in running]
    ears = []
    try:
        for request, mine in zip(running, marks, strict=True):
            ears.append(Ear(_Marking(made, work, mine), request))
        for ear in ears:
            ear.next()
        ears += [Ear(made, request) for request in late]
        assert all(isinstance(ear.wait(), Finish) for ear in ears)
    finally:
        made.close()
    found = [[(b - a) // n for (a, _), (b, n) in pairwise(mine)] for mine in marks]
    return ears, found


class _Marking:
    """An engine that notes the work for others at every piece of an answer."""

    def __init__(self, engine: Scheduler, work: Work, marks: list[tuple[int, int]]) -> None:
        self._engine, self._work, self._marks = engine, work, marks

    def submit(self, request: Request, emit: Any) -> None:
        def heard(event: Any) -> None:
            if isinstance(event, Delta):
                others = self._work.total - self._work.own[request.id]
                self._marks.append((others, event.tokens))
            emit(event)

        self._engine.submit(request, heard)


@pytest.mark.parametrize("specs", CASES)
def test_no_stream_waits_longer_than_two_chunks(
    specs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside long prompts of these specs; one stream is of the batch, one steps alone."""
    running = [
        ask("plain", "hello", tokens=90),
        ask("lazy", image(2), "what is it?", tokens=40, reduce=LAZY),
    ]
    late = [
        ask(f"long-{i}", clip(3, 4), LONG, tokens=6, reduce=reduce, cache=cache)
        for i, (reduce, cache) in enumerate(specs)
    ]
    expected = [alone(request) for request in [*running, *late]]
    ears, found = gaps(monkeypatch, running, late)
    chunk = chunk_flops()
    for mine in found:
        assert max(mine) <= 2 * chunk, [round(each / chunk, 2) for each in mine]
    assert sum(found[0]) > 6 * chunk  # the prompts were read meanwhile
    assert [ear.text for ear in ears] == expected


# --- pieces of a call ---------------------------------------------------------------------------


def sliced(call: Any, work: float) -> tuple[Any, int]:
    """The value of a call that may do so much in a slice, and its slices."""
    made = Slicer()
    made.allow(1e9, work)
    steps, count = made.run(call), 1
    try:
        while True:
            next(steps)
            assert made.done <= work
            made.allow(1e9, work)
            count += 1
    except StopIteration as end:
        return end.value, count
    finally:
        made.close()


@pytest.mark.parametrize("masked", ["causal", "bool", "added", "row", "none"])
def test_attention_in_pieces_is_attention(masked: str) -> None:
    torch.manual_seed(3)
    query, key = torch.randn(3, 4, 50, 8), torch.randn(3, 2, 50, 8)
    seen = torch.rand(3, 1, 50, 50) > 0.3
    seen[..., 0] = True
    masks: dict[str, Any] = {"bool": seen, "row": seen[:, :, :1], "causal": None, "none": None}
    masks["added"] = torch.randn(1, 4, 50, 50)

    def call() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, key, masks[masked], is_causal=masked == "causal", enable_gqa=True
        )

    for work in (1e9, 70_000.0, 20_000.0, 1_000_000.0 / 3):
        found, count = sliced(call, work)
        torch.testing.assert_close(found, call())
        assert (count > 1) == (work < 3 * 4 * 50 * 50 * 16)


def test_products_and_convolutions_in_pieces_are_the_same() -> None:
    torch.manual_seed(3)
    x, layer = torch.randn(2, 90, 16), torch.nn.Linear(16, 24)
    patches = torch.nn.Conv2d(3, 8, 4, 4)
    pixels, out = torch.randn(9, 3, 16, 16), torch.zeros(2, 90, 90)

    def call() -> list[torch.Tensor]:
        torch.bmm(x, x.mT, out=out)
        return [layer(x), x @ x.mT, torch.matmul(x, layer.weight.T), patches(pixels), out.clone()]

    whole = call()
    found, count = sliced(call, 20_000)
    assert count > 20
    for mine, other in zip(found, whole, strict=True):
        torch.testing.assert_close(mine, other)
