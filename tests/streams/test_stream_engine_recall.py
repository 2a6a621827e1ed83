"""Stored blocks come back for a question, in every layer for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stream_checks import FAMILIES, frame, model_of, remark, same, state, stock, stream, text
from stream_oracle import SlowStream
from stream_shelf import Choice, Shelf
from torch import Tensor

from mmfast.caches.plan import plan_cache
from mmfast.core.errors import MmfastError
from mmfast.streams.engine import Engine

CLOSE = {"atol": 5e-5, "rtol": 5e-5}


def everything(layer: int, numbers: list[int], query: Tensor) -> Choice:
    return dict.fromkeys(numbers)


def by_layer(layer: int, numbers: list[int], query: Tensor) -> Choice:
    """Other blocks in every layer, and of some only a few tokens; none in the second layer."""
    if layer == 1:
        return {}
    chosen = [number for i, number in enumerate(numbers) if (i * (layer + 2)) % 3 != 1]
    return {number: torch.tensor([0, 2, 3]) if number % 2 else None for number in chosen}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_left_is_the_whole_prompt(family: str) -> None:
    """In one layer keys depend on nothing but their token, so that this is exact."""
    model = model_of(family, layers=1)
    engine = Engine(model)
    shelf = Shelf(everything)
    memory = engine.memory(plan_cache("sink:8+window:45"), archive=shelf)
    pieces = [text(family, model, 5, 0), *(frame(family, model, i) for i in range(12))]
    question = text(family, model, 6, 99)
    for i, piece in enumerate(pieces):
        engine.append(memory, piece)
        logits = engine.branch(memory).extend(question)
        reference = stock(model, [*pieces[: i + 1], question])[-1]
        torch.testing.assert_close(logits, reference, atol=1e-5, rtol=1e-5)
    assert len(shelf.blocks) > 8
    engine.close()


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("choose", [everything, by_layer])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_layers_choose_against_the_slow_stream(family: str, choose: Any) -> None:
    model = model_of(family)
    engine = Engine(model)
    shelf = Shelf(choose)
    memory = engine.memory(plan_cache("sink:8+window:45"), archive=shelf)
    slow = SlowStream(model, 8, 45, slack=0.25)
    question = remark(family, model, 6, 99)
    opening, more = text(family, model, 5, 0), 8
    pieces = [opening, *(frame(family, model, i) for i in range(12))]
    pieces.insert(4, remark(family, model, 4, 5))
    for i, piece in enumerate(pieces):
        engine.append(memory, piece)
        slow.append(piece)
        if i < more:
            continue
        chosen = [choose(layer, shelf.numbers(), question.embeds) for layer in range(4)]
        branch = engine.branch(memory)
        logits = branch.extend(question).double()
        torch.testing.assert_close(logits, slow.ask(question, chosen), **CLOSE)
        assert branch.found == {layer: sorted(c) for layer, c in enumerate(chosen)}
        assert not torch.allclose(logits, slow.ask(question), **CLOSE)
    engine.close()


def test_the_question_asks_with_its_own_queries_before_rope() -> None:
    model = model_of("qwen3_vl", layers=2)
    engine = Engine(model)
    shelf = Shelf(everything)
    memory = engine.memory(plan_cache("sink:8+window:45"), archive=shelf)
    for i in range(6):
        engine.append(memory, frame("qwen3_vl", model, i))
    question = text("qwen3_vl", model, 6, 99)
    first = model.get_decoder().layers[0]
    seen = first.self_attn.q_proj(first.input_layernorm(question.embeds)).unflatten(-1, (4, 8))
    engine.branch(memory).extend(question)
    torch.testing.assert_close(shelf.asked[0], first.self_attn.q_norm(seen).transpose(0, 1))
    shelf.asked.clear()
    branch = engine.branch(memory)
    branch.extend(question, retrieve=False)
    assert not shelf.asked
    branch.extend(question)
    branch.extend(frame("qwen3_vl", model, 3))
    assert shelf.asked[1].shape == (4, 6, 8)  # the second question, and nothing later
    engine.close()


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("spec", ["rekv:2", "resv:0.4", "rekv:3+quant:8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_reading_leaves_stream_and_archive_alone(family: str, spec: str) -> None:
    model = model_of(family)
    engine = Engine(model)
    plan = plan_cache(f"sink:8+window:45+{spec}")
    asked, alone = engine.memory(plan), engine.memory(plan)
    for i, piece in enumerate(stream(family, model, 12)):
        engine.append(asked, piece)
        engine.append(alone, piece)
        if i > 6:
            branch = engine.branch(asked)
            branch.extend(text(family, model, 6, i))
            branch.token(3)
            assert set(branch.found) == {0, 1, 2, 3}
            assert all(branch.found.values())
    assert same(state(asked), state(alone))
    assert asked.stats()["archive"]["blocks"]
    engine.close()


def test_what_was_said_before_and_after_reading_is_kept() -> None:
    model = model_of("qwen2_5_vl", layers=1)
    engine = Engine(model)
    plan = plan_cache("sink:8+window:45")
    said, kept = engine.memory(plan), engine.memory(plan, archive=Shelf(everything))
    for i in range(8):
        engine.append(said, frame("qwen2_5_vl", model, i))
        engine.append(kept, frame("qwen2_5_vl", model, i))
    branch = engine.branch(kept)
    for i in (1, 2):
        branch.extend(text("qwen2_5_vl", model, 3 + i, i), retrieve=i > 1)
        engine.append(said, text("qwen2_5_vl", model, 3 + i, i))
    branch.keep()
    assert same(state(said)[1], state(kept)[1])  # one layer: keys do not depend on what was read
    engine.close()


def test_blocks_that_leave_while_a_branch_lives_are_not_read_twice() -> None:
    model = model_of("llava_onevision")
    engine = Engine(model)
    memory = engine.memory(plan_cache("sink:8+window:45"), archive=Shelf(everything))
    frames = [frame("llava_onevision", model, i) for i in range(10)]
    for piece in frames[:6]:
        engine.append(memory, piece)
    early, late = engine.branch(memory), engine.branch(memory)
    question = text("llava_onevision", model, 6, 99)
    logits = early.extend(question)
    for piece in frames[6:]:
        engine.append(memory, piece)
    assert torch.equal(late.extend(question), logits)
    assert late.found == early.found
    engine.close()


def test_an_archive_that_fails_changes_nothing() -> None:
    model = model_of("qwen2_5_vl")
    engine = Engine(model)
    shelf = Shelf(everything)
    memory = engine.memory(plan_cache("sink:8+window:45"), archive=shelf)
    for i in range(6):
        engine.append(memory, frame("qwen2_5_vl", model, i))
    before, numbers, start = state(memory), shelf.numbers(), memory.next_start
    put, shelf.put = shelf.put, _fail
    with pytest.raises(OSError, match="full"):
        engine.append(memory, text("qwen2_5_vl", model, 30, 0))
    assert same(before[1], state(memory)[1])
    assert numbers == shelf.numbers()
    assert memory.next_start == start
    shelf.put = put
    engine.append(memory, text("qwen2_5_vl", model, 30, 0))
    choose, shelf.choose = shelf.choose, _fail
    branch = engine.branch(memory)
    with pytest.raises(OSError, match="full"):
        branch.extend(text("qwen2_5_vl", model, 3, 0))
    shelf.choose = choose
    branch.extend(text("qwen2_5_vl", model, 3, 0))  # nothing had been read
    shelf.read = _fail_later(shelf.read)
    branch = engine.branch(memory)
    for match in ("full", "open another one"):
        with pytest.raises((OSError, MmfastError), match=match):
            branch.extend(text("qwen2_5_vl", model, 3, 0))
    engine.close()


def _fail(*args: Any) -> Any:
    raise OSError("full")


def _fail_later(read: Any) -> Any:
    return lambda layer, found: _fail() if layer == 2 else read(layer, found)
