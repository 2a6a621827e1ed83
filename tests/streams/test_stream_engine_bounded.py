"""Bounded streams against a slow oracle, and against a prompt made of the live tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stream_checks import FAMILIES, frame, model_of, stock, stream, text
from stream_oracle import SlowStream
from tiny_models import build
from torch import Tensor

from mmfast.caches.plan import plan_cache
from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register, unregister
from mmfast.core.tokens import Tokens
from mmfast.streams.engine import Engine
from mmfast.streams.memory import Memory
from mmfast.streams.script import Piece

CLOSE = {"atol": 5e-5, "rtol": 5e-5}


def long_stream(family: str, model: Any) -> list[Piece]:
    return [piece for seed in range(3) for piece in stream(family, model, 6, 10 * seed)]


@pytest.mark.parametrize("slack", [0.0, 0.25, 2.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_sinks_and_window_against_the_slow_stream(family: str, slack: float) -> None:
    model = model_of(family)
    engine = Engine(model)
    memory = engine.memory(plan_cache("sink:8+window:45"), slack=slack)
    slow = SlowStream(model, 8, 45, slack=slack)
    question = text(family, model, 6, 99)
    for piece in long_stream(family, model):
        engine.append(memory, piece)
        slow.append(piece)
        assert memory.tokens() == sum(len(block.tokens[0]) for block in slow.blocks) <= 53
        logits = engine.branch(memory).extend(question)
        torch.testing.assert_close(logits.double(), slow.ask(question), **CLOSE)
    rebases = memory.stats()["rebases"]
    assert rebases > 5 if slack == 0 else rebases > 0 if slack < 1 else True
    assert memory.stats()["evicted_tokens"] > 100
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_layer_is_the_stock_model_over_the_live_tokens(family: str) -> None:
    model = model_of(family, layers=1)
    engine = Engine(model)
    memory = engine.memory(plan_cache("sink:8+window:45"), slack=0)
    pieces = long_stream(family, model)
    question = text(family, model, 6, 99)
    for piece in pieces:
        engine.append(memory, piece)
        reference = stock(model, [*_live(memory, pieces), question], _places(memory, 6))[-1]
        logits = engine.branch(memory).extend(question)
        torch.testing.assert_close(logits, reference, atol=1e-5, rtol=1e-5)
    engine.close()


def _live(memory: Memory, pieces: list[Piece]) -> list[Piece]:
    found = []
    for block in memory.blocks:
        piece, held = pieces[block.number], block.tokens(0)
        if held is None:
            found.append(piece)
            continue
        visual = None if piece.visual is None else piece.visual[held]
        planes: tuple[Tensor, ...] = ()
        if piece.planes and piece.visual is not None and visual is not None and bool(visual.any()):
            rank = piece.visual.cumsum(0) - 1
            planes = tuple(plane[rank[held][visual]] for plane in piece.planes)
        found.append(
            Piece(
                piece.embeds[held],
                piece.relative[:, held],
                piece.advance,
                piece.kind,
                piece.fresh,
                None,
                visual if planes else None,
                planes,
            )
        )
    return found


def _places(memory: Memory, n: int) -> Tensor:
    places = torch.cat([block.positions(0) for block in memory.blocks], 1)
    top = max(block.top(block.start) for block in memory.blocks)
    return torch.cat([places, top + 1 + torch.arange(n).expand(len(places), n)], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_hold_different_tokens(family: str) -> None:
    model = build(family).model
    for name, weight in model.named_parameters():
        if "k_norm" in name:  # all ones would make all keys equally long
            weight.uniform_(0.2, 2.0)
    engine = Engine(model)
    memory = engine.memory(plan_cache("sink:8+window:45+keynorm:7"), slack=0)
    slow = SlowStream(model, 8, 45, norms=7)
    question = text(family, model, 6, 99)
    for piece in long_stream(family, model):
        engine.append(memory, piece)
        slow.append(piece)
        logits = engine.branch(memory).extend(question)
        torch.testing.assert_close(logits.double(), slow.ask(question), **CLOSE)
    frames = [block for block in memory.blocks if block.kind == "frame"]
    assert any(not torch.equal(block.held[0], block.held[-1]) for block in frames)
    engine.close()


def test_texts_outlive_frames_in_a_window_of_their_own() -> None:
    model = model_of("qwen2_5_vl")
    engine = Engine(model)
    memory = engine.memory(plan_cache("streamingvlm:64?sink=8&text=16"), slack=0)
    for piece in long_stream("qwen2_5_vl", model):
        engine.append(memory, piece)
        assert memory.tokens() <= 64
    numbers = [block.number for block in memory.blocks]
    assert numbers == sorted(numbers)
    kinds = {
        kind: [b.number for b in memory.blocks if b.kind == kind] for kind in ("text", "frame")
    }
    assert 0 in kinds["text"]
    assert min(kinds["text"][1:]) < min(kinds["frame"])
    engine.close()


def test_what_cannot_be_bounded_is_refused() -> None:
    model = model_of("llava_onevision")
    engine = Engine(model)
    with pytest.raises(SpecError, match="share by 'window'"):
        engine.memory(plan_cache("window:0.5"))
    with pytest.raises(SpecError, match="add a window"):
        engine.memory(plan_cache("sink:4"))
    with pytest.raises(SpecError, match="'snapkv' needs"):
        engine.memory(plan_cache("window:64+snapkv:0.5"))
    memory = engine.memory(plan_cache("sink:4+window:10"))
    engine.append(memory, text("llava_onevision", model, 5, 0))
    with pytest.raises(MmfastError, match="12 tokens does not fit into 'sink:4"):
        engine.append(memory, frame("llava_onevision", model, 0))
    assert memory.tokens() == 5
    piece = frame("qwen3_vl", model_of("qwen3_vl"), 0)
    with pytest.raises(MmfastError, match="this model needs"):
        engine.append(memory, piece)
    engine.close()


def test_a_policy_that_merges_is_refused_and_the_stream_stays() -> None:
    @register("folding", kind="cache", sites=("kv",), role="score")
    def folding(tokens: Tokens, budget: int) -> Reduction:
        """Fold all tokens into the first few."""
        keep = torch.arange(budget).expand(*tokens.x.shape[:-2], budget)
        owner = torch.arange(tokens.n).clamp_max(budget - 1).expand(tokens.x.shape[:-1])
        return Reduction(keep, owner)

    try:
        family = FAMILIES[0]
        model = model_of(family)
        memory = (engine := Engine(model)).memory(plan_cache("sink:8+window:45+folding:3"))
        engine.append(memory, text(family, model, 6, 1))
        held = memory.tokens()
        with pytest.raises(SpecError, match="'folding' merges keys"):
            engine.append(memory, frame(family, model, 0))
        assert memory.tokens() == held == 6
    finally:
        unregister("folding", "cache")
