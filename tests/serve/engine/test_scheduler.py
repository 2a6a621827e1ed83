"""The scheduler: answers of any mix of requests are those of stock generate, one by one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from scheduling import (
    EMBEDDED,
    Ear,
    answers,
    ask,
    clip,
    image,
    mixed,
    model_of,
    stock,
    talk,
    together,
)

from mmfast.attach import attach
from mmfast.core.errors import MmfastError, SpecError
from mmfast.models.loading import load
from mmfast.models.prompt import chat_inputs
from mmfast.models.reduction import inputs
from mmfast.ops.stream_cache import RowBuffer
from mmfast.serve.engine import encoder as embed
from mmfast.serve.engine import encoder as finish
from mmfast.serve.engine.base import (
    BusyError,
    Executor,
    Failure,
    Finish,
    Request,
    SamplingOptions,
)
from mmfast.serve.engine.encoder import BLOCK
from mmfast.serve.engine.kv.prefixes import Prefixes
from mmfast.serve.engine.prefill import Prefiller
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.serve.engine.slots import Embedded


@contextmanager
def scheduler(family: str, **options: Any) -> Iterator[Scheduler]:
    """A scheduler of small chunks, closed at the end."""
    made = Scheduler(model_of(family), **{"chunk": 48, "memory": "200MB", **options})
    try:
        yield made
    finally:
        made.close()


@functools.cache
def expected_of(family: str) -> list[str]:
    """Stock answers to `mixed`."""
    return [stock(model_of(family), request) for request in mixed()]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "qwen3_vl", EMBEDDED])
def test_answers_are_those_of_stock_generate(family: str) -> None:
    requests, expected = mixed(), expected_of(family)
    with scheduler(family) as engine:
        assert isinstance(engine, Executor)
        found = answers(engine, requests)
        assert [text for text, _ in found] == expected
        for request, (_, end) in zip(requests, found, strict=True):
            assert isinstance(end, Finish)
            assert end.completion_tokens <= request.sampling.max_tokens
            stages = [row["stage"] for row in end.trace["rows"]]
            assert stages == ["read", "encode", "prefill", "decode"]
            assert end.trace["kept_tokens"] == end.trace["visual_tokens"]
            assert end.trace["ttft_ms"] > 0
        again = answers(engine, mixed("again-"))  # from what is kept of media and prompts
        assert [text for text, _ in again] == expected
        assert all(end.cached_tokens > 0 for _, end in again if end.prompt_tokens > BLOCK)
        health = engine.health()
        assert health.ready and health.running == 0
        assert health.gauges["cache_hits"] >= 8 and health.gauges["kv_bytes"] == 0


def attached(pair: Any, request: Request) -> str:
    """The answer of stock `generate` under the specs of a request."""
    with attach(pair[0], request.options.reduce, request.options.cache):
        return stock(pair, request)


def test_none_overrules_what_the_server_does() -> None:
    pair, own = model_of("llava_onevision"), {"reduce": "evs:0.5", "cache": "snapkv:8"}
    request, served = (ask("a", clip(1), "what?", tokens=9, **specs) for specs in ({}, own))
    expected = [stock(pair, request), attached(pair, served)]
    assert expected[0] != expected[1]
    whole = ask("whole", clip(1), "what?", tokens=9, reduce="none", cache="none", prefill="none")
    with scheduler("llava_onevision", **own) as engine:
        found = answers(engine, [whole, request])
    assert [text for text, _ in found] == expected


def test_a_learned_compressor_reads_the_question_of_its_own_request() -> None:
    questions = ("Which way does the red circle move?", "How many objects are there?")
    requests = [
        ask(f"{i}", clip(1), question, tokens=4, reduce="query_compressor:1")
        for i, question in enumerate((*questions, *questions))
    ]
    pair = load("tiny-video", "cpu", "float32")
    expected = [attached(pair, request) for request in requests]
    with closing(Scheduler(pair, chunk=48, memory="200MB")) as engine:
        found = answers(engine, requests)
        assert [text for text, _ in found] == expected
        assert {end.trace["kept_tokens"] for _, end in found} == {4}  # one of each frame
        named = ask("file", clip(1), "what?", tokens=4, reduce="query_compressor:1?path=/x")
        with pytest.raises(SpecError, match="a request must not"):
            Ear(engine, named)


@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_vl"])
def test_reduced_answers_are_those_of_attach(family: str) -> None:
    specs = [
        ("divprune:0.5", None),
        ("visionzip:0.5", None),
        ("divprune:0.5+fastv@llm2:0.5", None),
        ("tome@vit:0.5", None),
        (None, "snapkv:20"),
        (None, "sink:4+window:24"),
        ("random:0.5", "quant:8"),
    ]
    requests = [
        ask(f"{i}", image(i), clip(i), "what?", tokens=5, reduce=reduce, cache=cache)
        for i, (reduce, cache) in enumerate(specs)
    ] + [ask("plain", image(9), "what?", tokens=12)]
    pair = model_of(family)
    expected = [attached(pair, request) for request in requests]
    with scheduler(family) as engine:
        found = answers(engine, requests)
    assert [text for text, _ in found] == expected
    kept = [end.trace["kept_tokens"] / end.trace["visual_tokens"] for _, end in found]
    assert kept[0] == pytest.approx(0.5, abs=0.05) and kept[4] == kept[-1] == 1


@pytest.mark.parametrize("family", ["gemma3", "lfm2_vl"])
def test_models_without_even_layers_are_answered_too(family: str) -> None:
    requests = [ask("a", image(1), "what?"), ask("b", "hello", tokens=9)]
    with scheduler(family) as engine:
        found = answers(engine, requests)
    assert [text for text, _ in found] == [stock(model_of(family), r) for r in requests]


# --- planted faults: the comparison must see them -----------------------------------------------


def _agrees(family: str) -> bool:
    with scheduler(family) as engine:
        found = answers(engine, mixed())
    return [text for text, _ in found] == expected_of(family)


def test_a_wrong_row_offset_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = RowBuffer.scatter

    def shifted(self: RowBuffer, both: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor]) -> None:
        scatter(self, both, (at[0], (at[1] - 1).clamp_min(0)))

    monkeypatch.setattr(RowBuffer, "scatter", shifted)
    assert not _agrees("llava_onevision")


def test_rows_that_see_each_other_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.serve.engine.kv.bucket import RowBucket

    def swapped(self: RowBucket, attention: Any, query: Any, both: Any) -> Any:
        return attend(self, attention, query, both.roll(1, 1))

    attend = RowBucket.attend
    monkeypatch.setattr(RowBucket, "attend", swapped)
    assert not _agrees("llava_onevision")


def test_a_chunk_that_forgets_the_one_before_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.serve.engine import prefill

    def late(self: Any, part: Any, first: int, sliding: bool) -> Any:
        seen = mask(self, part, first, sliding)
        if seen is not None and part.start:
            seen[..., : part.start - first] = False
        return seen

    mask = prefill._Pass._mask
    monkeypatch.setattr(prefill._Pass, "_mask", late)
    assert not _agrees("llava_onevision")


def test_contiguous_positions_after_pruning_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def contiguous(model: Any, positions: Any, length: int) -> Any:
        right = axes(model, positions, length)
        return torch.arange(length).expand_as(right).contiguous()

    axes = inputs.axes
    request = ask("a", image(1), clip(1), "what?", tokens=12, reduce="divprune:0.25")
    expected = attached(model_of("qwen2_5_vl"), request)
    for planted in (False, True):
        if planted:
            monkeypatch.setattr(inputs, "axes", contiguous)
        with scheduler("qwen2_5_vl") as engine:
            ((text, _),) = answers(engine, [request])
        assert (text == expected) is not planted


def test_missing_deepstack_features_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.serve.engine import prefill

    monkeypatch.setattr(prefill, "_planes", lambda *_: {})
    assert not _agrees("qwen3_vl")


def _leaks() -> int:
    """Tokens that a tenant was spared by what another one had asked."""
    with scheduler("llava_onevision") as engine:
        words = "the same words " * 10
        answers(engine, [ask("a", words, image(1), "?", tenant="a")])
        ((_, same),) = answers(engine, [ask("b", words, image(1), "?", tenant="a")])
        ((_, other),) = answers(engine, [ask("c", words, image(1), "?", tenant="b")])
        assert same.cached_tokens > 0
        return int(other.cached_tokens)


def test_nothing_is_reused_across_tenants() -> None:
    assert _leaks() == 0


def test_prefixes_across_tenants_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    find, put = Prefixes.find, Prefixes.put
    monkeypatch.setattr(Prefixes, "find", lambda self, tenant, *rest: find(self, "", *rest))
    monkeypatch.setattr(Prefixes, "put", lambda self, tenant, *rest: put(self, "", *rest))
    assert _leaks() > 0


def test_the_same_question_about_another_image_is_another_prompt() -> None:
    """Media count by their content: the same words behind other pixels share nothing."""
    first, second = (ask(str(i), image(i), "what is it?", tokens=9) for i in (1, 2))
    with scheduler("qwen2_5_vl") as engine:
        ((one, _),) = answers(engine, [first])
        ((two, end),) = answers(engine, [second])
    pair = model_of("qwen2_5_vl")
    assert [one, two] == [stock(pair, first), stock(pair, second)]
    assert end.cached_tokens == 0


# --- sampling -----------------------------------------------------------------------------------


def test_draws_do_not_depend_on_the_batch() -> None:
    def drawn(name: str, seed: int | None) -> Request:
        sampling = SamplingOptions(max_tokens=12, temperature=0.9, top_p=0.8, seed=seed)
        return talk(name, [(image(1), "what?")], sampling=sampling)

    with scheduler("llava_onevision") as engine:
        ((alone, _),) = answers(engine, [drawn("a", 5)])
        beside = answers(engine, [*mixed(), drawn("x", 5), drawn("y", 6), drawn("z", None)])
        texts = [text for text, _ in beside[-3:]]
        ((_, end),) = answers(engine, [drawn("e", None)])
    assert texts[0] == alone
    assert len({alone, texts[1], texts[2]}) == 3
    assert isinstance(end, Finish)


# --- refusals, limits, cancelling ---------------------------------------------------------------


def test_refusals_at_submission() -> None:
    wrong = {
        "divprun:0.5": SpecError,
        "fastv@llm9:0.5": SpecError,
        "tome@vit": SpecError,
    }
    with scheduler("llava_onevision", context=600) as engine:
        for spec, kind in wrong.items():
            with pytest.raises(kind):
                Ear(engine, ask("a", image(1), "what?", reduce=spec))
        with pytest.raises(SpecError):
            Ear(engine, ask("a", image(1), "what?", cache="snapkv"))
        for request in (
            ask("a", "x" * 700),
            ask("a", "x", tokens=700),
            ask("a", " "),
            ask("a", "x", tokens=0),
            ask("a", "x", sampling=SamplingOptions(temperature=-1.0)),
            ask("a", "x", sampling=SamplingOptions(top_p=0.0)),
            ask("a", image(1), "x", reduce="evs:0.5", target_ttft_ms=100),
            ask("a", image(1), "x", target_ttft_ms=-1),
        ):
            with pytest.raises(MmfastError) as error:
                Ear(engine, request)
            assert "\n" not in str(error.value) and not isinstance(error.value, BusyError)
        assert isinstance(Ear(engine, ask("a", "fine")).wait(), Finish)
    with pytest.raises(SpecError):
        Scheduler(model_of("llava_onevision"), reduce="divprun:0.5")
    with pytest.raises(MmfastError, match="closed"):
        Ear(engine, ask("a", "x"))


def test_one_more_than_fits_is_busy() -> None:
    with scheduler("llava_onevision", slots=2, queue=3) as engine:
        with pytest.raises(MmfastError, match="at work already"):
            together(engine, [ask("same", "x"), ask("same", "x")])
        with pytest.raises(BusyError) as busy:
            together(engine, [ask(str(i), "hello", tokens=30) for i in range(9)])
        assert 0 < busy.value.retry_after <= 30
        assert isinstance(Ear(engine, _patient(engine)).wait(), Finish)


def _patient(engine: Scheduler) -> Request:
    """A request behind which nothing is left over of those before."""
    deadline = threading.Event()
    for _ in range(600):
        if engine.health().running + engine.health().waiting == 0:
            break
        deadline.wait(0.05)
    return ask("later", "hello")


def test_memory_is_counted_and_never_passed() -> None:
    with scheduler("llava_onevision", memory=120_000, slots=8) as engine:
        runner, seen = engine._runner, list[int]()
        batch = runner.batch
        assert batch is not None
        decode = batch.decode

        def watched() -> bool:
            seen.append(runner.nbytes + batch.prefixes.held.nbytes)
            return decode()

        batch.decode = watched  # type: ignore[method-assign]
        with pytest.raises(MmfastError, match="bytes of keys and values"):
            Ear(engine, ask("big", "x" * 500, tokens=100))
        requests = [ask(str(i), "x" * 60, tokens=10 + i) for i in range(6)]
        found = answers(engine, requests)
        assert [text for text, _ in found] == [
            stock(model_of("llava_onevision"), request) for request in requests
        ]
        assert 0 < max(seen) <= 120_000
        assert runner.nbytes == 0


@pytest.mark.parametrize("spec", [None, "fastv@llm2:0.5"])
def test_cancelling_frees_memory_at_once(spec: str | None) -> None:
    with scheduler("llava_onevision") as engine:
        ear = Ear(engine, ask("a", image(1), "what?", tokens=200, reduce=spec))
        ear.next()
        assert engine.health().gauges["kv_bytes"] > 0
        other = Ear(engine, ask("b", "hello", tokens=9))
        engine.cancel("a")
        engine.cancel("nobody")
        end = ear.wait()
        assert isinstance(end, Failure) and (end.status, end.kind) == (499, "cancelled")
        other.wait()
        assert other.text == stock(model_of("llava_onevision"), ask("b", "hello", tokens=9))
        assert engine._runner.nbytes == 0


def test_cancelling_during_encode_and_prefill() -> None:
    with scheduler("llava_onevision", chunk=16) as engine:
        batch = engine._runner.batch
        assert batch is not None
        seen: list[str] = []
        prefill, encode = batch._prefill, batch._encode

        def cancel_then(what: str, go: Any) -> Any:
            def run() -> Any:
                name = {"encode": "a", "prefill": "b"}[what]
                if any(answer.id == name for answer in batch.coming) and what not in seen:
                    result = go()
                    if what == "encode" or any(job.done for _, job in batch._jobs.values()):
                        seen.append(what)
                        engine.cancel(name)
                    return result
                return go()

            return run

        batch._prefill = cancel_then("prefill", prefill)  # type: ignore[method-assign]
        batch._encode = cancel_then("encode", encode)  # type: ignore[method-assign]
        a = Ear(engine, ask("a", image(1), "what?", tokens=50))
        b = Ear(engine, ask("b", "a long one " * 30, tokens=50))
        assert isinstance(a.wait(), Failure) and isinstance(b.wait(), Failure)
        assert not a.text and not b.text
        assert set(seen) == {"encode", "prefill"}
        assert engine._runner.nbytes == 0 and not engine._runner.answers


def test_a_broken_request_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tower, in prefill's bookkeeping, in its logits, in its caller."""
    requests = [ask(name, image(i), "what?", tokens=9) for i, name in enumerate("abc")]
    expected = [stock(model_of("llava_onevision"), request) for request in requests]
    encode = finish._joined

    def broken(model: Any, prepared: Any, *rest: Any) -> Any:
        if prepared.request.id == "b":
            raise RuntimeError("shape of b at /some/path")
        return encode(model, prepared, *rest)

    monkeypatch.setattr(finish, "_joined", broken)
    with scheduler("llava_onevision") as engine:
        found = answers(engine, requests)
        assert [text for text, _ in found] == [expected[0], "", expected[2]]
        end = found[1][1]
        assert isinstance(end, Failure) and end.status == 500 and "/some" not in end.message
        monkeypatch.setattr(finish, "_joined", encode)
        gone: list[Any] = []

        def deaf(event: Any) -> None:
            gone.append(event)
            raise OSError("nobody listens")

        engine.submit(ask("deaf", "hello", tokens=40), deaf)
        assert [text for text, _ in answers(engine, requests)] == expected
        assert len(gone) == 1


def test_a_prompt_that_breaks_a_pass_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.serve.engine.prefill import Prefiller

    run = Prefiller.run

    def breaking(self: Prefiller, plan: Any) -> Any:
        if any(job.prompt.length == 46 for job, _ in plan):
            raise RuntimeError("shapes")
        return run(self, plan)

    monkeypatch.setattr(Prefiller, "run", breaking)
    requests = [ask(name, "x" * n, tokens=6) for name, n in (("a", 6), ("b", 27), ("c", 9))]
    with scheduler("llava_onevision", chunk=256) as engine:
        assert [engine._runner.encoder.prepare(r).length for r in requests] == [25, 46, 28]
        found = answers(engine, requests)
    assert [isinstance(end, Finish) for _, end in found] == [True, False, True]
    pair = model_of("llava_onevision")
    assert [found[0][0], found[2][0]] == [stock(pair, requests[0]), stock(pair, requests[2])]


def test_infinite_logits_end_one_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.serve.engine.decode import Chooser

    choose = Chooser.choose

    def poisoned(self: Chooser, logits: Any, draws: Any, *more: Any) -> Any:
        for row, each in enumerate(draws):
            if each.sampling.max_tokens == 33 and each.step == 3:
                logits[row] = float("nan")
        return choose(self, logits, draws, *more)

    monkeypatch.setattr(Chooser, "choose", poisoned)
    requests = [ask("a", "hello", tokens=9), ask("b", "there", tokens=33)]
    with scheduler("llava_onevision") as engine:
        (fine, end), (_, failed) = answers(engine, requests)
    assert fine == stock(model_of("llava_onevision"), requests[0]) and isinstance(end, Finish)
    assert isinstance(failed, Failure) and "NaN" in failed.message


def test_closing_fails_what_runs() -> None:
    engine = Scheduler(model_of("llava_onevision"), slots=2)
    ears = [Ear(engine, ask(str(i), "hello", tokens=500)) for i in range(5)]
    ears[0].next()
    engine.close()
    ends = [ear.wait() for ear in ears]
    assert all(isinstance(end, Failure | Finish) for end in ends)
    assert isinstance(ends[-1], Failure) and ends[-1].status == 503
    assert not engine.health().ready
    engine.close()


# --- whose turn it is ---------------------------------------------------------------------------


def _order(engine: Scheduler, requests: list[Request]) -> list[str]:
    order: list[str] = []
    held, over = threading.Event(), threading.Event()

    def hear(name: str, event: Any) -> None:
        if isinstance(event, Finish | Failure):
            order.append(name)
            if len(order) == len(requests):
                over.set()

    engine.submit(ask("plug", "a", tokens=1), lambda _: held.wait(60))
    for request in requests:
        engine.submit(request, lambda event, name=request.id: hear(name, event))
    held.set()
    assert over.wait(120)
    return order


def test_priority_and_tenants_share_turns() -> None:
    with scheduler("llava_onevision", slots=1, queue=20) as engine:
        flood = [ask(f"many-{i}", "hello there", tenant="many") for i in range(6)]
        few = [ask(f"few-{i}", "hello there", tenant="few") for i in range(2)]
        order = _order(engine, [*flood, *few])
        assert max(order.index(f"few-{i}") for i in range(2)) <= 4
        first_of_many = [name for name in order if name.startswith("many")]
        assert first_of_many == [request.id for request in flood]
        late = ask("now", "hello", priority=1, tenant="many")
        assert _order(engine, [*flood, late])[0] == "now"


def test_a_long_prompt_does_not_hold_up_a_running_answer() -> None:
    """Between two decoding steps there is never more than a chunk of prefill."""
    with scheduler("llava_onevision", chunk=64, context=4096) as engine:
        batch, log = engine._runner.batch, list[int]()
        assert batch is not None
        decode, run, run_with = batch.decoder.rounds, batch.prefiller.run, batch.prefiller.run_with

        def stepped() -> Any:
            log.append(0)
            return decode()

        def filled(plan: Any) -> Any:
            log.append(sum(n for _, n in plan))
            return run(plan)

        def both(plan: Any, decoder: Any) -> Any:
            log.extend((sum(n for _, n in plan), 0))
            return run_with(plan, decoder)

        batch.decoder.rounds, batch.prefiller.run = stepped, filled  # type: ignore[method-assign]
        batch.prefiller.run_with = both  # type: ignore[method-assign]
        running = Ear(engine, ask("a", "hello", tokens=60))
        running.next()
        del log[:]
        long = Ear(engine, ask("b", "x" * 1500, tokens=2))
        running.wait()
        long.wait()
    start = next(i for i, n in enumerate(log) if n)
    during = log[start : start + 40]
    assert all(n <= 64 for n in log)
    assert all(a == 0 or b == 0 for a, b in pairwise(during))


def test_stop_strings_and_length() -> None:
    pair = model_of(EMBEDDED)
    request = ask("a", image(1, (96, 96)), image(2, (96, 96)), "compare", tokens=30)
    whole = stock(pair, request)
    with scheduler(EMBEDDED) as engine:
        ((text, end),) = answers(engine, [request])
        assert text == whole and isinstance(end, Finish) and end.reason == "stop"
        sampling = SamplingOptions(max_tokens=30, stop=(whole[1:3], "nothing"))
        ((text, end),) = answers(engine, [_with(request, sampling)])
        assert text == whole[:1] and isinstance(end, Finish) and end.reason == "stop"
        ((_, end),) = answers(engine, [_with(request, SamplingOptions(max_tokens=1))])
        assert isinstance(end, Finish) and (end.reason, end.completion_tokens) == ("length", 1)


def _with(request: Request, sampling: SamplingOptions) -> Request:
    return Request(f"{request.id}-{sampling.max_tokens}", request.messages, sampling)


def test_what_was_not_read_of_a_picture_is_noted() -> None:
    request = ask("a", replace(image(1), note="of it one page is read"), "what?")
    (said,) = request.messages
    request = replace(request, messages=(replace(said, notes=("half of it was heard",)),))
    with scheduler("qwen2_5_vl") as engine:
        ((_, end),) = answers(engine, [request])
    assert isinstance(end, Finish)
    assert end.trace["notes"] == ["half of it was heard", "of it one page is read"]


def test_a_target_is_planned() -> None:
    """The planner picks a spec; the answer is that of the spec."""
    request = ask("a", clip(1, 8, (96, 96)), "which way does it move?", target_ttft_ms=60_000)
    with scheduler(EMBEDDED) as engine:
        ((text, end),) = answers(engine, [request])
    assert isinstance(end, Finish), end
    assert "plan" in [row["stage"] for row in end.trace["rows"]]
    plain = Request("b", request.messages, request.sampling)
    assert text == stock(model_of(EMBEDDED), plain)  # a minute is enough for all tokens
    assert end.trace["notes"] == ["plan: all tokens"]


def test_a_target_is_planned_on_a_device_that_was_never_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring runs the stock call of the engine; an earlier measurement would hide errors."""
    monkeypatch.setenv("MMFAST_CACHE_DIR", str(tmp_path))
    request = ask("a", clip(1, 8, (96, 96)), "which way does it move?", target_ttft_ms=60_000)
    with scheduler(EMBEDDED) as engine:
        ((_, end),) = answers(engine, [request])
    assert isinstance(end, Finish), end
    assert list(tmp_path.glob("rates-*.json"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of media in each call of the tower."""
    found: list[int] = []
    encode = embed.encode

    def counted(base: Any, adapter: Any, needs: Any, group: Any, *specs: Any) -> Any:
        found.append(sum(unit.count for unit in group))
        return encode(base, adapter, needs, group, *specs)

    monkeypatch.setattr(embed, "encode", counted)
    return found


def test_media_of_several_requests_are_encoded_in_one_call(calls: list[int]) -> None:
    with scheduler("qwen2_5_vl") as engine:
        answers(engine, [ask(str(i), image(i), "what?") for i in range(4)])
        assert calls == [4]
        answers(engine, [ask(str(i), image(i % 4), "and now?") for i in range(6)])
        assert calls == [4]


def test_prompts_of_several_pictures_are_encoded_in_one_call(calls: list[int]) -> None:
    """A family that tells of pictures by prompt cannot be parted, and is not encoded twice."""
    made = embed.MediaEncoder(*model_of("llava_onevision"))
    requests = [ask(str(i), image(2 * i), image(2 * i + 1), "what?") for i in range(3)]
    together = made.encode([made.prepare(request) for request in requests])
    assert calls == [6]
    made.kept.clear()
    for request, found in zip(requests, together, strict=True):
        (alone,) = made.encode([made.prepare(request)])
        assert isinstance(found, Embedded) and isinstance(alone, Embedded)
        torch.testing.assert_close(found.embeds, alone.embeds)


def test_an_idle_engine_takes_along_what_is_being_prepared(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmfast.serve.engine.scheduler.GATHER", 60.0)
    with scheduler("qwen2_5_vl") as engine:
        prepare, begun = engine._runner.encoder.prepare, threading.Event()
        goes_on, late = threading.Event(), list[Ear]()

        def slow(request: Request, *more: Any) -> Any:
            if request.id == "late":
                begun.set()
                assert goes_on.wait(60)
            return prepare(request, *more)

        monkeypatch.setattr(engine._runner.encoder, "prepare", slow)
        thread = threading.Thread(
            target=lambda: late.append(Ear(engine, ask("late", image(2), "what?")))
        )
        thread.start()
        assert begun.wait(60)
        first = Ear(engine, ask("first", image(1), "what?"))
        assert not calls and not first.events
        goes_on.set()
        thread.join()
        assert all(isinstance(ear.wait(), Finish) for ear in (first, *late))
    assert calls == [2]


def test_a_chunk_that_nobody_set_fits_the_device() -> None:
    model = model_of("llava_onevision")[0]
    mine, given = Prefiller(model), Prefiller(model, 64)
    assert [mine.fit(0.001) for _ in range(4)] == [2.0, 2.0, 2.0, 1.0] and mine.chunk == 2048
    assert mine.fit(0.02) == 1.0 and [mine.fit(0.1) for _ in range(4)] == [0.5, 0.5, 0.5, 1.0]
    assert mine.chunk == 256
    assert given.fit(0.001) == given.fit(1.0) == 1.0 and given.chunk == 64


def test_media_and_messages_of_helpers() -> None:
    """The stock answer is asked with the same prompt as the scheduler's."""
    request = mixed()[0]
    model, processor = model_of("llava_onevision")
    chat = [message.chat for message in request.messages]
    inputs = chat_inputs(processor, [chat], model.device)
    with scheduler("llava_onevision") as engine:
        prepared = engine._runner.encoder.prepare(request)
    assert torch.equal(prepared.inputs["input_ids"], inputs["input_ids"])
