"""Retrieval while an answer is written: against an answer that is laid out anew at every token."""

from __future__ import annotations

import random
from typing import Any

import oracles_retrieve as oracles
import pytest
import torch
from stream_checks import FAMILIES, frame, model_of, remark, same, state, stream, text
from stream_oracle import SlowAnswer, SlowStream
from stream_shelf import Choice, Shelf
from torch import Tensor

from mmfast.caches.plan import call_plan, plan_cache
from mmfast.core.errors import MmfastError, SpecError
from mmfast.streams.engine import Engine
from mmfast.streams.script import Piece

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
WINDOW = "sink:8+window:45"


def said(model: Any, axes: int, *ids: int) -> Piece:
    """Tokens of an answer as a piece of a stream."""
    embeds = model.get_input_embeddings()(torch.tensor(ids)).detach()
    relative = torch.arange(len(ids)).expand(axes, -1)
    return Piece(embeds, relative, torch.full((axes,), len(ids)), "text", fresh=False)


def by_query(layer: int, numbers: list[int], query: Tensor) -> Choice:
    """Blocks, and of some only a few tokens, by the signs of the query; at times none."""
    signs = (query.float().mean((1, 2)) > 0).long().tolist()
    code = sum(sign << i for i, sign in enumerate(signs)) + layer
    if code % 4 == 0:
        return {}
    chosen = [number for i, number in enumerate(numbers) if (i * code) % 3 != 1]
    return {
        number: torch.tensor([0, 2, 3][: code % 4]) if number % 2 else None for number in chosen
    }


def best(budget: int) -> Any:
    """The choice of `rekv` by an oracle that multiplies one number at a time."""

    def choose(layer: int, query: Tensor, left: dict[int, Tensor]) -> Choice:
        keys = {number: rows.double().numpy() for number, rows in left.items()}
        return dict.fromkeys(oracles.rekv(keys, query.double().numpy(), budget))

    return choose


@pytest.mark.parametrize("seed", range(9))
def test_random_answers_against_answers_laid_out_anew(seed: int) -> None:
    """Frames come meanwhile; every layer reads as many blocks as before, and the oracle's."""
    dice, family = random.Random(seed), FAMILIES[seed % 3]
    model = model_of(family)
    engine, axes = Engine(model), 1 if family == "llava_onevision" else 3
    every, budget = dice.randint(1, 3), dice.randint(1, 4)
    choose: Any = best(budget)
    memory = engine.memory(plan_cache(f"{WINDOW}+rekv:{budget}?every={every}"))
    if seed % 2:  # any choice, of any number of tokens
        memory.archive = Shelf(by_query)  # type: ignore[assignment]
        choose = lambda layer, query, left: by_query(layer, sorted(left), query)
    slow = SlowStream(model, 8, 45, slack=0.25)
    pieces = stream(family, model, dice.randint(9, 14), seed)
    for piece in pieces:
        engine.append(memory, piece)
        slow.append(piece)
    branch, answer = engine.branch(memory), SlowAnswer(slow, choose)
    question = remark(family, model, dice.randint(2, 7), 99)
    found = [(branch.extend(question), answer.write(question, True))]
    changes, blocks = 0, len(branch.found[0])
    for step in range(1, 10):
        if dice.random() < 0.3:
            engine.append(memory, frame(family, model, 50 + step))
        token, before = dice.randrange(90), [dict(each) for each in answer.recalled]
        logits = branch.token(token)
        found.append((logits, answer.write(said(model, axes, token), step % every == 0)))
        changes += sum(not same(a, b) for a, b in zip(before, answer.recalled, strict=True))
        assert branch.found == {i: sorted(each) for i, each in enumerate(answer.recalled)}
        assert seed % 2 or {len(each) for each in branch.found.values()} == {blocks}
    for logits, expected in found:
        torch.testing.assert_close(logits.double(), expected, **CLOSE)
    assert branch.changes == changes > 0 and branch.choices == 9 // every * 4
    engine.close()


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize(
    "spec",
    [
        f"{WINDOW}+rekv:2?every=1",
        f"{WINDOW}+resv:0.4?every=1",
        f"{WINDOW}+rekv:3?group=2&look=1&every=1",
        f"{WINDOW}+rekv:2?every=1+quant:8?residual=8",
        f"{WINDOW}+keynorm:6+rekv:2?every=1",
        "sink:6+keydiff:48+rekv:3?every=1",
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_layer_reads_what_a_fresh_branch_would(
    family: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was said does not depend on what was read: only the last choice may show."""
    model = model_of(family, layers=1)
    engine = Engine(model)
    memory, question = engine.memory(plan_cache(spec)), text(family, model, 6, 99)
    for piece in stream(family, model, 16):
        engine.append(memory, piece)
    kept, seen = state(memory), list[Any]()
    branch, choose, ids = engine.branch(memory), memory.archive.choose, [3, 41, 7, 66, 20, 12]
    branch.extend(question)
    for i, token in enumerate(ids):
        with monkeypatch.context() as patch:
            patch.setattr(memory.archive, "choose", lambda *a: seen.append(choose(*a)) or seen[-1])
            logits = branch.token(token)
        fresh = engine.branch(memory)
        with monkeypatch.context() as patch:
            patch.setattr(memory.archive, "choose", lambda *a: seen[-1])
            fresh.extend(question)
        fresh.every = 0
        again = [fresh.token(each) for each in ids[: i + 1]][-1]
        torch.testing.assert_close(logits, again, atol=1e-6, rtol=1e-6)
        assert branch.found == fresh.found
        assert [b.length for b in branch.buffers] == [b.length for b in fresh.buffers]
    assert branch.changes and same(kept, state(memory))
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_choice_on_the_way_changes_no_bit(family: str) -> None:
    model = model_of(family)
    engine, found = Engine(model), list[Any]()
    for knob in ("", "?every=0", "?every=7"):
        memory = engine.memory(plan_cache(f"{WINDOW}+rekv:2{knob}"))
        for piece in stream(family, model, 12):
            engine.append(memory, piece)
        branch = engine.branch(memory)
        logits = [branch.extend(text(family, model, 6, 1)), *map(branch.token, range(6))]
        found.append((logits, branch.found, [b.read(1).clone() for b in branch.buffers]))
        assert not branch.choices
    assert same(found[0], found[1]) and same(found[0], found[2])
    engine.close()


def test_what_was_said_is_kept_from_where_it_is_now() -> None:
    family = "qwen2_5_vl"
    model = model_of(family, layers=1)
    engine, plan = Engine(model), plan_cache(f"{WINDOW}+rekv:1?every=1")
    plain, kept = engine.memory(plan_cache(WINDOW)), engine.memory(plan, archive=Shelf(by_query))
    for piece in stream(family, model, 12):
        engine.append(plain, piece)
        engine.append(kept, piece)
    branch, question, ids = engine.branch(kept), text(family, model, 6, 9), (3, 41, 7, 66, 20, 12)
    branch.extend(question)
    lengths = []
    for token in ids:
        branch.token(token)
        lengths.append(branch.buffers[0].length)
    branch.keep()
    engine.append(plain, question)
    engine.append(plain, said(model, 3, *ids))
    assert sorted(lengths) != lengths  # what was said moved up and down
    torch.testing.assert_close(state(plain)[1], state(kept)[1], atol=1e-6, rtol=1e-6)
    engine.close()


def test_a_branch_that_failed_while_it_chose_again_says_so() -> None:
    family = "llava_onevision"
    model = model_of(family)
    engine = Engine(model)
    memory = engine.memory(plan_cache(f"{WINDOW}+rekv:2?every=2"), archive=Shelf(by_query))
    for piece in stream(family, model, 12):
        engine.append(memory, piece)
    before, branch = state(memory), engine.branch(memory)
    branch.extend(text(family, model, 6, 1))
    hook = model.get_decoder().layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    for match, error in (("zero", ZeroDivisionError),) * 2:
        with pytest.raises(error, match=match):
            branch.token(5)  # nothing was read for it: it may be said again
    hook.remove()
    branch.token(5)
    hook = model.get_decoder().layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        branch.token(6)
    hook.remove()
    with pytest.raises(MmfastError, match="open another one"):
        branch.token(6)
    assert branch.changes and same(before, state(memory))
    engine.close()


def test_a_lost_block_is_replaced_at_the_next_choice() -> None:
    family = "qwen3_vl"
    model = model_of(family)
    engine = Engine(model)
    memory = engine.memory(plan_cache(f"{WINDOW}+rekv:2?every=1"))
    for piece in stream(family, model, 14):
        engine.append(memory, piece)
    branch = engine.branch(memory)
    branch.extend(text(family, model, 6, 1))
    lost = set(branch.found[0])
    for number in lost:
        memory.archive.forget(number)
    branch.token(5)
    assert not lost & {n for numbers in branch.found.values() for n in numbers}
    assert all(len(numbers) == 2 for numbers in branch.found.values())
    assert {n for n, layers in branch.readers.items() if 0 in layers} > lost  # were read before
    engine.close()


def test_where_nothing_chooses_on_the_way_it_is_refused_in_one_line() -> None:
    assert plan_cache(f"{WINDOW}+retrieve:2?every=8").rechoice == 8
    assert plan_cache(f"{WINDOW}+retrieve:2").rechoice == 0
    assert call_plan("retrieve:2?every=0") is not None
    with pytest.raises(SpecError, match="every=8 of 'retrieve' acts") as refused:
        call_plan("sink:4+retrieve:2?every=8")
    assert "\n" not in str(refused.value)
    with pytest.raises(SpecError, match="negative every="):
        plan_cache("window:64+resv:0.3?every=-1")
