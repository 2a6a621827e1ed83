"""Streams and branches side by side: threads, snapshots, failures, and sizes that stay."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from stream_checks import FAMILIES, frame, model_of, same, state, stream, text
from tiny_models import build
from transformers import Gemma3TextConfig
from transformers.models.gemma3 import Gemma3ForCausalLM

from mmfast.caches.plan import plan_cache
from mmfast.core.errors import MmfastError, ModelError
from mmfast.streams.engine import Engine
from mmfast.streams.memory import Memory

SPECS = ("sink:6+window:40", "sink:6+window:40+keynorm:6+rekv:2", None)


def answer(engine: Engine, memory: Memory, piece: Any, tokens: int = 3) -> list[torch.Tensor]:
    branch = engine.branch(memory)
    logits = [branch.extend(piece)]
    logits += [branch.token(int(logits[-1].argmax())) for _ in range(tokens)]
    return logits


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_interleaved_streams_are_each_as_if_alone(family: str) -> None:
    model = model_of(family)
    engine = Engine(model)
    plans = [plan_cache(SPECS[i % 3]) for i in range(6)]
    scripts = [stream(family, model, 8, seed=20 * i) for i in range(6)]
    question = text(family, model, 5, 1)
    alone = []
    for plan, pieces in zip(plans, scripts, strict=True):
        memory = engine.memory(plan)
        for piece in pieces:
            engine.append(memory, piece)
        alone.append((answer(engine, memory, question), state(memory)))
    memories = [engine.memory(plan) for plan in plans]
    turns = [i for i, pieces in enumerate(scripts) for _ in pieces]
    random.Random(0).shuffle(turns)
    places = [iter(pieces) for pieces in scripts]
    for i in turns:
        engine.append(memories[i], next(places[i]))
        answer(engine, memories[(i + 1) % 6], question, 1)
    for memory, expected in zip(memories, alone, strict=True):
        assert same((answer(engine, memory, question), state(memory)), expected)
    engine.close()


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("family", FAMILIES)
def test_threads_do_not_see_each_other(family: str) -> None:
    model = model_of(family)
    engine = Engine(model)
    question = text(family, model, 5, 1)
    results: dict[tuple[int, int], Any] = {}

    def work(which: int, turn: int) -> None:
        memory = engine.memory(plan_cache(SPECS[which]))
        said = []
        for piece in stream(family, model, 8, seed=20 * which):
            engine.append(memory, piece)
            said.append(answer(engine, memory, question, 1))
        results[which, turn] = (said, state(memory))

    for which in range(3):
        work(which, 0)
    threads = [threading.Thread(target=work, args=(which, 1)) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which in range(3):
        assert same(results[which, 0], results[which, 1])
    engine.close()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_snapshot_goes_on_bit_for_bit(spec: str | None, dtype: torch.dtype) -> None:
    model = build("qwen3_vl").model.to(dtype)
    engine = Engine(model)
    pieces = stream("qwen3_vl", model, 16)
    one = engine.memory(plan_cache(spec))
    for piece in pieces[:9]:
        engine.append(one, piece)
    tree = one.snapshot()
    two = engine.memory(plan_cache(spec))
    two.restore(tree)
    question = text("qwen3_vl", model, 5, 1)
    for piece in pieces[9:]:
        assert same(answer(engine, one, question, 1), answer(engine, two, question, 1))
        engine.append(one, piece)
        engine.append(two, piece)
    assert same(state(one), state(two))
    with pytest.raises(MmfastError, match="saved with memory"):
        engine.memory(plan_cache("window:100")).restore(tree)
    small = Engine(build("qwen3_vl", layers=2).model)
    with pytest.raises(MmfastError, match="of 4 layers"):
        small.memory(plan_cache(spec)).restore(tree)
    engine.close()
    small.close()


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("where", [0, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_failure_in_the_middle_changes_nothing(family: str, where: int) -> None:
    model = build(family).model
    engine = Engine(model)
    memory = engine.memory(plan_cache("sink:6+window:40"))
    for piece in stream(family, model, 6):
        engine.append(memory, piece)
    branch = engine.branch(memory)
    branch.extend(text(family, model, 4, 2))
    before = state(memory)

    def fail(*args: Any) -> None:
        raise RuntimeError("broken")

    piece = text(family, model, 5, 0)
    handle = engine.decoder.layers[where].mlp.register_forward_hook(fail)
    for call in (lambda: engine.append(memory, piece), lambda: branch.extend(piece)):
        with pytest.raises(RuntimeError, match="broken"):
            call()
    assert same(before, state(memory))
    handle.remove()
    once = engine.branch(memory)
    once.extend(text(family, model, 4, 2))
    assert torch.equal(branch.extend(piece), once.extend(piece))
    engine.append(memory, piece)
    engine.close()


def test_buffers_are_made_once() -> None:
    model = model_of("llava_onevision", layers=1)
    engine = Engine(model)
    memory = engine.memory(plan_cache("sink:6+window:40"))
    pointers, sizes = set(), set()
    for i in range(700):
        engine.append(memory, text("llava_onevision", model, 3 + i % 7, i % 50))
        if i > 10:
            data = memory.buffers[0].data
            assert data is not None
            pointers.add(data.data_ptr())
            sizes.add(memory.stats()["bytes"])
            assert memory.tokens() <= 46
            assert len(memory.blocks) <= 18
    assert len(pointers) == len(sizes) == 1
    engine.close()


def test_nothing_is_left_on_the_model() -> None:
    model = build("qwen2_5_vl").model
    attributes = [dict(module.__dict__) for module in model.modules()]
    engine = Engine(model)
    memory = engine.memory(plan_cache("sink:6+window:40+rekv:2"))
    for piece in stream("qwen2_5_vl", model, 8):
        engine.append(memory, piece)
    answer(engine, memory, text("qwen2_5_vl", model, 4, 0))
    assert model.model.rope_deltas is None
    del engine  # hooks go with it
    for module, before in zip(model.modules(), attributes, strict=True):
        assert module.__dict__.keys() == before.keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_layers_of_different_lengths_under_every_attention(attention: str) -> None:
    """A share of each layer's own: masks follow the layer."""
    model = build("qwen3_vl", attention=attention).model
    engine = Engine(model)
    memory = engine.memory(plan_cache("sink:6+window:60+resv:0.5"))
    for i in range(14):
        engine.append(memory, frame("qwen3_vl", model, i))
    branch = engine.branch(memory)
    branch.extend(text("qwen3_vl", model, 6, 1))
    assert len({buffer.length for buffer in branch.buffers}) > 1
    logits = branch.extend(text("qwen3_vl", model, 3, 2))
    for _ in range(3):
        logits = branch.token(int(logits.argmax()))
    assert bool(torch.isfinite(logits).all())
    engine.close()


def test_models_that_cannot_stream_say_so() -> None:
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = Gemma3ForCausalLM(config)
    with pytest.raises(ModelError, match="sliding_attention"):
        Engine(model)
    assert not any(module._forward_hooks for module in model.modules())
