"""Drafts in the batch: answers are those of stock generate, beside others without drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from scheduling import EMBEDDED, Ear, answers, ask, image, model_of, promised_bytes, stock

from mmfast.attach import attach
from mmfast.core.errors import MmfastError
from mmfast.core.kv import KVBlock
from mmfast.serve.engine.base import Delta, Finish, Request, SamplingOptions
from mmfast.serve.engine.drafts import BatchDrafts
from mmfast.serve.engine.kv.bucket import Entries, Slots, beyond
from mmfast.serve.engine.kv.rows import AnswerRows
from mmfast.serve.engine.scheduler import Scheduler

SPECS = ["lookup?adapt=false", "recycle?adapt=false&most=3", "self:0.2?adapt=false&least=0&most=4"]
FAMILIES = ["llava_onevision", "qwen2_5_vl", "qwen3_vl", "gemma3", EMBEDDED]


@contextmanager
def engine(family: str, **options: Any) -> Iterator[Scheduler]:
    """A scheduler of small chunks, closed at the end."""
    made = Scheduler(model_of(family), **{"chunk": 48, "memory": "200MB", **options})
    try:
        yield made
    finally:
        made.close()


def mixed(tokens: int = 24) -> list[Request]:
    """Each spec, and none, on media and on text."""
    found = []
    for number, spec in enumerate([*SPECS, None, *SPECS, None]):
        parts: list[Any] = [image(number), "what? what? what?"]
        if number > 3:
            parts = ["a b c a b c " * 4]
        found.append(ask(f"{number}", *parts, tokens=tokens + number, decode=spec))
    return found


def drafts(end: Any) -> tuple[int, int] | None:
    """Drafts proposed and accepted."""
    assert isinstance(end, Finish), end
    rows = [row for row in end.trace["rows"] if row["stage"] == "draft"]
    return (rows[0]["tokens_in"], rows[0]["tokens_out"]) if rows else None


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES[1:])]
)
def test_answers_with_drafts_are_those_of_stock_generate(family: str) -> None:
    """Windows, M-RoPE, DeepStack; long and short rows, with drafts and without."""
    requests = mixed() if family != FAMILIES[0] else mixed(8)[:4]
    with engine(family) as made:
        found = answers(made, requests)
        for request, (text, end) in zip(requests, found, strict=True):
            assert text == stock(model_of(family), request), request.options.decode
            counts = drafts(end)
            assert (counts is None) == (request.options.decode is None)
            if str(request.options.decode).startswith("self") and request.id != "6":
                assert counts and counts[0] > 0
        assert made._runner.nbytes == 0
        made_in_all = [drafts(end) for _, end in found]
    assert sum(counts[1] for counts in made_in_all if counts) > 0 or family == EMBEDDED


def ahead(self: BatchDrafts, rows: Any) -> None:
    """Draft the same wrong token for every answer."""
    for row in rows:
        if row.drafts is not None:
            row.drafts.tokens = [7] * max(0, min(3, row.sampling.max_tokens - row.step - 1))


def test_a_draft_that_stands_although_it_was_not_chosen_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wrong drafts all fall; where their keys stay in the row, other answers are likely."""
    sampling = SamplingOptions(max_tokens=10, logprobs=1)
    plain = replace(ask("a", image(1), "what?"), sampling=sampling)
    request = replace(ask("b", image(1), "what?", decode="lookup?adapt=false"), sampling=sampling)
    monkeypatch.setattr(BatchDrafts, "propose", ahead)
    with engine(FAMILIES[0]) as made:
        ears = [Ear(made, each) for each in (plain, request)]
        ends = [ear.wait() for ear in ears]
        assert drafts(ends[1]) is not None and drafts(ends[1])[1] == 0  # type: ignore[index]
        assert chances(ears[1]) == pytest.approx(chances(ears[0]), abs=1e-4)
        monkeypatch.setattr(AnswerRows, "settle", lambda *_: None)
        ears.append(Ear(made, replace(request, id="c")))
        ears[2].wait()
        assert chances(ears[2]) != pytest.approx(chances(ears[0]), abs=1e-4)


TREE = "recycle?adapt=false&most=4&tree=12&width=4"


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES[1:4])]
)
def test_trees_of_candidates_change_no_text(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside chains and none; on windows the same spec drafts chains. A path moves together."""
    settle, branches = AnswerRows.settle, list[bool]()

    def noted(self: AnswerRows, number: int, kept: int, path: Any = None) -> None:
        if path is not None:
            branches.append(list(path) != list(range(len(path))))
        settle(self, number, kept, path)

    monkeypatch.setattr(AnswerRows, "settle", noted)
    sampling = SamplingOptions(max_tokens=30, temperature=0.7, seed=2)
    drawn = [replace(ask(f"d{i}", "a b a c a b d a " * 3), sampling=sampling) for i in range(2)]
    texts = ["a b a c a b d a " * 4, "a b a c a b d a e " * 3]
    asked = [ask(f"t{i}", each, tokens=40) for i, each in enumerate(texts)]
    requests = [*asked, ask("i", image(1), "a b a c a b d a?", tokens=30), *drawn]

    def under(spec: str, name: str) -> list[Request]:
        specs = [spec, spec, spec, spec, "none"]
        return [
            replace(each, id=f"{name}{each.id}", options=replace(each.options, decode=own))
            for each, own in zip(requests, specs, strict=True)
        ]

    with engine(family) as made:
        plain = [text for text, _ in answers(made, under("none", "p"))]
        assert plain[:3] == [stock(model_of(family), each) for each in requests[:3]]
        chains = [*under("recycle?adapt=false", "c")[:2], *under(TREE, "a")[2:]]
        for name, mine in (("t", under(TREE, "t")), ("u", under(TREE, "u")), ("c", chains)):
            assert [text for text, _ in answers(made, mine)] == plain, name
        assert any(branches) or family == "gemma3"
        assert made._runner.nbytes == 0
        if family != FAMILIES[0]:
            return
        # planted: what stands stays where it was read
        monkeypatch.setattr(AnswerRows, "settle", lambda s, n, kept, path=None: settle(s, n, kept))
        found = [text for text, _ in answers(made, under(TREE, "w"))]
        assert found != plain


@pytest.mark.slow
def test_drawn_tokens_rules_and_stops_are_those_without_drafts() -> None:
    """Draws, penalties, log-probabilities, stop strings and least tokens, in one batch."""
    ways: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.9, "seed": 3},
        {"logprobs": 2},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"min_tokens": 5, "logit_bias": ((5, 2.0),)},
    ]

    def asked(spec: str | None, stop: str = "") -> list[Request]:
        found = []
        for number, way in enumerate(ways):
            sampling = SamplingOptions(max_tokens=14, stop=(stop,) if stop else (), **way)
            request = ask(f"{spec}{number}{stop}", image(1), "what?", decode=spec)
            found.append(replace(request, sampling=sampling))
        return found

    with engine(FAMILIES[0]) as made:
        plain = [Ear(made, each) for each in asked(None)]
        texts = [(ear.wait(), ear.text)[1] for ear in plain]
        stop = texts[1][4:6]
        cut = [(ear.wait(), ear.text)[1] for ear in [Ear(made, e) for e in asked(None, stop)]]
        for spec in SPECS[1:]:
            ears = [Ear(made, each) for each in [*asked(spec), *asked(spec, stop)]]
            ends = [ear.wait() for ear in ears]
            assert [ear.text for ear in ears] == [*texts, *cut]
            assert chances(ears[1]) == pytest.approx(chances(plain[1]), abs=1e-4)
            assert len(chances(ears[1])) == ends[1].completion_tokens  # type: ignore[union-attr]
            assert len(chances(ears[5])) <= ends[5].completion_tokens  # type: ignore[union-attr]


def chances(ear: Ear) -> list[float]:
    """Log-probabilities of the tokens that were sent."""
    found = [event.logprobs for event in ear.events if isinstance(event, Delta)]
    return [each.chance for mine in found for each in mine]


@pytest.mark.slow
def test_what_cannot_draft_is_refused_in_one_line() -> None:
    wrong = {
        "draft:x": "second prompt.*use 'self:0.1'",
        "self?reduce=evs:0.5": "second prompt",
        "bild:x": "second prompt",
        "exit:x": "by an adapter, and this server was not started for that",
        "lokup": "lookup",
        "self:0.1?score=none": "snapkv",
    }
    with engine(FAMILIES[0], decode="recycle") as made:
        for spec, said in wrong.items():
            with pytest.raises(MmfastError, match=said) as error:
                Ear(made, ask("a", image(1), "what?", decode=spec))
            assert "\n" not in str(error.value)
        for cache in ("h2o:20", "quant:8"):
            with pytest.raises(MmfastError, match="leave out decode="):
                Ear(made, ask("a", image(1), "what?", cache=cache))
        with pytest.raises(MmfastError, match="both choose behind a prompt"):
            Ear(made, ask("a", image(1), "what?", cache="snapkv:16", decode="self:0.1"))
        beside = ask("b", image(1), "what?", cache="h2o:20", decode="none")
        ((_, plain), (text, _)) = answers(made, [beside, ask("c", "a b a b a", tokens=9)])
        assert drafts(plain) is None
        assert text == stock(model_of(FAMILIES[0]), ask("c", "a b a b a", tokens=9))
    with pytest.raises(MmfastError, match="learns from what all"):
        Scheduler(model_of(FAMILIES[0]), decode="draft:x?learn=1e-4")
    with pytest.raises(MmfastError, match=r"takes drafts back.*Lfm2Vl"):
        Scheduler(model_of("lfm2_vl"), decode="recycle")


@pytest.mark.slow
def test_answers_that_are_cancelled_or_give_way_leave_nothing_behind() -> None:
    """A paused answer goes on with the part of its keys that it drafts on."""
    spec = SPECS[2]
    with engine(FAMILIES[0], slots=1) as made:
        long = replace(ask("a", image(1), "what?", tokens=20, decode=spec), priority=0)
        ear = Ear(made, long)
        ear.next()
        urgent = replace(ask("b", image(2), "and?", tokens=4, decode=spec), priority=5)
        first = Ear(made, urgent)
        assert isinstance(first.wait(), Finish) and isinstance(ear.wait(), Finish)
        assert ear.text == stock(model_of(FAMILIES[0]), long)
        gone = Ear(made, replace(long, id="c"))
        gone.next()
        made.cancel("c")
        gone.wait()
        batch = made._runner.batch
        assert batch is not None and not batch.decoder.drafts.views.rows
        assert made._runner.nbytes == 0


def test_rows_of_drafts_are_in_the_memory_that_is_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = promised_bytes(monkeypatch)
    more = {"tokens": 200, "decode": SPECS[2]}
    with engine(FAMILIES[0], slots=5, chunk=256) as made:
        answers(made, [ask(f"{i}", image(i), "what?", **more) for i in range(5)])
    # A row that is shorter than it may be can lie in a tensor of other rows.
    assert found and all(0.95 * held <= most for held, most in found)


@pytest.mark.slow
def test_specs_that_a_draft_stands_beside_change_nothing() -> None:
    """Reducers, policies that act behind the prompt or at each step, and known beginnings."""
    ways: list[dict[str, str]] = [
        {"reduce": "divprune:0.5", "decode": SPECS[2]},
        {"reduce": "fastv@llm1:0.5", "decode": SPECS[2]},
        {"cache": "snapkv:16", "decode": SPECS[1]},
        {"cache": "sink:4+window:24", "decode": SPECS[0]},
        {"cache": "sink:4+window:24", "decode": SPECS[1]},
        {"reduce": "fastv@llm1:0.5", "cache": "snapkv:16", "decode": SPECS[0]},
        {"cache": "quant:8?residual=8"},
    ]
    for family in ("qwen2_5_vl", "gemma3"):
        pair = model_of(family)
        requests = [ask(f"{i}", image(i), "what?", tokens=26, **w) for i, w in enumerate(ways)]
        expected = []
        for each in requests:
            with attach(pair[0], each.options.reduce, each.options.cache):
                expected.append(stock(pair, each))
        with engine(family) as made:
            for prefix in ("", "again-"):
                mine = [replace(each, id=prefix + each.id) for each in requests]
                assert [text for text, _ in answers(made, mine)] == expected


def test_statistics_are_of_one_tenant() -> None:
    with engine(FAMILIES[0]) as made:
        for tenant in ("a", "b"):
            request = ask(tenant, "a b a b", tokens=4, decode="recycle")
            answers(made, [replace(request, tenant=tenant)])
        batch = made._runner.batch
        assert batch is not None
        assert {owner for owner, _ in batch.decoder.drafts._known} == {"a", "b"}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_places_of_steps_with_drafts_are_those_of_tokens_that_stand(seed: int) -> None:
    """A row that reads drafts and takes some back holds what a row without any holds."""
    rng = random.Random(seed)
    block = KVBlock((torch.zeros(1, 0, 2),), (torch.zeros(1, 0, 2),))
    for leaving in (None, beyond(rng.randrange(3, 9))):
        part = Entries(block, 200, leaving)
        drafted, plain = Slots(0, 2, part), Slots(0, 2, part)
        held, other = {0: 0, 1: 1}, {0: 0, 1: 1}  # tokens by place
        said = 2
        for _ in range(40):
            count = rng.randrange(1, 6)
            kept = rng.randrange(1, count + 1)
            drafted.advance()
            drafted.advance(count - 1, further=True)
            for i, place in enumerate(drafted.slots):
                held[place] = said + i
                if leaving is not None and i < kept:
                    seen = sorted(held[p] for p in drafted.orders[i])
                    plain.advance()
                    other[plain.slot] = said + i
                    assert seen == sorted(other[p] for p in plain.order)
            drafted.settle(kept)
            for i in range(kept if leaving is None else 0):
                plain.advance()
                other[plain.slot] = said + i
            said += kept
            assert drafted.length - len(drafted.free) == plain.length - len(plain.free)
            if leaving is not None:
                tokens = [held[p] for p in drafted.order]
                assert tokens == [other[p] for p in plain.order]
