"""Streams through stock models: streaming = offline, branches, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from stream_checks import FAMILIES, frame, model_of, same, state, stock, stream, text

from mmfast.caches.plan import plan_cache
from mmfast.streams.engine import Engine

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize("family", FAMILIES)
def test_streaming_is_offline(family: str) -> None:
    model = model_of(family)
    engine = Engine(model)
    pieces = stream(family, model)
    reference = stock(model, pieces)
    memory = engine.memory()
    ends = torch.tensor([len(piece.embeds) for piece in pieces]).cumsum(0)
    for i, piece in enumerate(pieces):
        logits = engine.branch(memory).extend(piece)
        torch.testing.assert_close(logits, reference[ends[i] - 1], **CLOSE)
        engine.append(memory, piece)
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_under_autocast_is_the_stock_model_under_it(family: str) -> None:
    model = model_of(family)
    pieces = stream(family, model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine = Engine(model)
        reference = stock(model, pieces)[-1].float()
        branch = engine.branch(engine.memory())
        logits = [branch.extend(piece) for piece in pieces][-1].float()
    spread = float((reference - stock(model, pieces)[-1]).abs().max())  # what rounding does
    assert spread > 0 and float((logits - reference).abs().max()) <= 4 * spread
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_branch_writes_as_the_stock_model_does(family: str) -> None:
    model = model_of(family)
    engine = Engine(model)
    pieces = stream(family, model)
    memory = engine.memory()
    for piece in pieces[:-1]:
        engine.append(memory, piece)
    branch = engine.branch(memory)
    logits = branch.extend(pieces[-1])
    said = []
    for _ in range(4):
        said.append(int(logits.argmax()))
        logits = branch.token(said[-1])
        answer = text(family, model, len(said), 0)
        object.__setattr__(answer, "embeds", engine.embed(torch.tensor(said)))
        torch.testing.assert_close(logits, stock(model, [*pieces, answer])[-1], **CLOSE)
    engine.close()


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("spec", [None, "sink:6+window:40"])
@pytest.mark.parametrize("family", FAMILIES)
def test_branches_leave_the_stream_alone(family: str, spec: str | None) -> None:
    model = model_of(family)
    engine = Engine(model)
    alone, asked = engine.memory(plan_cache(spec)), engine.memory(plan_cache(spec))
    pieces = stream(family, model, frames=12)
    for piece in pieces:
        engine.append(alone, piece)
        engine.append(asked, piece)
        before = state(asked)
        branch = engine.branch(asked)
        branch.extend(text(family, model, 9, 3))
        branch.token(7)
        assert same(before, state(asked))
        assert same(state(alone), state(asked))
    engine.close()


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("spec", [None, "sink:6+window:40"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_branch_keeps_is_what_was_appended(family: str, spec: str | None) -> None:
    model = model_of(family)
    engine = Engine(model)
    said, kept = engine.memory(plan_cache(spec)), engine.memory(plan_cache(spec))
    pieces = stream(family, model, frames=12)
    for piece in pieces[:-1]:
        engine.append(said, piece)
        engine.append(kept, piece)
    engine.append(said, pieces[-1])
    branch = engine.branch(kept)
    branch.extend(pieces[-1])
    branch.keep()
    assert same(state(said), state(kept))
    engine.append(said, frame(family, model, 77))
    engine.append(kept, frame(family, model, 77))
    assert same(state(said), state(kept))
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_kept_at_the_end_of_a_stream_that_went_on(family: str) -> None:
    model = model_of(family)
    engine = Engine(model)
    memory = engine.memory()
    pieces = stream(family, model)
    for piece in pieces[:-1]:
        engine.append(memory, piece)
    branch = engine.branch(memory)
    branch.extend(pieces[-1])
    for token in (3, 5, 8):
        branch.token(token)
    engine.append(memory, frame(family, model, 50))
    count = len(memory.blocks)
    branch.keep()
    branch.keep()
    question, answer = memory.blocks[count:]
    assert (question.n, answer.n, answer.kind) == (7, 3, "text")
    ends = [buffer.length for buffer in memory.buffers]
    for layer, buffer in enumerate(memory.buffers):
        raw = buffer.read(0, ends[layer] - 10)
        places = torch.cat([question.positions(layer), answer.positions(layer)], 1)
        turned = engine.turner.rotate(layer, raw, places)
        assert torch.equal(turned, buffer.read(1, ends[layer] - 10))
    assert len(set((places[0].diff()).tolist())) == 1
    engine.close()
