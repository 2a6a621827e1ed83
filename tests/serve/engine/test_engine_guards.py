"""What engines do when something breaks: one answer fails, the others go on, nothing is kept."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_requests import Inbox, asked, eventually
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import Ear, answers, ask, clip, image, model_of, stock, together

from mmfast.core.errors import MmfastError, ModelError
from mmfast.core.kv import KVBlock
from mmfast.serve.engine.base import BusyError, Failure, Finish, Request, SamplingOptions
from mmfast.serve.engine.decode import DecodeBatch, Writer
from mmfast.serve.engine.encoder import BLOCK, MediaEncoder
from mmfast.serve.engine.kv.prefixes import Prefixes
from mmfast.serve.engine.prefill import Prefiller
from mmfast.serve.engine.scheduler import FairQueue, Scheduler
from mmfast.serve.engine.slots import kv_limit
from mmfast.serve.engine.stages import DecodeStage, EncodeStage, PrefillStage

FAMILY = "llava_onevision"


@pytest.fixture
def engine() -> Iterator[Scheduler]:
    made = Scheduler(model_of(FAMILY), chunk=48, memory="200MB", slots=6)
    yield made
    made.close()


# --- a thread that lives on ---------------------------------------------------------------------


class Choking(Writer):
    """Cannot write the third token of one answer."""

    def push(self, token: int) -> str:
        if self._sampling.max_tokens == 33 and self.count == 2:
            raise UnicodeError("a tokenizer of /some/path")
        return super().push(token)


def test_an_answer_that_cannot_be_written_fails_alone(
    engine: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmfast.serve.engine import scheduler

    monkeypatch.setattr(scheduler, "Writer", Choking)
    requests = [ask("a", "hello", tokens=20), ask("b", "there", tokens=33)]
    (fine, end), (_, failed) = answers(engine, requests)
    assert fine == stock(model_of(FAMILY), requests[0]) and isinstance(end, Finish)
    assert isinstance(failed, Failure) and failed.status == 500
    assert "UnicodeError" in failed.message and "/some" not in failed.message
    assert engine._runner.nbytes == 0


def _filled(request: Request) -> Any:
    model, processor = model_of(FAMILY)
    encoder = MediaEncoder(model, processor)
    prompts = encoder.encode([encoder.prepare(request)])
    filling = PrefillStage(Prefiller(model), 4096)
    try:
        return filling.fill(prompts[0], request.sampling.max_tokens).result(60)  # type: ignore[arg-type]
    finally:
        filling.close()


@pytest.mark.parametrize("where", ["push", "finish"])
def test_decoding_goes_on_behind_a_broken_answer(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    from mmfast.serve.engine import stages

    model, processor = model_of(FAMILY)
    requests = [ask("a", "hello", tokens=20), ask("b", "there", tokens=33)]
    pieces = [_filled(request) for request in requests]
    if where == "push":
        monkeypatch.setattr(stages, "Writer", Choking)
    else:
        pieces[1].trace.pop("rows")
    made = DecodeStage(DecodeBatch(model, 4), processor.tokenizer, 1 << 30)
    try:
        inboxes = [Inbox(), Inbox()]
        for request, piece, inbox in zip(requests, pieces, inboxes, strict=True):
            made.add(request, piece, inbox.append)
        eventually(lambda: all(inbox.over for inbox in inboxes), 60)
        assert inboxes[0].text == stock(model_of(FAMILY), requests[0])
        assert isinstance(inboxes[0][-1], Finish)
        assert isinstance(inboxes[1][-1], Failure) and inboxes[1][-1].status == 500
    finally:
        made.close()
    assert made._decoder.store.nbytes == 0


# --- a text waits for nobody's clip -------------------------------------------------------------


def test_a_text_passes_a_clip_that_is_being_encoded(
    engine: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of a text comes before the tower is through with somebody's clip."""
    batch, encoded = engine._runner.batch, threading.Event()
    assert batch is not None
    steps, ended = batch.encoder.steps, list[str]()

    def slow(prepared: Any) -> Any:
        if any(each.media for each in prepared):
            while not encoded.is_set():  # slice upon slice of the tower
                yield None
        yield from steps(prepared)

    monkeypatch.setattr(batch.encoder, "steps", slow)
    watched = Ear(engine, ask("clip", clip(1), "what moves?", tokens=3))
    try:
        late = Ear(engine, ask("text", "hello there", tokens=5))
        ended.append(type(late.wait()).__name__)
        assert not watched.events
    finally:
        encoded.set()
    assert isinstance(watched.wait(), Finish) and ended == ["Finish"]
    pair = model_of(FAMILY)
    assert late.text == stock(pair, ask("text", "hello there", tokens=5))
    assert watched.text == stock(pair, ask("clip", clip(1), "what moves?", tokens=3))


def test_a_text_passes_in_an_encoder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = MediaEncoder(*model_of(FAMILY))
    gathering, encoded, begun = EncodeStage(encoder), threading.Event(), threading.Event()
    steps = encoder.steps

    def slow(prepared: Any, *given: Any) -> Any:
        if any(each.media for each in prepared):
            begun.set()
            while not encoded.is_set():
                yield None
        yield from steps(prepared, *given)

    monkeypatch.setattr(encoder, "steps", slow)
    try:
        clips = [gathering.encode(encoder.prepare(ask("a", clip(1), "what?"))) for _ in range(2)]
        assert begun.wait(30)
        text = gathering.encode(encoder.prepare(ask("b", "hello")))
        assert text.result(30).length and not clips[0].done()
        encoded.set()
        assert clips[0].result(30).length == clips[1].result(30).length > text.result().length
    finally:
        encoded.set()
        gathering.close()
        encoder.slicer.close()


# --- memory -------------------------------------------------------------------------------------


def test_workers_share_the_memory_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.serve.engine import slots

    monkeypatch.setattr(slots, "free_bytes", lambda device: 32 << 30)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert kv_limit(None, cpu) == 8 << 30 and kv_limit(None, cpu, 4) == 2 << 30
    monkeypatch.setattr(slots, "free_bytes", lambda device: 10 << 30)
    assert kv_limit(None, cuda, 2) == 4 << 30
    assert kv_limit("1GB", cuda, 4) == 10**9  # what is named is each one's
    monkeypatch.setattr(slots, "free_bytes", lambda device: None)
    assert kv_limit(None, cpu) == 512 << 20


def test_replicas_on_ray_share_the_memory_out() -> None:
    from mmfast.serve.ray.cluster import sharing

    assert sharing(4, 8, 1) == 4  # all on one machine
    assert sharing(4, 8, 8) == 1  # a GPU each
    assert sharing(4, 8, 4) == 2  # two to a GPU, and both may decode
    assert sharing(1, 6, 2) == 1


def test_nothing_of_the_prompt_is_kept_for_as_long_as_an_answer(engine: Scheduler) -> None:
    """Pixels, inputs and embeddings go as soon as they are used."""
    kept = engine._runner.encoder
    prepare, held = kept.prepare, list[Any]()

    def watched(request: Request, reduce: str | None = None) -> Any:
        prepared = prepare(request, reduce)
        held.extend(weakref.ref(each) for each in prepared.inputs.values())
        return prepared

    kept.prepare = watched  # type: ignore[method-assign]
    for number, spec in enumerate((None, "fastv@llm2:0.5")):
        shown = image(number + 1)
        pixels = weakref.ref(shown.shot)
        request = ask(f"{number}", shown, "what?", tokens=400, reduce=spec)
        ear = Ear(engine, request)
        ear.next()
        ear.next()  # the first may be heard while the pass that made it still stands on the stack
        del shown, request
        gc.collect()
        assert pixels() is None and not any(each() is not None for each in held)
        (answer,) = engine._runner.answers
        assert not any(isinstance(v, torch.Tensor) for v in vars(answer).values())
        engine.cancel(f"{number}")
        ear.wait()
        held.clear()


def test_decoding_alone_keeps_no_second_copy() -> None:
    request = ask("a", "a long one " * 9, tokens=300)
    piece = _filled(request)
    layer = weakref.ref(piece.filled.kv.keys[0])
    model, processor = model_of(FAMILY)
    made, inbox = DecodeStage(DecodeBatch(model, 2), processor.tokenizer, 1 << 30), Inbox()
    try:
        made.add(request, piece, inbox.append)
        del piece
        eventually(lambda: inbox, 30)
        eventually(lambda: layer() is None or inbox.over, 30)
        assert not inbox.over, "it was kept until the end"
    finally:
        made.close()


# --- beginnings that are known ------------------------------------------------------------------


def _names(path: str) -> list[bytes]:
    """Blocks of a prompt: each stands for everything up to its end."""
    return [path[: i + 1].encode() for i in range(len(path))]


def _kv(path: str) -> KVBlock:
    both = (torch.zeros(1, BLOCK * len(path), 4),)
    return KVBlock(both, both)


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(st.text("ab", min_size=1, max_size=6), st.integers(0, 4000)),
        max_size=30,
    ),
)
def test_what_is_held_is_found_and_nothing_else(steps: list[str | int]) -> None:
    """Every beginning of every entry that is held is found, whatever went before it."""
    limit = 14 * _kv("a").nbytes
    held = Prefixes(limit)
    for step in steps:
        if isinstance(step, str):
            held.put("t", _names(step), _kv(step))
        else:
            held.shrink(step)
        entries = [entry.names for entry in [held.held[key] for key in list(held.held)]]
        known = {name for names in entries for name in names}
        assert set(held._where) == known
        ends = {names[-1] for names in entries}
        assert not any(ends & set(names[:-1]) for names in entries)  # no bytes twice
        for names in entries:
            for count in range(1, len(names) + 1):
                blocks = [block for _, block in names[:count]]
                found = held.find("t", blocks, BLOCK * count + 1)
                assert found is not None and found[1] == BLOCK * count
                assert found[0].keys[0].shape[1] >= BLOCK * count
        assert held.held.nbytes <= limit


# --- errors -------------------------------------------------------------------------------------


def test_errors_of_the_model_are_not_the_users(
    engine: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmfast.serve.engine import encoder as finish
    from mmfast.serve.engine.base import NoTokenError, failure

    joined = finish._joined

    def broken(model: Any, prepared: Any, *rest: Any) -> Any:
        if prepared.request.id == "b":
            raise ModelError("layer 3 of /some/path is of the wrong kind")
        return joined(model, prepared, *rest)

    monkeypatch.setattr(finish, "_joined", broken)
    requests = [ask(name, image(i), "what?", tokens=4) for i, name in enumerate("ab")]
    (_, end), (_, failed) = answers(engine, requests)
    assert isinstance(end, Finish) and isinstance(failed, Failure)
    assert (failed.status, failed.kind) == (500, "model_error")
    assert "layer" not in failed.message and "/some" not in failed.message
    assert failure(NoTokenError("NaN at /some/path")).status == 500
    assert "/some" not in failure(NoTokenError("NaN at /some/path")).message
    assert failure(MmfastError("give less")) == Failure("give less", 400, "invalid_request_error")
    assert (failure(BusyError("later")).status, failure(BusyError("later")).kind) == (503, "busy")


def test_what_ends_all_answers_is_logged_once(
    engine: Scheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = threading.Event()
    decode = DecodeBatch.rounds

    def step(self: DecodeBatch) -> Any:
        if broken.is_set():
            raise RuntimeError("no memory")
        return decode(self)

    monkeypatch.setattr(DecodeBatch, "rounds", step)
    ears = [Ear(engine, ask(f"{i}", "hello", tokens=400)) for i in range(3)]
    for ear in ears:
        ear.next()
    with caplog.at_level(logging.ERROR, "mmfast"):
        broken.set()
        ends = [ear.wait() for ear in ears]
    assert all(isinstance(end, Failure) and end.status == 500 for end in ends)
    assert len([r for r in caplog.records if r.exc_info]) == 1


def test_reducers_that_do_not_fit_are_the_users(
    engine: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a model cannot do with a spec is told; what it cannot do at all is its own affair."""
    from mmfast.serve.engine import encoder as finish

    def unfit(model: Any, inputs: Any, reduce: Any, trace: Any) -> Any:
        raise ModelError("put text behind the image")

    monkeypatch.setattr(finish, "compressed", unfit)
    specs = ({"reduce": "random:0.5"}, {"cache": "window:64"})
    found = answers(engine, [ask(str(s), image(1), "what?", **s) for s in specs])
    ends = [end for _, end in found if isinstance(end, Failure)]
    assert [end.status for end in ends] == [400, 500]
    assert ends[0].message == "put text behind the image" and "put" not in ends[1].message


# --- fair shares --------------------------------------------------------------------------------


def test_who_is_at_work_keeps_its_count() -> None:
    queue: FairQueue[Request] = FairQueue()
    queue.count("busy", 500.0)
    for i in range(5000):
        queue.count(f"payer{i}", 1.0, lambda: ["busy"])
    assert queue.served["busy"] == 500.0 and len(queue.served) < 4200


def test_the_engine_tells_who_is_at_work(engine: Scheduler) -> None:
    ears = [Ear(engine, ask(name, "hello", tokens=300, tenant=name)) for name in "ab"]
    for ear in ears:
        ear.next()
    queue = engine._queue
    queue.served |= {"a": 1e6, "b": 1e6, **{f"gone{i}": 1.0 for i in range(5000)}}
    eventually(lambda: len(queue.served) < 4200, 60)
    assert min(queue.served["a"], queue.served["b"]) >= 1e6
    for name, ear in zip("ab", ears, strict=True):
        engine.cancel(name)
        ear.wait()


def test_users_of_one_key_share_its_turns() -> None:
    """Results are kept apart by user; turns are the key's."""
    made = Scheduler(model_of(FAMILY), slots=1, queue=20, chunk=48, memory="200MB")
    order: list[str] = []
    try:
        many = [
            ask(f"many-{i}", "hello there", tenant=f"key/user{i}", account="key") for i in range(6)
        ]
        few = [ask(f"few-{i}", "hello there", tenant="other/", account="other") for i in range(2)]
        ears = together(made, [*many, *few])
        for ear in ears:
            ear.wait()
        order = [request.id for request in sorted([*many, *few], key=lambda r: _ended(ears, r))]
    finally:
        made.close()
    assert max(order.index(f"few-{i}") for i in range(2)) <= 4, order


def _ended(ears: list[Ear], request: Request) -> float:
    (ear,) = [ear for ear in ears if ear.name == request.id]
    end = ear.events[-1]
    assert isinstance(end, Finish)
    return float(end.trace["ttft_ms"])


def test_a_request_names_its_payer() -> None:
    plain = asked("a")
    assert plain.payer == plain.tenant == ""
    assert Request("a", (), SamplingOptions(), tenant="k/u", account="k").payer == "k"
