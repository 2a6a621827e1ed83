"""An early exit that drafts in the batch: the plain text, its own words as drafts, no rests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from engine_requests import eventually
from scheduling import (
    Ear,
    answers,
    ask,
    clip,
    comings_and_goings,
    image,
    model_of,
    promised_bytes,
    stock,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mmfast.compressors.base import save
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.core.kv import KVBlock
from mmfast.models.decoder.early_exit import ExitAdapter, new_adapter, read_exit
from mmfast.models.loading import twin_model
from mmfast.serve.engine.base import Finish, Request, SamplingOptions
from mmfast.serve.engine.decode import Chooser, DecodeBatch
from mmfast.serve.engine.drafts import BatchDrafts
from mmfast.serve.engine.kv.bucket import Entries, beyond
from mmfast.serve.engine.kv.rows import AnswerRow, AnswerRows
from mmfast.serve.engine.lane import AttentionCall
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.serve.engine.second_model import EarlyExit

ONEVISION, FIXED = "llava_onevision", "adapt=false&least=0&most=3"


def layers(family: str = ONEVISION) -> int:
    """Layers of a model."""
    return int(model_of(family)[0].config.get_text_config().num_hidden_layers)


@cache
def file(family: str, random_weights: bool) -> Path:
    """An adapter in front of the last layer; an untrained one adds nothing to the states."""
    torch.manual_seed(2)
    adapter = new_adapter(model_of(family)[0], layers(family) - 1)
    if random_weights:
        for part in (adapter.query, adapter.key, adapter.value, adapter.out):
            torch.nn.init.normal_(part.weight, std=0.5)  # what it has read matters
    where = Path(mkdtemp(prefix="mmfast-exit-")) / "exit.safetensors"
    save(adapter, where)
    return where


def spec_of(family: str = ONEVISION, random_weights: bool = True, knobs: str = FIXED) -> str:
    """A spec of fixed drafts."""
    return f"exit:{file(family, random_weights)}?{knobs}"


@cache
def shallow() -> tuple[Any, Any]:
    """A model whose last layer adds nothing: what an untrained exit in front of it says stands."""
    model, processor = model_of(ONEVISION)
    made = twin_model(model)
    last = made.get_decoder().layers[-1]
    for module in (last.self_attn.o_proj, last.mlp.down_proj):
        module.weight = torch.nn.Parameter(torch.zeros_like(module.weight))
        if module.bias is not None:
            module.bias = torch.nn.Parameter(torch.zeros_like(module.bias))
    return made, processor


@contextmanager
def engine(decode: str, pair: tuple[Any, Any] | None = None, **options: Any) -> Iterator[Scheduler]:
    options = {"chunk": 96, "memory": "200MB", "decode": decode, **options}
    made = Scheduler(pair or model_of(ONEVISION), **options)
    try:
        yield made
    finally:
        made.close()


def exit_of(made: Scheduler) -> EarlyExit:
    (found,) = made._runner.seconds.values()
    assert isinstance(found, EarlyExit)
    return found


def mixed(decode: str | None = None, tokens: int = 32) -> list[Request]:
    """Media and text of all lengths; with the exit, with none, and with other drafts."""
    parts = [(image(1), "what?"), ("a b c a b c " * 20,), (clip(1), "and?"), ("why?",)]
    specs = [decode, decode, decode, "none", "recycle?adapt=false", "none"]
    parts += [(image(2), "who? who?"), ("b c " * 9,)]
    found = [
        ask(f"{i}", *mine, tokens=tokens - 4 * i, decode=spec)
        for i, (mine, spec) in enumerate(zip(parts, specs, strict=True))
    ]
    for i, policy in enumerate(("sink:4+window:24", "quant:8?residual=8", "h2o:20")):
        # rows that are full at once, packed from time to time, or chosen at each step
        other = replace(found[5].options, cache=policy)
        found.append(replace(found[5], id=f"{6 + i}", options=other))
    return found


def counts(end: Any) -> tuple[int, int] | None:
    """Drafts proposed and accepted."""
    assert isinstance(end, Finish), end
    rows = [row for row in end.trace["rows"] if row["stage"] == "draft"]
    return (rows[0]["tokens_in"], rows[0]["tokens_out"]) if rows else None


def empty(made: Scheduler) -> bool:
    """Nothing is held of any request."""
    own = exit_of(made)
    return not (own.rows or own.store.rows or own.nbytes or made._runner.nbytes)


def plain(requests: list[Request]) -> list[str]:
    """Texts without drafts."""
    without = [replace(each, options=replace(each.options, decode=None)) for each in requests]
    with engine("none") as made:
        return [text for text, _ in answers(made, without)]


def test_text_is_that_without_drafts_beside_answers_that_have_none() -> None:
    requests = mixed()
    texts = plain(requests)
    assert texts[:6] == [stock(model_of(ONEVISION), each) for each in requests[:6]]
    with engine(spec_of()) as made:
        found = answers(made, requests)
        assert [text for text, _ in found] == texts
        assert [counts(end) is None for _, end in found] == [0, 0, 0, 1, 0, 1, 1, 1, 1]
        made_in_all = [counts(end) for _, end in found[:3]]
        assert all(both and both[0] > both[1] for both in made_in_all)
        assert empty(made)
        again = answers(made, [replace(each, id=f"again{each.id}") for each in requests])
        assert [text for text, _ in again] == texts  # behind beginnings that are known
        assert again[1][1].cached_tokens > 0 and counts(again[1][1])[0] > 0  # type: ignore[index, union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_text_of_models_with_other_positions_and_planes(family: str) -> None:
    requests = mixed()[:5]
    with engine(spec_of(family), model_of(family)) as made:
        found = answers(made, requests)
        for request, (text, end) in zip(requests, found, strict=True):
            assert text == stock(model_of(family), request)
            assert (counts(end) is None) == (request.options.decode == "none")
        assert empty(made)


def test_what_an_exit_says_that_is_the_model_all_stands() -> None:
    """Positions, rows and what the adapter takes in front of the head are right at all lengths."""
    pair = shallow()
    with engine(spec_of(ONEVISION, False), pair) as made:
        requests = mixed()[:3]
        for request, (text, end) in zip(requests, answers(made, requests), strict=True):
            assert text == stock(pair, request)
            proposed, accepted = counts(end) or (1, 0)
            assert proposed == accepted > 10
            assert end.completion_tokens == request.sampling.max_tokens  # type: ignore[union-attr]


def proposals(patch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], Any]]:
    """What was said, what was drafted behind it, and the key, at each step of a batch."""
    found: list[tuple[list[int], list[int], Any]] = []
    propose = BatchDrafts.propose

    def noted(self: BatchDrafts, rows: Any) -> None:
        propose(self, rows)
        drafting = [row for row in rows if row.drafts is not None and row.own.tokens]
        found.extend(([*row.own.said], [*row.own.tokens], row.key) for row in drafting)

    patch.setattr(BatchDrafts, "propose", noted)
    return found


def spoken(ids: list[int], count: int) -> list[int]:
    """What the exit would say, with the model and the adapter read anew without a cache."""
    model, adapter = model_of(ONEVISION)[0], read_exit(file(ONEVISION, True))
    blocked, start = Chooser(model)._blocked, len(ids)
    for _ in range(count):
        with torch.inference_mode():
            given = torch.tensor([ids])
            out = model(input_ids=given, use_cache=False, output_hidden_states=True)
            states, _ = adapter(out.hidden_states[adapter.layer])
            logits = model.get_output_embeddings()(states[0, -1])
            logits[blocked] = -torch.inf
        ids = [*ids, int(logits.argmax())]
    return ids[start:]


def checked(made: Scheduler, found: list[tuple[list[int], list[int], Any]]) -> bool:
    """Drafts for texts are the words of the exit, whatever stood and fell before."""
    texts = {"t": "a b c a b c " * 20, "u": "who? " * 3}
    asked = [ask(name, text, tokens=14 + len(name)) for name, text in texts.items()]
    prompts = {
        each.id: made._runner.encoder.prepare(each).inputs["input_ids"][0].tolist()
        for each in asked
    }
    answers(made, [*asked, ask("v", image(3), "what?", tokens=9, decode="none")])
    assert len({len(said) for said, _, _ in found}) > 5 and {key for *_, key in found} == {*texts}
    return all(tokens == spoken([*prompts[key], *said], len(tokens)) for said, tokens, key in found)


def test_drafts_are_the_words_of_the_exit_behind_what_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine(spec_of()) as made:
        assert checked(made, proposals(monkeypatch))
    settle = EarlyExit.settle

    def kept(self: EarlyExit, kept: dict[Any, int]) -> None:
        """Planted: a draft that fell stays with the adapter."""
        settle(self, kept)
        for (slots,) in self.store._slots:
            slots.length += slots.length < slots.most

    monkeypatch.setattr(EarlyExit, "settle", kept)
    with engine(spec_of()) as made:
        assert not checked(made, proposals(monkeypatch))


def test_drafts_that_stay_in_the_rows_of_answers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = mixed()[:3]
    texts = plain(requests)

    @contextmanager
    def stay(self: AnswerRows) -> Iterator[None]:
        """Planted: what drafts have read is not taken out again."""
        for slots in [each for mine in self._slots for each in mine]:
            slots.advance(0)
        yield

    monkeypatch.setattr(AnswerRows, "lent", stay)
    with engine(spec_of(), memory="400MB") as made:
        ends = [ear for ear in (Ear(made, each) for each in requests) if ear.wait()]
        assert [ear.text for ear in ends] != texts


def test_wrong_drafts_change_no_text_and_a_lenient_verifier_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = ask("a", image(1), "what?", tokens=20)
    text = stock(model_of(ONEVISION), request)
    monkeypatch.setattr(Chooser, "guess", lambda self, logits, rows: [7] * len(rows))
    with engine(spec_of()) as made:
        ((found, end),) = answers(made, [request])
        assert found == text and counts(end)[0] > 5 and counts(end)[1] == 0  # type: ignore[index]
        choose = DecodeBatch._chosen

        def lenient(self: DecodeBatch, rows: Any, logits: Any) -> list[Any]:
            drafted = rows[0].drafts is not None and rows[0].own.tokens
            found = choose(self, rows, logits)
            if drafted:
                found[0] = rows[0].token = 7
            return found

        monkeypatch.setattr(DecodeBatch, "_chosen", lenient)
        ((found, end),) = answers(made, [replace(request, id="b")])
        assert found != text and counts(end)[1] > 0  # type: ignore[index]


def test_drawn_text_penalties_and_grammars_are_those_without_drafts() -> None:
    ways: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.9, "seed": 5},
        {"temperature": 1.3, "seed": 2},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"logprobs": 2, "logit_bias": ((5, 2.0),)},
        {"grammar": "start: /[a-d]{18}/"},
    ]
    pair = shallow()

    def asked(name: str, spec: str | None) -> list[Request]:
        return [
            replace(
                ask(
                    f"{name}{i}",
                    *((image(i),) if i % 2 else ()),
                    "what? " * (1 + 5 * i),
                    decode=spec,
                ),
                sampling=SamplingOptions(max_tokens=18 - i, **way),
            )
            for i, way in enumerate(ways)
        ]

    with engine(spec_of(ONEVISION, False), pair) as made:
        texts = [text for text, _ in answers(made, asked("p", "none"))]
        found = answers(made, asked("d", None))
        assert [text for text, _ in found] == texts and len(set(texts)) == len(ways)
        # the exit, which is the model here, draws by the same number
        assert all((both := counts(end)) and both[0] == both[1] > 0 for _, end in found[:2])
        assert empty(made)


def test_who_leaves_takes_the_rows_of_the_adapter_along() -> None:
    with engine(spec_of(), slots=2) as made:
        ears = [Ear(made, ask(f"{i}", image(i), "what?", tokens=200)) for i in range(2)]
        eventually(lambda: len(exit_of(made).rows) == 2)
        made.cancel("0")
        ears[0].wait()
        eventually(lambda: [row.key for row in exit_of(made).rows] == ["1"])
        assert isinstance(ears[1].wait(), Finish)
        assert ears[1].text == stock(model_of(ONEVISION), ask("1", image(1), "what?", tokens=200))
        eventually(lambda: empty(made))
    for name in ("c", "d"):  # one that is paused goes on, or leaves
        with engine(spec_of(), slots=1) as made:
            long = replace(ask(name, image(1), "what?", tokens=60), priority=0)
            ear = Ear(made, long)
            eventually(lambda: bool(exit_of(made).rows))
            urgent = Ear(made, replace(ask("b", image(2), "and?", tokens=5), priority=5))
            urgent.next()
            if name == "d":
                made.cancel(name)
            assert isinstance(urgent.wait(), Finish)
            assert isinstance(ear.wait(), Finish) == (name == "c")
            assert name == "d" or ear.text == stock(model_of(ONEVISION), long)
            eventually(lambda: empty(made))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_who_comes_and_goes_at_random_changes_no_text(seed: int) -> None:
    """Knobs, lengths, priorities, and moments of coming and leaving are random."""
    rng = random.Random(seed)
    with engine(spec_of(), slots=3) as made:

        def some() -> Iterator[Request]:
            for number in range(12):
                spec = spec_of(
                    knobs=f"most={rng.choice([1, 2, 5])}{rng.choice(['', '&adapt=0&least=0'])}"
                )
                parts = rng.choice([(image(number), "what?"), ("a b " * rng.randrange(1, 30),)])
                decode = rng.choice([spec, spec, "none", "recycle", "self:0.2?adapt=0&least=0"])
                more = {"tokens": rng.randrange(1, 40), "priority": rng.randrange(3)}
                yield ask(f"{number}", *parts, decode=decode, **more)

        comings_and_goings(made, rng, some(), model_of(ONEVISION))
        eventually(lambda: empty(made))


def test_an_exit_that_fails_lets_answers_go_on_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = mixed()[:3]
    mixing, calls = ExitAdapter.mixed, [0]

    def broken(self: ExitAdapter, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 8:
            raise RuntimeError("no memory")
        return mixing(self, *given)

    monkeypatch.setattr(ExitAdapter, "mixed", broken)
    with engine(spec_of()) as made:
        found = answers(made, requests)
        assert [text for text, _ in found] == [stock(model_of(ONEVISION), r) for r in requests]
        notes = [note for _, end in found for note in end.trace.get("notes", ())]  # type: ignore[union-attr]
        assert notes and all("drafted no longer: RuntimeError" in note for note in notes)
        assert empty(made)


def test_its_rows_are_in_the_memory_that_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    found = promised_bytes(monkeypatch)
    with engine(spec_of(), slots=5) as made:
        answers(made, [ask(f"{i}", image(i), "what?", tokens=200) for i in range(5)])
        assert found and all(0.95 * held <= most for held, most in found)
        assert max(held for held, _ in found) > 0.3 * max(most for _, most in found)
        own, batch = exit_of(made), made._runner.batch
        assert batch is not None and own.per_token == 2 * own.lane.exit.config["width"] * 4  # type: ignore[union-attr]
    most = 1500 * (own.per_token + batch.per_token)
    with (
        engine(spec_of(), memory=most) as made,
        pytest.raises(MmfastError, match="bytes of keys and values"),
    ):
        Ear(made, ask("a", "a", tokens=1900))


def test_what_no_server_drafts_is_refused_in_one_line(tmp_path: Path) -> None:
    other = tmp_path / "exit.safetensors"
    save(new_adapter(model_of(ONEVISION)[0], 1), other)
    with engine(spec_of()) as made:
        for request, said in (
            (ask("a", "what?", decode=f"exit:{other}"), "by an adapter, and this server was not"),
            (ask("a", "what?", reduce="evs:0.5"), "whole cache of its first layers"),
            (ask("a", "what?", cache="snapkv:16"), "whole cache of its first layers"),
        ):
            with pytest.raises(MmfastError, match=said) as error:
                Ear(made, request)
            assert "\n" not in str(error.value)
        ((_, end),) = answers(made, [ask("b", "what?", reduce="evs:0.5", decode="none")])
        assert counts(end) is None
    with pytest.raises(ModelError, match="names no file"):
        Scheduler(model_of(ONEVISION), decode=f"exit:{tmp_path}/none")
    windows = model_of("gemma3")
    save(new_adapter(windows[0], 1), other)
    with pytest.raises(SpecError, match=r"Gemma3.* has windows; use decode='recycle'"):
        Scheduler(windows, decode=f"exit:{other}")


def test_rows_that_read_nothing_stay_as_they_are() -> None:
    """One whose window is full has no place to spare, and lies beside one that reads two tokens."""
    store, noise = AnswerRows(1), torch.Generator().manual_seed(0)

    def entries(count: int, leaving: Any = None) -> Entries:
        pair = torch.randn(2, 1, count, 2, generator=noise)
        return Entries(KVBlock((pair[0],), (pair[1],)), 64, leaving)

    store.add(AnswerRow([entries(63, beyond(64))]))
    store.add(AnswerRow([entries(5)]))
    call = AttentionCall(torch.nn.Module(), sdpa_attention_forward, "sdpa", (), {})
    store.advance([1, 1])
    store.attend_flat(0, call, *torch.randn(3, 1, 1, 2, 2, generator=noise))
    (bucket,) = store.layers[0].buckets.values()
    assert bucket.own.data is not None
    held, slots = bucket.own.data.clone(), [(s.length, [*s.order], [*s.free]) for s in bucket.rows]
    assert held.shape[3] == slots[0][0] == 64
    with store.lent():
        store.advance([0, 2], further=True)
        query, key, value = torch.randn(3, 1, 1, 2, 2, generator=noise)
        found = store.attend_flat(0, call, query, key, value)[0, :, 0]
    pairs = zip(held[:, 1, 0, :6], (key[0, 0], value[0, 0]), strict=True)
    keys, values = (torch.cat(both) for both in pairs)
    for i in range(2):
        weights = (keys[: 7 + i] @ query[0, 0, i] / 2**0.5).softmax(0)
        torch.testing.assert_close(found[i], weights @ values[: 7 + i])
    assert torch.equal(bucket.own.data[:, 0], held[:, 0])
    assert [(s.length, s.order, s.free) for s in bucket.rows] == slots
