"""The lane of the batch: random mixes of specs give each answer as if it were asked alone."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from scheduling import Ear, answers, ask, clip, image, model_of, stock

from mmfast.attach import attach
from mmfast.caches.selection.tidaldecode import EarlierLayers
from mmfast.core.kv import KVBlock
from mmfast.core.registry import methods
from mmfast.models.kv.policy import KVStage
from mmfast.ops.quantisation import unpacked
from mmfast.serve.engine.base import Failure, Finish, Request
from mmfast.serve.engine.encoder import MediaEncoder
from mmfast.serve.engine.kv.bucket import Entries, Places, Slots, beyond
from mmfast.serve.engine.kv.packed_rows import PackedBucket, PackedEntries
from mmfast.serve.engine.kv.rows import AnswerRow, AnswerRows
from mmfast.serve.engine.prefill import Prefiller
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.serve.engine.slots import Embedded

CLIPS = {"llava_onevision", "qwen2_5_vl", "qwen3_vl"}
DEEP = [
    "fastv@llm1:0.5",
    "divprune:0.5+fastv@llm2:0.5",
    "pyramiddrop:0.3",
    "sparsevlm:0.3",
    "dart:0.4",
    "divprune:0.5",
    "gemfilter:0.4",
    "divprune:0.7+gemfilter:8?layer=2",
    "",
]
VIT = ["tome@vit:0.5", "tome@vit:0.7+fastv@llm2:0.5"]
PACKED = ["downsample@pixel:0.4", "pixelprune+divprune:0.5", "downsample@pixel:0.6+fastv@llm1:0.5"]
CACHES = [
    "snapkv:16",
    "sink:4+window:24",
    "quant:8?residual=8",
    "quant:4?residual=0&group=16",
    "retrieve:2",
    "sink:4+snapkv:16",
    "streamingvlm:30",
    "lookm:0.3",
    "zipvl",
    "sink:4+window:24+quant:8?residual=16",
    "retrieve:1+quant:4?residual=8",
    "",
]


APART = [
    "h2o:20",
    "pyramidkv:0.4?window=3",
    "simlayerkv:0.4?threshold=0.3",
    "infinipot_v:0.5",
    "streammem:0.5",
    "livevlm:0.5?window=9",
    "criticalkv:0.4",
    "expected_attention:0.4?future=20",
    "capkv:0.4?future=20",
    "compactor:0.4?chunk=16",
    "keydiff:0.4?every=3",
    "tova:14?every=2",
]


def requests_of(family: str, rng: random.Random, count: int) -> list[Request]:
    """Requests of random media, lengths and specs."""
    found = []
    for number in range(count):
        media: list[Any] = [image(rng.randrange(99)) for _ in range(rng.randrange(3))]
        if family in CLIPS and rng.random() < 0.4:
            media.append(clip(rng.randrange(99), rng.choice([2, 4])))
        words = "what is it? " * rng.randrange(1, 16)
        tower = PACKED * family.startswith("qwen") + VIT * (family != "lfm2_vl")
        reduce = rng.choice(DEEP + tower) if media else ""
        if family == "lfm2_vl":  # some of its layers are convolutions
            reduce = reduce.replace("llm1", "llm2").replace("layer=2", "layer=3")
        options = {"reduce": reduce, "cache": rng.choice(CACHES)}
        found.append(ask(str(number), *media, words, tokens=rng.randrange(2, 34), **options))
    return found


def alone(family: str, request: Request) -> str:
    """The answer of `attach` and stock `generate`."""
    pair, options = model_of(family), request.options
    with attach(pair[0], options.reduce or None, options.cache or None):
        return stock(pair, request)


def engine(family: str, **options: Any) -> Scheduler:
    """A scheduler of small chunks."""
    return Scheduler(model_of(family), **{"chunk": 40, "slots": 16, "queue": 64, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llava_onevision", "qwen2_5_vl", "qwen3_vl", "gemma3", "lfm2_vl"]
)
def test_any_mix_gives_each_answer_as_if_asked_alone(family: str) -> None:
    """Specs, lengths, arrivals and cancellations at random; M-RoPE, windows, convolutions."""
    rng = random.Random(f"lane {family}")
    requests = requests_of(family, rng, 22)
    # attach() acts on the model, and so on what an engine does with it meanwhile
    expected = {request.id: alone(family, request) for request in requests}
    made = engine(family)
    assert made._runner.batch is not None
    ears, cancelled = list[Ear](), set[str]()
    try:
        for request in requests:
            ears.append(Ear(made, request))
            if rng.random() < 0.3:
                ears[-1].next()  # the next one arrives while this one is answered
            if rng.random() < 0.15:
                cancelled.add(request.id)
                made.cancel(request.id)
        for request, ear in zip(requests, ears, strict=True):
            end = ear.events[-1] if ear.events and not _goes_on(ear) else ear.wait()
            if request.id in cancelled and isinstance(end, Failure):
                assert end.kind == "cancelled"
            else:
                assert isinstance(end, Finish)
                assert ear.text == expected[request.id], request.options
        assert not made._runner.sequential.answers
        assert made._runner.nbytes == 0
    finally:
        made.close()


def _goes_on(ear: Ear) -> bool:
    return not isinstance(ear.events[-1], Finish | Failure)


@pytest.mark.parametrize("family", ["llava_onevision", "gemma3"])
def test_a_spec_beside_others_changes_none_of_them(family: str) -> None:
    rng = random.Random(7)
    requests = requests_of(family, rng, 9)
    made = engine(family)
    try:
        together = answers(made, requests)
        once_more = [answers(made, [request])[0] for request in requests]
    finally:
        made.close()
    assert [text for text, _ in together] == [text for text, _ in once_more]
    for _, end in together:
        assert isinstance(end, Finish)
        stages = [row["stage"] for row in end.trace["rows"]]
        assert stages[:2] == ["read", "encode"] and stages[-2:] == ["prefill", "decode"]


def rows_of(spec: str, seed: int, chunk: int = 64) -> tuple[list[Any], Any]:
    """Layers of an answer behind its prompt under a cache policy, and the row of its trace."""
    model, processor = model_of("llava_onevision")
    encoder, prefiller = MediaEncoder(model, processor), Prefiller(model, chunk)
    prepared = encoder.prepare(ask("a", image(seed), "what is it?"))
    (prompt,) = encoder.encode([replace(prepared, cache=spec)])
    assert isinstance(prompt, Embedded)
    job = prefiller.job(prompt, prompt.length + 8)
    while job.logits is None:
        prefiller.step([job])
    row, recipe = prefiller.result(job).row, prompt.recipe
    encoder.slicer.close()
    assert row is not None and recipe is not None
    (told,) = [each for each in recipe.trace.rows if each.stage == "kv"]
    return list(row.parts), told


LARGE = 1024  # tokens of a chunk, which hold the entries of all layers of a prompt here
ALIKE = [
    "snapkv:16",
    "sink:4+window:24",
    "window:0.3",
    "quant:8?residual=8",
    "quant:4?group=16",
    "retrieve:2",
    "window:8+retrieve:2",
    "lookm:0.3",
    "finch:0.4?window=3&chunk=16",
    "keynorm:0.5",
    "tova:0.25",
    "curdkv:0.25",
    "keydiff:0.25",
    "lagkv:0.5?sink=2&lag=4",
    "chunkkv:0.4?window=3&chunk=4",
    "entropy_chunkkv:0.4?window=3&chunk=4",
    "cam:0.4?merge=5",
    "knorm:0.25",
    "vatp:0.4",
    "leverage:0.3",
    "mixkv:0.4",
    "snapkv:64+quant:8?residual=8",
]


@pytest.mark.parametrize("spec", ALIKE)
def test_a_policy_acts_on_all_layers_at_once_as_on_one_after_the_other(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, together = list[int](), KVStage.end_together

    def counted(stage: KVStage, *given: Any) -> Any:
        calls.append(len(given[1][0]))
        return together(stage, *given)

    monkeypatch.setattr(KVStage, "end_together", counted)
    found, told = rows_of(spec, 3, LARGE)
    assert calls == [len(found)]
    monkeypatch.setattr(KVStage, "alike", False)
    expected, known = rows_of(spec, 3, LARGE)
    assert calls == [len(found)]
    assert (told.tokens_in, told.tokens_out, told.peak_bytes) == (
        known.tokens_in,
        known.tokens_out,
        known.peak_bytes,
    )
    for mine, other in zip(found, expected, strict=True):
        assert type(mine) is type(other) and mine.place == other.place and mine.most == other.most
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)
        leaves = [None if part.leaving is None else part.leaving(90) for part in (mine, other)]
        assert leaves[0] == leaves[1]
        if isinstance(mine, PackedEntries):
            assert (mine.whole, mine.bytes, mine.form) == (other.whole, other.bytes, other.form)
            for pack, like in zip(mine.packs, other.packs, strict=True):
                assert torch.equal(unpacked(pack.keys[0]), unpacked(like.keys[0]))
                assert torch.equal(unpacked(pack.values[0]), unpacked(like.values[0]))


@pytest.mark.parametrize(
    "spec",
    ["zipvl", "sink:4+snapkv:16", "keyformer:16", "random:0.4", "streamingvlm:30", *APART],
)
def test_a_policy_that_knows_layers_apart_gets_one_after_the_other(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(KVStage, "end_together")
    assert rows_of(spec, 3)[0]


@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_vl"])
def test_signals_of_chunks_are_those_of_a_prompt_in_one_piece(family: str) -> None:
    """Frames, queries before RoPE, depth and output projections reach a policy in the engine."""
    media = clip(3, 4) if family in CLIPS else image(3)
    requests = [ask(str(i), media, "so what is it then?", cache=s) for i, s in enumerate(APART)]
    expected = [alone(family, request) for request in requests]
    made = engine(family)
    try:
        assert [text for text, _ in answers(made, requests)] == expected
    finally:
        made.close()


def test_the_trace_tells_what_the_specs_did() -> None:
    made = engine("llava_onevision")
    options = {"reduce": "fastv@llm1:0.5", "cache": "snapkv:12"}
    try:
        ((_, end),) = answers(made, [ask("a", image(1), "what is it?", **options)])
    finally:
        made.close()
    assert isinstance(end, Finish)
    rows = {row["stage"]: row for row in end.trace["rows"]}
    assert rows["llm1"]["tokens_out"] == rows["llm1"]["tokens_in"] // 2
    assert rows["kv"]["tokens_out"] == 12
    assert end.trace["kept_tokens"] == end.trace["visual_tokens"] // 2


@pytest.mark.parametrize("spec", ["snapkv:8", "sink:4+window:16", "fastv@llm1:0.25"])
def test_a_shortened_row_takes_less_memory(spec: str) -> None:
    """Behind its prompt an answer takes the memory of what is left, and reserves no more."""

    def held(reduce: str, cache: str) -> int:
        made = engine("llava_onevision", memory="20MB")
        try:
            options = {"reduce": reduce, "cache": cache}
            question = ask("a", clip(1, 8), "what?", tokens=64, **options)
            ear = Ear(made, question)
            ear.next()
            ear.next()
            found = made._runner.nbytes
            assert found <= made._runner.worst() * made._runner.per_token
            ear.wait()
        finally:
            made.close()
        return found

    short = held(spec, "") if "@" in spec else held("", spec)
    assert short <= 0.75 * held("", "")


def test_a_spec_that_does_not_fit_the_prompt_fails_alone() -> None:
    made = engine("llava_onevision")
    wrong = ask("a", image(1), "what?", reduce="fastv@llm1:9999", cache="")
    right = ask("b", image(2), "what?", reduce="fastv@llm1:0.5", tokens=9)
    try:
        (_, failed), (text, end) = answers(made, [wrong, right])
    finally:
        made.close()
    assert isinstance(failed, Failure) and failed.status == 400
    assert isinstance(end, Finish) and text == alone("llava_onevision", right)


def test_cuts_are_those_of_attach_and_one_that_needs_angles_is_read_there() -> None:
    made = engine("llava_onevision")
    specs = ["dart@llm2:0.4", "sparsevlm:0.3", "prunevid_inner:0.3", "framefusion@llm1:0.4"]
    specs += ["ivc_prune:0.5", "quicksilver:0.4?fuse=0.9", "quicksilver?drift=1.0&fuse=0.9"]
    specs += ["divprune:0.5+quicksilver:0.4", "quicksilver:0.4?tokens=all", "catp_inner:0.4"]
    requests = [ask(str(i), image(i), "what?", reduce=s, tokens=9) for i, s in enumerate(specs)]
    try:
        found = answers(made, requests)
    finally:
        made.close()
    for request, (text, end) in zip(requests, found, strict=True):
        assert isinstance(end, Finish) and text == alone("llava_onevision", request)


@pytest.mark.slow
def test_every_policy_at_once_answers_as_alone() -> None:
    """All policies of KV memory at their usual budgets, in one engine.

    Those whose entries lie in host memory are refused, as test_served_policies.py shows, and the
    model here has no patterns of heads for `qfilter` and `duo_attention`, and no gates.
    """
    family, made = "llava_onevision", engine("llava_onevision", queue=64)
    host, patterns = {"specache", "slimfer", "sentencekv"}, {"qfilter", "duo_attention"}
    left_out = host | patterns | {"fastkvzip"}
    specs = [method.example for method in methods("cache") if method.name not in left_out]
    requests = [ask(str(i), clip(i, 4), "what?", cache=s, tokens=9) for i, s in enumerate(specs)]
    try:
        found = answers(made, requests)
    finally:
        made.close()
    assert len(found) == len(specs) >= 38
    for request, (text, end) in zip(requests, found, strict=True):
        assert isinstance(end, Finish), (request.options, end)
        assert text == alone(family, request), request.options


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("kind", ["eager", "flash"])
def test_other_attention_functions_run_in_the_lane(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager attention knows no causality of its own, flash attention takes no mask of rows."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import AttentionInterface

    def flash(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        assert mask is None and q.shape[2] > 1 and options.get("position_ids") is None
        n, size = q.shape[2], k.shape[2]
        seen = torch.ones(n, size, dtype=torch.bool).tril(size - n)[None, None]
        return sdpa_attention_forward(module, q, k, v, seen, scaling=options["scaling"])

    family = "qwen2_5_vl"
    requests = requests_of(family, random.Random(3), 6)
    expected = [alone(family, request) for request in requests]
    text = model_of(family)[0].get_decoder().config
    name = "eager" if kind == "eager" else "flash_attention_of_a_test"
    AttentionInterface.register("flash_attention_of_a_test", flash)
    monkeypatch.setattr(text, "_attn_implementation", name)
    made = engine(family)
    try:
        found = answers(made, requests)
    finally:
        made.close()
        AttentionInterface._global_mapping.pop("flash_attention_of_a_test", None)
    assert [text for text, _ in found] == expected


# --- planted faults: the comparison must see them -----------------------------------------------


def _agree(requests: list[Request]) -> bool:
    expected = [alone("llava_onevision", request) for request in requests]
    made = engine("llava_onevision")
    try:
        return [text for text, _ in answers(made, requests)] == expected
    finally:
        made.close()


def _asked(**options: str) -> list[Request]:
    return [
        ask(str(i), image(i), clip(i), "what is it? " * (i + 2), tokens=30, **options)
        for i in range(4)
    ]


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("spec", ["zipvl", "quest:0.2?page=4&skip=0"])
def test_a_pass_that_fails_costs_running_answers_no_token(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoding step inside a pass of prefill is done again alone; a broken prompt fails alone."""
    family, fused = "llava_onevision", list[int]()
    caches = ["", "snapkv:16", "sink:4+window:24", "quant:8?residual=8", "retrieve:2"]
    requests = [ask(c, image(1), "what is it?", tokens=90, cache=c) for c in caches]
    own = ask("own", image(1), "what is it?", tokens=90, cache=spec)
    expected = [alone(family, request) for request in requests]
    made = engine(family)
    prefiller, run = made._runner.batch.prefiller, made._runner.batch.prefiller._run  # type: ignore[union-attr]

    def failing(plan: Any, decoder: Any) -> Any:
        found = run(plan, decoder) if plan[0][0].prompt.length < 400 else None
        if found is None:
            if decoder is not None:
                fused.append(len(decoder))
                decoder.begin()
            raise RuntimeError("no memory for so long a prompt")
        return found

    monkeypatch.setattr(prefiller, "_run", failing)
    try:
        *ears, lost = [Ear(made, request) for request in (*requests, own)]
        for ear in (*ears, lost):
            ear.next()
        broken = Ear(made, ask("long", "x" * 500, tokens=4)).wait()
        for request, ear, text in zip(requests, ears, expected, strict=True):
            assert isinstance(ear.wait(), Finish), request.options
            assert ear.text == text, request.options
    finally:
        made.close()
    for end in (broken, lost.wait()):  # a cache that is its policy's own has taken the token
        assert isinstance(end, Failure) and "RuntimeError" in end.message
    assert fused and max(fused) > 1


@pytest.mark.parametrize("spec", ["gemfilter:0.4?tokens=text", "fastkv:0.3?tokens=all"])
def test_stages_of_text_act_as_under_attach(spec: str) -> None:
    """Without any medium, too; positions of the answer go on behind those that are counted anew."""
    words, specs = "what is it, and why? " * 6, (spec, spec, f"divprune:0.5+{spec}")
    asked = [((image(1), words), specs[0]), ((words,), specs[1]), ((image(2), words), specs[2])]
    requests = [
        ask(str(i), *parts, tokens=12, reduce=each) for i, (parts, each) in enumerate(asked)
    ]
    expected = [alone("llava_onevision", request) for request in requests]
    plain = [stock(model_of("llava_onevision"), request) for request in requests]
    made = engine("llava_onevision")
    try:
        found = answers(made, requests)
    finally:
        made.close()
    assert [text for text, _ in found] == expected and expected != plain


@pytest.mark.parametrize("decode", [None, "recycle"])
def test_a_policy_that_fails_at_a_step_costs_its_own_answer_alone(
    decode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside others whose caches are their policies' own, and beside drafts."""
    caches = ["quest:0.2?page=4&skip=0", "", "tidaldecode:0.2?skip=0", "quant:8?residual=8"]
    family, choose, steps = "llava_onevision", EarlierLayers.choose, list[int]()
    requests = [ask(c or "plain", image(1), "what?", tokens=12, cache=c) for c in caches]
    requests[1] = ask("plain", image(1), "what?", tokens=12, decode=decode)
    expected = [alone(family, request) for request in requests]

    def failing(method: EarlierLayers, step: Any) -> Any:
        steps.append(step.n)
        if len(steps) > 9:
            raise IndexError("out of range")
        return choose(method, step)

    monkeypatch.setattr(EarlierLayers, "choose", failing)
    made = engine(family)
    try:
        found = answers(made, requests)
        assert made._runner.nbytes == 0
        store = made._runner.batch.decoder.store  # type: ignore[union-attr]
        assert not store.failed and not store.rows
    finally:
        made.close()
    _, lost = found.pop(2)
    assert isinstance(lost, Failure) and "IndexError" in lost.message and len(steps) == 10
    assert [text for text, _ in found] == [*expected[:2], expected[3]]


def test_tokens_of_another_answer_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _agree(_asked(cache="sink:4+window:24"))
    monkeypatch.setattr(AnswerRows, "attend_flat", _rolled(AnswerRows.attend_flat))
    assert not _agree(_asked(cache="sink:4+window:24"))


def _rolled(attend: Any) -> Any:
    return lambda *given: attend(*given).roll(1, 1)


def test_a_ring_that_loses_the_wrong_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def newest(self: Slots, *given: Any) -> None:
        if self.leaving is not None and self.leaving(len(self.order)):
            self.order.reverse()
        advance(self, *given)

    advance = Slots.advance
    assert _agree(_asked(cache="sink:4+window:24"))
    monkeypatch.setattr(Slots, "advance", newest)
    assert not _agree(_asked(cache="sink:4+window:24"))


@pytest.mark.parametrize("seed", range(5))
def test_places_that_change_step_by_step_hide_what_places_made_anew_hide(seed: int) -> None:
    """Rows grow, lose entries of their window, and pack their first ones at random times."""
    rng, like = random.Random(seed), torch.zeros(1)
    block = KVBlock((torch.zeros(1, 0, 2),), (torch.zeros(1, 0, 2),))
    entries = [
        Entries(block, 90, beyond(rng.randrange(3, 9)) if i == 1 else None) for i in (0, 1, 2)
    ]
    rows = [Slots(i, rng.randrange(2, 12), part) for i, part in enumerate(entries)]
    kept = Places(rows, len(rows), like)
    for _ in range(60):
        for row in rows:
            if row.leaving is None and rng.random() < 0.2:
                row.length -= rng.randrange(row.length)
            row.advance()
        kept.advance()
        anew = Places(rows, len(rows), like)
        anew.advance()
        seen = torch.zeros(len(rows), kept.stop)
        for place, row in zip(seen, rows, strict=True):
            place[[*row.free, *range(row.length, kept.stop)]] = torch.finfo(like.dtype).min
        for mask in (kept.mask, anew.mask):
            assert torch.equal(seen if mask is None else mask[:, 0, 0], seen)


def test_packed_rows_hold_no_prompt_in_full_precision() -> None:
    held = AnswerRows(1)
    keys = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0))
    block = KVBlock((keys[:, 30:],), (keys[:, 30:],))  # recent entries, a view of all
    part = PackedEntries(block, 20, packs=(), store=None, form=(4, 8), whole=60, bytes=0)
    held.add(AnswerRow([part]))
    assert part.keys.untyped_storage().nbytes() == 0 == part.values.untyped_storage().nbytes()


@pytest.mark.parametrize("spec", ["h2o:20", "keydiff:0.4?every=3"])
def test_what_is_known_of_media_goes_with_the_prompt(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive, seen = KVStage.arrive, list[weakref.ref[Any]]()

    def noted(
        stage: KVStage, cache: Any, index: int, sequences: Any, *given: Any, **more: Any
    ) -> None:
        seen.append(weakref.ref(sequences))
        arrive(stage, cache, index, sequences, *given, **more)

    monkeypatch.setattr(KVStage, "arrive", noted)
    parts, _ = rows_of(spec, 3)
    gc.collect()
    assert parts and seen and all(each() is None for each in seen)


def test_packs_of_another_row_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(self: PackedBucket, attention: Any, query: Any, both: Any) -> Any:
        if len(query) > 1 and self._sides:
            for side in self._sides:
                side.parts = [part.roll(1, 0) for part in side.parts]
        return attend(self, attention, query, both)

    attend = PackedBucket.attend
    assert _agree(_asked(cache="quant:8?residual=8"))
    monkeypatch.setattr(PackedBucket, "attend", mixed)
    assert not _agree(_asked(cache="quant:8?residual=8"))


def test_a_prompt_that_is_not_cut_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.serve.engine.policies import PromptPolicy

    assert _agree(_asked(reduce="fastv@llm1:0.25"))
    monkeypatch.setattr(PromptPolicy, "cut", lambda self, layer, hidden, *rest: [])
    assert not _agree(_asked(reduce="fastv@llm1:0.25"))
