"""Policies that choose at each step, by head, or thin keys, in the batch: each answers as alone."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scheduling import (
    EMBEDDED,
    Ear,
    answers,
    ask,
    image,
    model_of,
    stock,
    together,
)
from tiny_models import build
from torch import Tensor

from mmfast.attach import attach
from mmfast.caches.plan import CachePlan
from mmfast.caches.selection.specache import Guesses
from mmfast.core.errors import MmfastError
from mmfast.core.registry import methods
from mmfast.models.encoder_names import takes_features
from mmfast.models.kv.eviction import Eviction
from mmfast.models.kv.packing import Packing
from mmfast.models.kv.selection import Selection, _Steps
from mmfast.models.prompt import chat_inputs
from mmfast.serve.engine import policies
from mmfast.serve.engine.base import Delta, Event, Failure, Finish, Request, SamplingOptions
from mmfast.serve.engine.decode import DecodeBatch
from mmfast.serve.engine.scheduler import Scheduler

FAMILY = "llava_onevision"
SELECT = [
    "quest:0.2?page=4&skip=0",
    "tokenselect:0.2",
    "tidaldecode:0.2?skip=0",
    "twilight:0.5?page=4&skip=0",
    "kinetics:0.3?page=4",
    "dstp:0.2?similar=0.8&hold=2",
    "sink:2+window:8+quest:0.1?page=4&skip=1",
    "snapkv:0.5+twilight:0.6?page=4&skip=0",
    "snapkv:0.4?every=4+quest:0.2?page=4&skip=0",
]
ALONE = ["tova:60+quest:0.2?page=4&skip=0"]  # its steps are made under `attach`
HOST = ["specache:0.2?group=8", "slimfer:0.25?block=4", "sentencekv:0.3?ends=13_30_7_9"]
HEADS = ["adakv:0.3", "knorm:0.4+adakv"]
AGAIN = ["kvzip:0.4", "kvsquared:0.4", "kvcompose:0.4?chunk=16", "kvzip:0.4+adakv"]
THIN = ["think:0.5?residual=8"]
LATEST = [
    "cam:0.4?merge=5",
    "cam:20?every=4",
    "sink:4+cam:0.3+quant:8?residual=8",
    "capkv:0.4?future=20",
    "capkv:0.4+adakv",
    "entropy_chunkkv:0.4?window=3&chunk=4",
    "entropy_chunkkv:20?window=3&chunk=4&every=3",
]
OTHERS = ["", "snapkv:16", "sink:4+window:24", "quant:8?residual=8", "h2o:20", "retrieve:2"]


def engine(family: str = FAMILY, **options: Any) -> Scheduler:
    """A scheduler of small chunks."""
    return Scheduler(model_of(family), **{"chunk": 40, "slots": 16, "queue": 64, **options})


def asked(specs: Sequence[str], tokens: int = 16, **options: Any) -> list[Request]:
    """Long questions of unlike lengths, with log-probabilities."""
    found = []
    for number, spec in enumerate(specs):
        words = "what is it? " * (6 + 3 * number)
        made = ask(f"{number} {spec}", image(number), words, cache=spec, **options)
        found.append(replace(made, sampling=SamplingOptions(max_tokens=tokens, logprobs=1)))
    return found


def alone(family: str, request: Request) -> tuple[str, list[float], dict[str, Any]]:
    """Text, log-probabilities and rows of the trace by `attach` and stock `generate`."""
    model, processor = model_of(family)
    chat = [message.chat for message in request.messages]
    inputs = chat_inputs(processor, [chat], model.device)
    names = (f"{kind}_token_id" for kind in ("image", "video", "audio"))
    none = [i for i in (getattr(model.config, name, None) for name in names) if i is not None]
    reduce, cache = request.options.reduce, request.options.cache
    with attach(model, reduce, cache or None) as trace, torch.inference_mode():
        output = model.generate(
            **inputs,
            max_new_tokens=request.sampling.max_tokens,
            do_sample=False,
            suppress_tokens=none,
            return_dict_in_generate=True,
            output_scores=True,
        )
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    rows = zip(output.scores, new[0].tolist(), strict=True)
    told = [float(each[0].float().log_softmax(-1)[token]) for each, token in rows]
    text = processor.batch_decode(new, skip_special_tokens=True)[0]
    return text, told, {row.stage: row.to_dict() for row in trace.rows}


@functools.cache
def wanted(family: str, specs: tuple[str, ...]) -> list[tuple[str, list[float], dict[str, Any]]]:
    """Answers of `alone` to the questions under these specs."""
    return [alone(family, request) for request in asked(specs)]


def chances(ear: Ear) -> list[float]:
    """Log-probabilities of the tokens that were sent; the one that ends an answer is not."""
    found = [event.logprobs for event in ear.events if isinstance(event, Delta)]
    return [each.chance for mine in found for each in mine]


def same(
    ear: Ear, end: Event, want: tuple[str, list[float], dict[str, Any]], spec: str = ""
) -> bool:
    """Text, log-probabilities, and what the trace says was kept and read.

    Kernels sum rows of a batch in another order; where entries are rounded to 8 bits, that may
    move one of them by a level.
    """
    (text, told, rows), mine = want, chances(ear)
    if not isinstance(end, Finish) or ear.text != text or len(mine) < len(told) - 1:
        return False
    found = {row["stage"]: row for row in end.trace["rows"]}
    names = ("tokens_in", "tokens_out", "peak_bytes")
    told_rows = {"kv", "select"} & rows.keys()
    counts = all(found.get(k, {}).get(n) == rows[k][n] for k in told_rows for n in names)
    near = 3e-4 if "quant" in spec else 1e-4
    return counts and mine == pytest.approx(told[: len(mine)], abs=near)


def agree(specs: Sequence[str], family: str = FAMILY, **options: Any) -> bool:
    """Answers of one batch are those of each request alone, and leave nothing behind."""
    want, made = wanted(family, tuple(specs)), engine(family, **options)
    try:
        ears = together(made, asked(specs))
        ends = [ear.wait() for ear in ears]
        assert made._runner.nbytes == 0
    finally:
        made.close()
    return all(map(same, ears, ends, want, specs))


def test_every_answer_is_that_of_attach() -> None:
    """Beside each other and beside other policies in one batch; all of them leave something out."""
    assert agree([*SELECT, *OTHERS[:3]])
    assert agree([*HEADS, *THIN, *AGAIN, *ALONE, *OTHERS[3:]], chunk=64)
    for _, _, rows in wanted(FAMILY, (*SELECT, *OTHERS[:3]))[: len(SELECT)]:
        assert rows["select"]["tokens_out"] < 0.7 * rows["select"]["tokens_in"]


@pytest.mark.rest_is_slow(2)
@pytest.mark.parametrize("specs", [LATEST, ["kvcompose:0.4?chunk=16", *LATEST[::3]]])
def test_values_that_grow_and_chunks_with_gates_are_served(specs: list[str]) -> None:
    assert agree([*specs, ""])


def test_sinks_follow_their_window() -> None:
    moved, stay = "sink:4?positions=new+window:9", "sink:4+window:9"
    assert agree([moved, "", stay, moved])
    (far, _, near, _) = wanted(FAMILY, (moved, "", stay, moved))
    assert far[1] != pytest.approx(near[1], abs=1e-4)


def test_the_embedded_model_has_patterns_and_gates() -> None:
    every = "fastkvzip:0.4?every=4"
    assert agree(["duo_attention", "fastkvzip:0.4", every, "quest:0.2?page=4"], EMBEDDED)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "lfm2_vl"])
def test_other_families_choose_too(family: str) -> None:
    """M-RoPE, sliding windows and convolutions beside layers of full attention."""
    assert agree(["quest:0.2?page=4&skip=0", "adakv:0.3", "think:0.5?residual=8", ""], family)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", [FAMILY, "qwen2_5_vl", "gemma3"])
def test_entries_in_host_memory_are_served(family: str) -> None:
    assert agree([*HOST, SELECT[0], "snapkv:0.5+specache:0.3?group=8", ""], family)
    for _, _, rows in wanted(family, (*HOST, SELECT[0], "snapkv:0.5+specache:0.3?group=8", "")):
        assert "select" not in rows or rows["select"]["tokens_out"] < rows["select"]["tokens_in"]


def test_blocks_of_a_prompt_that_lost_some_between_layers() -> None:
    """The reducer of SlimInfer beside its policy, and beside answers without."""
    made = engine()
    requests = [
        replace(each, options=replace(each.options, reduce=reduce))
        for each, reduce in zip(asked([HOST[1], "", HOST[1]]), ("slimfer:0.5", "", ""), strict=True)
    ]
    try:
        ears = together(made, requests)
        ends = [ear.wait() for ear in ears]
    finally:
        made.close()
    assert all(map(same, ears, ends, [alone(FAMILY, request) for request in requests]))


def test_every_method_that_chooses_is_tested_here() -> None:
    tested = " ".join([*SELECT, *HOST])
    assert all(each.name in tested for each in methods("cache") if each.role == "select")


def _everything(
    self: Any, index: int, attention: Any, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    return attention(query, key, value, None)  # type: ignore[no-any-return]


_ONE = _Steps()
_ENTER = Selection.enter


def _shared(self: Selection, *given: Any) -> None:
    self._local = _ONE
    _ENTER(self, *given)


FAULTS: list[tuple[str, Any, str, Any]] = [
    ("quest:0.2?page=4&skip=0", Selection, "attend", _everything),
    ("tidaldecode:0.2?skip=0", Selection, "enter", _shared),
    ("adakv:0.3", Eviction, "mask_of_heads", lambda *given: None),
    ("think:0.5?residual=8", Packing, "prompt", lambda self, cache, i, _: cache.layers[i]),
    ("kvsquared:0.4", CachePlan, "asks_model", False),
    (HOST[0], Guesses, "add", lambda *given: None),
    (HOST[1], Selection, "_same", lambda *given: False),
    (HOST[2], Selection, "_continue", lambda *given: None),
]


@pytest.mark.parametrize(("spec", "owner", "name", "fault"), FAULTS)
def test_a_fault_is_seen(
    spec: str, owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is read, steps of rows are one, heads see padding, nothing is thin or asked."""
    specs = [spec, spec]
    assert agree(specs)
    monkeypatch.setattr(owner, name, fault)
    assert not agree(specs)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", [FAMILY, "qwen2_5_vl"])
def test_any_mix_gives_each_answer_as_if_asked_alone(family: str) -> None:
    """Specs, lengths, arrivals and cancellations at random."""
    rng = random.Random(f"policies {family}")
    pool, requests = [*SELECT, *HOST, *HEADS, *THIN, *AGAIN, *ALONE, *OTHERS], list[Request]()
    for number, spec in enumerate(rng.sample(pool, 14)):
        words = "what is it? " * rng.randrange(1, 25)
        media = [image(number)] * (rng.random() < 0.7)
        requests.append(ask(str(number), *media, words, tokens=rng.randrange(1, 24), cache=spec))
    want = [alone(family, request)[0] for request in requests]
    made, ears, cancelled = engine(family, chunk=rng.choice([24, 90])), list[Ear](), set[str]()
    try:
        for request in requests:
            ears.append(Ear(made, request))
            if rng.random() < 0.4:
                ears[-1].next()  # the next one arrives while this one is answered
            if rng.random() < 0.2:
                cancelled.add(request.id)
                made.cancel(request.id)
        for request, ear, text in zip(requests, ears, want, strict=True):
            over = ear.events and not isinstance(ear.events[-1], Delta)
            end = ear.events[-1] if over else ear.wait()
            if request.id in cancelled and isinstance(end, Failure):
                assert end.kind == "cancelled"
            else:
                assert isinstance(end, Finish) and ear.text == text, request.options
        assert made._runner.nbytes == 0 and not made._runner.sequential.answers
    finally:
        made.close()


def promises(patch: pytest.MonkeyPatch) -> list[bool]:
    """For each step of answers one by one, whether the bytes held are those promised, at most."""
    found, made, rounds = list[bool](), engine(memory="40MB"), DecodeBatch.rounds

    def noted(self: DecodeBatch) -> Any:
        held, token = self.store.nbytes, made._runner.per_token
        if made._runner.batch._running:  # type: ignore[union-attr]
            (answer,) = made._runner.answers
            found.append(held <= made._runner.worst() * token and held <= answer.reserve * token)
        return rounds(self)

    patch.setattr(DecodeBatch, "rounds", noted)
    try:
        for spec in (*SELECT, *HOST, *HEADS, *THIN):
            answers(made, asked([spec], tokens=40))
    finally:
        made.close()
        patch.setattr(DecodeBatch, "rounds", rounds)
    assert len(found) > 300
    return found


def test_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for new entries, and what a method keeps beside them, too."""
    assert all(promises(monkeypatch))
    monkeypatch.setattr(policies, "entries_with_room", lambda plan, entries: entries)
    assert not all(promises(monkeypatch))


def test_beginnings_urgent_requests_and_media_of_before() -> None:
    """A known beginning is not read again; a row that its policy reads itself is not paused."""
    reuses = (None, "encoder") if takes_features(build(FAMILY).model) else (None,)
    for spec, reuse in itertools.product((SELECT[0], *HEADS[:1], *THIN), reuses):
        made = engine(slots=1, reuse=reuse)
        ((text, told, _),) = wanted(FAMILY, (spec,))
        try:
            (first,) = together(made, asked([spec]))
            first.next()
            urgent = ask("urgent", "hello", tokens=3, priority=9)
            other = Ear(made, urgent)
            assert isinstance(first.wait(), Finish) and isinstance(other.wait(), Finish)
            again = Ear(made, replace(asked([spec])[0], id="again"))
            end = again.wait()
        finally:
            made.close()
        assert other.text == stock(model_of(FAMILY), urgent)
        assert first.text == again.text == text
        assert chances(again) == pytest.approx(told, abs=1e-4)
        assert isinstance(end, Finish) and (reuse or end.cached_tokens > 200)


def test_a_model_without_patterns_is_told() -> None:
    """A model of its own: other tests give the one that is shared patterns."""
    made = Scheduler((build(FAMILY).model, model_of(FAMILY)[1]))
    try:
        with pytest.raises(MmfastError, match="this model has none of"):
            Ear(made, ask("a", image(1), "what?", cache="duo_attention"))
    finally:
        made.close()


def test_drafts_and_flash_attention_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = engine()
    try:
        for spec in (SELECT[0], "adakv:0.3", "think:0.5"):
            with pytest.raises(MmfastError, match="leave out") as error:
                Ear(made, ask("a", image(1), "what?", cache=spec, decode="recycle"))
            assert "\n" not in str(error.value)
        drafts = "recycle?adapt=false"
        drafting = ask("b", image(1), "what is it? " * 9, cache="kvzip:0.4", decode=drafts)
        ((text, end),) = answers(made, [drafting])
        assert text == alone(FAMILY, drafting)[0]
        assert isinstance(end, Finish)
        assert any(row["stage"] == "draft" for row in end.trace["rows"])
        monkeypatch.setattr(made._runner.batch.decoder.lane, "name", "flash")  # type: ignore[union-attr]
        for spec in (SELECT[0], "adakv:0.3"):
            with pytest.raises(MmfastError, match="start the server with --attn sdpa"):
                Ear(made, ask("a", image(1), "what?", cache=spec))
    finally:
        made.close()
