"""Nothing is left behind, and nothing mixes: exits, exceptions, threads, conversations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attach_states import snapshot
from tiny_models import FAMILIES, Tiny, build, generate, tiny

import mmfast.models.vision.acceleration  # noqa: F401  registers its attention, once for all models
from mmfast.attach import attach
from mmfast.core.errors import ModelError

SPEC = "visionzip:0.5+fastv@llm2:0.5"


def warm(this: Tiny, inputs: dict[str, Any]) -> None:
    """Stock code caches things on first use; those are not ours."""
    generate(this, inputs, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_leaving_restores_everything(family: str) -> None:
    this = build(family)
    inputs = this.inputs(["{image} {video}?"], images=this.images(1), videos=this.videos(1))
    warm(this, inputs)
    before = snapshot(this)
    with attach(this.model, SPEC):
        generate(this, inputs, 2)
        assert snapshot(this) != before
    assert snapshot(this) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exception_restores_everything(family: str) -> None:
    this = build(family)
    inputs = this.inputs(["{video}?"], videos=this.videos(1))
    stock = generate(this, inputs, 2)
    before = snapshot(this)

    def explode(*_: Any) -> None:
        raise RuntimeError("boom")

    layers = this.model.get_decoder().layers
    for layer in (0, 1, 2, 3):  # before, inside and after the probed layer
        handle = layers[layer].mlp.register_forward_pre_hook(explode)
        try:
            with pytest.raises(RuntimeError, match="boom"), attach(this.model, SPEC):
                generate(this, inputs, 2)
        finally:
            handle.remove()
        assert snapshot(this) == before
    assert torch.equal(generate(this, inputs, 2).sequences, stock.sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_failed_call_inside_does_not_harm_the_next(family: str) -> None:
    this = build(family)
    inputs = this.inputs(["{video}?"], videos=this.videos(1))
    with attach(this.model, SPEC):
        expected = generate(this, inputs)
        layer = this.model.get_decoder().layers[1].mlp
        handle = layer.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(this, inputs)
        handle.remove()
        assert torch.equal(generate(this, inputs).sequences, expected.sequences)


def test_attached_twice_is_refused() -> None:
    this = tiny("llava_onevision")
    inputs = this.inputs(["on {video} what?"], videos=this.videos(1))
    with attach(this.model, "random:0.5"):
        with (
            pytest.raises(ModelError, match="attached already"),
            attach(this.model, "random:0.5"),
        ):
            pass
        with attach(this.model, None):  # nothing to attach
            pass
        generate(this, inputs, 1)
    with attach(this.model, "random:0.5") as trace:
        generate(this, inputs, 1)
    assert trace.rows


def test_two_models_at_once() -> None:
    a, b = tiny("llava_onevision"), tiny("qwen3_vl")
    asks = [this.inputs(["{video}?"], videos=this.videos(1)) for this in (a, b)]
    alone = []
    for this, inputs in zip((a, b), asks, strict=True):
        with attach(this.model, SPEC):
            alone.append(generate(this, inputs).sequences)
    with attach(a.model, SPEC), attach(b.model, SPEC):
        both = [generate(this, i).sequences for this, i in zip((a, b), asks, strict=True)]
    assert all(map(torch.equal, both, alone))


def conversation(this: Tiny, seed: int, prompt: str) -> Callable[[], Any]:
    """A step-by-step greedy conversation that can be interleaved with others."""
    inputs = this.inputs([prompt], videos=this.videos(1, seed))
    given = {k: v for k, v in inputs.items() if k != "attention_mask"}
    tokens: list[int] = []
    state: dict[str, Any] = {}

    def step() -> list[int]:
        if state:
            last = torch.tensor([[tokens[-1]]])
            out = this.model(input_ids=last, past_key_values=state["cache"], use_cache=True)
        else:
            out = this.model(**given, use_cache=True)
        state["cache"] = out.past_key_values
        logits = out.logits[0, -1].clone()
        logits[this.blocked()] = -torch.inf
        tokens.append(int(logits.argmax()))
        return tokens

    return step


@pytest.mark.parametrize("family", FAMILIES)
def test_interleaved_conversations_do_not_mix(family: str) -> None:
    this = tiny(family)
    asks = [(3, "{video} a?"), (4, "much longer, {video} b?"), (5, "{video}")]
    with attach(this.model, SPEC):
        alone = []
        for ask in asks:
            step = conversation(this, *ask)
            alone.append([step() for _ in range(6)][-1])
        steps = [conversation(this, *ask) for ask in asks]
        for _ in range(6):
            mixed = [step() for step in steps]
    assert mixed == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_threads_do_not_mix(family: str) -> None:
    this = tiny(family)
    asks = [
        this.inputs([p], videos=this.videos(1, i))
        for i, p in enumerate(("{video}?", "a {video} b"))
    ]
    with attach(this.model, SPEC):
        alone = [generate(this, inputs).sequences for inputs in asks]
        results: dict[tuple[int, int], Any] = {}

        def work(which: int) -> None:
            for turn in range(4):
                results[which, turn] = generate(this, asks[which]).sequences

        threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 8
    assert all(torch.equal(alone[which], out) for (which, _), out in results.items())
