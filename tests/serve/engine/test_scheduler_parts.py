"""Parts of the scheduler: text as it comes, slots, queue, caches, slices, and random arrivals."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
import pickle
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import Ear, ask, clip, image, model_of, stock
from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.core.kv import KVBlock
from mmfast.core.locks import WholeLock
from mmfast.serve.engine.base import BusyError, Failure, Finish, Request, SamplingOptions
from mmfast.serve.engine.decode import DecodeBatch, Writer
from mmfast.serve.engine.encoder import MediaEncoder
from mmfast.serve.engine.kv.bucket import Entries, windowed
from mmfast.serve.engine.kv.byte_cache import ByteCache
from mmfast.serve.engine.kv.rows import AnswerRow, AnswerRows
from mmfast.serve.engine.prefill import Prefiller, PrefillJob
from mmfast.serve.engine.scheduler import FairQueue, Scheduler
from mmfast.serve.engine.slicer import Slicer
from mmfast.serve.engine.slots import kv_limit


class Bytes:
    """A tokenizer of one token per byte."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(t for t in tokens if t < 256).decode("utf-8", errors="replace")


def written(text: str, stop: tuple[str, ...] = (), most: int = 10_000) -> tuple[list[str], Writer]:
    """What comes of a text, byte by byte, and of its end token."""
    writer, parts = Writer(Bytes(), SamplingOptions(max_tokens=most, stop=stop), {300}), []
    for token in [*text.encode(), 300]:
        parts.append(writer.push(token))
        if writer.over:
            break
    return parts, writer


@settings(max_examples=150)
@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_text_comes_whole_and_stops_where_it_should(text: str, stops: list[str]) -> None:
    text = text.replace("\ufffd", "?")
    parts, writer = written(text, tuple(stops))
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    assert "".join(parts) == text[: _first(text, stops)] if places else "".join(parts) == text
    assert writer.over == "stop" and "\ufffd" not in "".join(parts)


def _first(text: str, stops: list[str]) -> int:
    """Where a reader that gets letter by letter would stop."""
    for end in range(len(text) + 1):
        found = [at for stop in stops if (at := text[:end].find(stop)) >= 0]
        if found:
            return min(found)
    return len(text)


def test_half_a_character_waits_and_length_ends() -> None:
    parts, writer = written("a€b")
    assert parts == ["a", "", "", "€", "b", ""] and writer.count == 6
    parts, writer = written("hello", most=3)
    assert "".join(parts) == "hel" and writer.over == "length"
    parts, _ = written("a€", most=2)  # the rest of the last character never comes
    assert "".join(parts) == "a\ufffd"


# --- slots --------------------------------------------------------------------------------------


def _piece(length: int, seed: int) -> KVBlock:
    made = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 3, length, 5, generator=made)
    return KVBlock(tuple(keys), tuple(values))


def _row(kv: KVBlock, most: Sequence[int], window: int = 0) -> AnswerRow:
    """A row that becomes so long in each layer; with a window, the tokens before it leave."""
    parts = [
        windowed(k, v, window, m) if window else Entries(KVBlock((k,), (v,)), m)
        for k, v, m in zip(kv.keys, kv.values, most, strict=True)
    ]
    return AnswerRow(parts)


def _held(store: AnswerRows, number: int) -> KVBlock:
    """Keys and values `[H, m, d]` of a row, in order of time."""
    pairs = []
    for layer in store.layers:
        for bucket in layer.buckets.values():
            for b, slots in enumerate(bucket.rows):
                if slots.owner == number:
                    order = slots.order or list(range(slots.length))
                    assert bucket.own.data is not None
                    pairs.append(bucket.own.data[:, b, :, order])
    return KVBlock(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))


_NUMBER = 2 * 3 * 5 * 4  # bytes of a token in one layer


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(st.tuples(st.integers(1, 150), st.integers(7, 900)), st.none()), max_size=25
    ),
    st.randoms(),
)
def test_rows_hold_what_was_put_and_no_byte_more(
    steps: list[tuple[int, int] | None], rng: random.Random
) -> None:
    store, held = AnswerRows(2), list[KVBlock]()
    for number, step in enumerate(steps):
        if step is not None and len(held) < 8:
            kv, most = _piece(step[0], number), step[0] + step[1]
            before = store.needed([most])
            assert store.add(_row(kv, (most, most))) == len(held)
            held.append(kv)
            assert store.nbytes == before * 2 * _NUMBER
        elif held:
            row = rng.randrange(len(held))
            moved = store.remove(row)
            assert moved == (None if row == len(held) - 1 else len(held) - 1)
            held[row] = held[-1]
            held.pop()
        assert store.nbytes == store.needed() * 2 * _NUMBER
        for row, kv in enumerate(held):
            found = _held(store, row)
            pairs = zip(found.keys + found.values, kv.keys + kv.values, strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
    while store.rows:
        store.remove(0)
    assert store.nbytes == 0


def test_one_long_row_costs_only_itself() -> None:
    store = AnswerRows(1)
    for number in range(4):
        store.add(_row(KVBlock(*[(_piece(20, number).keys[0],)] * 2), (60,)))
    before = store.nbytes
    store.add(_row(KVBlock(*[(_piece(20, 9).keys[0],)] * 2), (4000,)))
    assert store.nbytes == before + 4032 * _NUMBER


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    return found.transpose(1, 2)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 400), st.integers(0, 9)),
        min_size=1,
        max_size=6,
    ),
    st.randoms(),
)
def test_each_row_attends_to_its_own_tokens(
    sizes: list[tuple[int, int, int]], rng: random.Random
) -> None:
    """Rows of any size, windows, arrivals and ends between steps, against one row at a time."""
    store, mine = AnswerRows(2), list[tuple[list[list[Tensor]], int]]()
    made = torch.Generator().manual_seed(len(sizes))
    waiting = list(enumerate(sizes))
    for _ in range(14):
        if waiting and rng.random() < 0.6:
            number, (length, more, window) = waiting.pop()
            kv, shorter = _piece(length, number), max(1, length // 2)
            kv = KVBlock(
                (kv.keys[0], kv.keys[1][:, :shorter]), (kv.values[0], kv.values[1][:, :shorter])
            )
            most = (length + more + 14, shorter + more + 14)
            store.add(_row(kv, most, window))
            mine.append(([list(kv.keys), list(kv.values)], window))
        if mine and rng.random() < 0.2:
            gone = rng.randrange(len(mine))
            store.remove(gone)
            mine[gone] = mine[-1]
            mine.pop()
        if not mine:
            continue
        store.advance()
        for layer in range(2):
            query, key, value = torch.randn(3, len(mine), 3, 1, 5, generator=made)
            found = store.attend(layer, _plain, query, key, value)  # type: ignore[arg-type]
            for row, (pair, window) in enumerate(mine):
                for held, new in zip(pair, (key, value), strict=True):
                    held[layer] = torch.cat([held[layer], new[row]], 1)
                    held[layer] = held[layer][:, -window:] if window else held[layer]
                alone = _plain(
                    query[row : row + 1], pair[0][layer][None], pair[1][layer][None], None
                )
                torch.testing.assert_close(found[row : row + 1], alone)


def test_a_row_that_went_bad_leaves_nothing_behind() -> None:
    """Infinities behind the length of a row would spoil sums even under a mask."""
    store = AnswerRows(1)
    for value, length in ((torch.nan, 9), (1.0, 3)):
        store.add(_row(KVBlock((full := (torch.full((1, length, 4), value),)), full), (20,)))
    store.remove(0)
    store.add(_row(KVBlock((torch.ones(1, 2, 4),), (torch.ones(1, 2, 4),)), (20,)))
    (bucket,) = store.layers[0].buckets.values()
    assert bucket.own.data is not None and bool(torch.isfinite(bucket.own.data).all())


# --- roles on their own -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_vl"])
def test_roles_pass_on_plain_values(family: str) -> None:
    """Encoder, prefill and decoding in three places, joined by pickles."""
    model, processor = pair = model_of(family)
    requests = [ask("a", image(1), clip(1), "what?", tokens=8), ask("b", "hello", tokens=5)]
    encoder, prefiller, decoder = (
        MediaEncoder(model, processor),
        Prefiller(model, 40),
        DecodeBatch(model, 4),
    )
    prepared = pickle.loads(pickle.dumps([encoder.prepare(request) for request in requests]))
    prompts = pickle.loads(pickle.dumps(encoder.encode(prepared)))
    filled = pickle.loads(pickle.dumps(prefiller.fill(prompts)))
    found: dict[Any, list[int]] = {}
    for request, each in zip(requests, filled, strict=True):
        found[request.id] = [decoder.first(each, request.sampling)]
        decoder.admit(request.id, each, found[request.id][0], request.sampling)
    while len(decoder):
        for key, token in decoder.step():
            assert isinstance(token, int)
            found[key].append(token)
        for request in requests:
            if len(found[request.id]) == request.sampling.max_tokens:
                decoder.release(request.id)
    texts = [processor.tokenizer.decode(found[request.id]) for request in requests]
    assert texts == [stock(pair, request) for request in requests]
    encoder.slicer.close()
    assert decoder.store.nbytes == 0


def test_short_prompts_share_a_pass() -> None:
    model, _ = model_of("llava_onevision")
    prefiller = Prefiller(model, 64)
    embed = model.get_input_embeddings()

    def job(length: int) -> PrefillJob:
        from mmfast.serve.engine.slots import Embedded

        ids = torch.arange(length) % 200
        return PrefillJob(Embedded(embed(ids), ids[None]))

    long, short, other = job(300), job(20), job(9)
    plan = dict(prefiller.plan([long, short, other]))
    assert plan == {long: 35, short: 20, other: 9}  # the first in line is never passed over
    assert dict(prefiller.plan([short, long])) == {short: 20, long: 44}
    assert dict(prefiller.plan([long])) == {long: 64}
    assert not prefiller.plan([])
    long.done = 250  # attention to what was read takes its part of the pass
    assert 0 < dict(prefiller.plan([long], waited=True))[long] < 50
    assert dict(prefiller.plan([long])) == {long: 50}  # nobody waits: all that is left


def test_models_whose_rows_cannot_be_told_apart_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gemma3")[0]
    kinds = ["linear_attention"] * len(model.get_decoder().layers)
    monkeypatch.setattr(model.get_decoder().config, "layer_types", kinds)
    with pytest.raises(ModelError, match="linear_attention"):
        Prefiller(model)


# --- queue, caches, memory ----------------------------------------------------------------------


def test_queue_is_fair() -> None:
    queue: FairQueue[Request] = FairQueue()
    for i in range(3):
        queue.push(ask(f"many{i}", "x", tenant="many"))
    queue.count("many", 100)
    queue.push(ask("new", "x", tenant="new"), ["many"])
    first = queue.peek()
    assert first is not None and first.id == "many0"  # a newcomer starts level, not ahead
    queue.count("many", 1)
    first = queue.peek()
    assert first is not None and first.id == "new"
    queue.push(ask("urgent", "x", tenant="many", priority=1))
    first = queue.peek()
    assert first is not None and first.id == "new"  # nobody buys the turn of another
    queue.remove("new")
    first = queue.peek()
    assert first is not None and first.id == "urgent"
    assert queue.remove("urgent") is first and queue.remove("urgent") is None
    for i in range(5000):
        queue.count(f"tenant{i}", 1)
    assert len(queue.served) < 4200 and "many" in queue.served


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 50)), max_size=60))
def test_cache_keeps_to_its_bytes(steps: list[tuple[int, int]]) -> None:
    held: ByteCache[int] = ByteCache(100, lambda value: value)
    for key, size in steps:
        held.put(key, size)
        assert held.nbytes == sum(held.values()) <= 100
        assert held.get(key) == size
    held.shrink(0)
    assert held.nbytes == 0


def test_memory_limits() -> None:
    cpu = torch.device("cpu")
    assert kv_limit("1GB", cpu) == 10**9
    assert kv_limit(None, cpu) > 0


# --- slices of the tower ------------------------------------------------------------------------


class _Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return x + 1


def test_slicer_stops_between_blocks_and_can_be_left() -> None:
    blocks, slicer = nn.ModuleList(_Slow() for _ in range(6)), Slicer()

    def call() -> torch.Tensor:
        x = torch.zeros(1)
        for block in blocks:
            x = block(x)
        return x

    def pauses() -> int:
        steps, count = slicer.run(call, blocks), 0
        while True:
            try:
                next(steps)
                count += 1
            except StopIteration as end:
                assert end.value.item() == 6
                return count

    assert pauses() == 0  # nothing waits
    slicer.budget = 0.005  # half a block: a slow start is no stop of its own
    assert pauses() == 6  # before the sum of each block, on which no time is left
    steps = slicer.run(call, blocks)
    next(steps)
    steps.close()  # nobody wants it any more
    assert pauses() == 6
    with pytest.raises(ZeroDivisionError):
        list(slicer.run(lambda: 1 // 0, blocks))
    assert not any(block._forward_pre_hooks for block in blocks)
    slicer.close()


def test_a_call_in_pieces_ends_when_nobody_waits_any_more() -> None:
    """Its work still counts without a limit of time, which once sent attention round in circles."""
    slicer, given = Slicer(), torch.rand(3, 4, 2, 30, 8).unbind()
    attend = torch.nn.functional.scaled_dot_product_attention
    slicer.allow(60.0, 1e4)
    steps = slicer.run(lambda: attend(*given) + attend(*given), [])
    next(steps)
    slicer.allow(None, 1e4)
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert torch.allclose(end.value.value, 2 * attend(*given), atol=1e-6)

    def locked() -> torch.Tensor:  # as where other calls wait for what it holds
        with WholeLock():
            return attend(*given)

    slicer.allow(60.0, 1e4)
    with pytest.raises(StopIteration) as end:
        next(slicer.run(locked, []))
    assert torch.equal(end.value.value, attend(*given))
    slicer.close()


# --- anything may come and go -------------------------------------------------------------------

KINDS = ("text", "long", "image", "reduced", "solo")


def _request(name: str, kind: str, tenant: str, tokens: int) -> Request:
    parts: dict[str, tuple[Any, ...]] = {
        "text": ("hello",),
        "long": ("a long one " * 12,),
        "image": (image(1), "what?"),
        "reduced": (image(2), "what?"),
        "solo": (image(1), "what?"),
    }
    reduce = {"reduced": "divprune:0.5", "solo": "fastv@llm2:0.5"}.get(kind)
    return ask(name, *parts[kind], tokens=tokens, tenant=tenant, reduce=reduce)


_STEP = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from("ab"),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(0, 4)),  # cancelled behind so many events
)


@pytest.fixture(scope="module")
def engine() -> Any:
    made = Scheduler(model_of("llava_onevision"), slots=3, queue=4, chunk=32, memory=400_000)
    yield made
    made.close()


# More of them: MMFAST_ARRIVALS=1000 pytest tests/serve/engine -k byte_is_lost
ARRIVALS = int(os.environ.get("MMFAST_ARRIVALS", "12"))


@settings(max_examples=ARRIVALS)
@given(st.lists(_STEP, min_size=1, max_size=9))
def test_no_slot_and_no_byte_is_lost(engine: Scheduler, steps: list[Any]) -> None:
    ears = []
    for number, (kind, tenant, tokens, leave) in enumerate(steps):
        request = _request(str(number), kind, tenant, tokens)
        try:
            ear = Ear(engine, request)
        except BusyError:
            continue
        ears.append((ear, request))
        if leave is not None:
            for _ in range(leave):
                if isinstance(ear.next(), Finish | Failure):
                    break
            engine.cancel(request.id)
    for ear, _ in ears:
        end = ear.events[-1] if ear.events else None
        end = end if isinstance(end, Finish | Failure) else ear.wait()
        assert isinstance(end, Finish) or end.kind == "cancelled"
    runner = engine._runner
    for _ in range(400):
        health = engine.health()
        if health.running + health.waiting == 0:
            break
        time.sleep(0.02)
    assert not engine._known and not engine._cancelled and not len(engine._queue)
    assert runner.nbytes == 0 and runner.worst() == 0 and not runner.answers
    assert runner.batch is not None and runner.batch.prefixes.held.nbytes <= runner.limit
    assert health.running == health.waiting == 0


class _Lazy:
    stops = 0

    @functools.cached_property
    def of_functools(self) -> int:
        return self.counted()

    def under(self, lock: Any) -> int:
        with lock:
            return self.counted()

    def counted(self) -> int:
        """Stops between two functions of torch."""
        before = self.stops
        torch.ones(2).sum()
        return self.stops - before


@pytest.mark.parametrize("holder", ["nothing", "lock", "property", "import", "log"])
def test_no_call_stops_where_others_would_wait_for_it(
    holder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A property of `functools` has one lock for all instances, before Python 3.12."""
    lazy, slicer, found = _Lazy(), Slicer(), list[int]()
    (tmp_path / "counts_stops.py").write_text("import counted\ncounted.found()\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = SimpleNamespace(found=lambda: found.append(lazy.counted()))
    monkeypatch.setitem(sys.modules, "counted", seen)
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: seen.found())
    calls = {
        "nothing": seen.found,
        "lock": lambda: found.append(lazy.under(WholeLock())),
        "property": lambda: found.append(lazy.of_functools),
        "import": lambda: importlib.import_module("counts_stops"),
        "log": lambda: handler.handle(logging.makeLogRecord({})),
    }
    slicer.allow(0.0, math.inf)
    for _ in slicer.run(calls[holder], []):
        lazy.stops += 1
    slicer.close()
    stops = holder == "nothing" or (holder == "property" and sys.version_info >= (3, 12))
    assert len(found) == 1 and bool(found[0]) == stops
