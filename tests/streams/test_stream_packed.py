"""Windows of a stream in few bits: what is held, how far answers are, and that all else goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stream_checks import FAMILIES, N_FRAME, frame, model_of, same, state, stream, text

from mmfast.caches.plan import plan_cache
from mmfast.core.errors import MmfastError
from mmfast.ops.quantisation import Quantiser, dequantise
from mmfast.streams.buffers import RAW, ROTATED, VALUES, PackedBuffer
from mmfast.streams.engine import Engine
from mmfast.streams.memory import Memory

QUANT = "quant:{}?residual=12"
PLACES = (
    "sink:6+window:60",
    "sink:6+window:60+rekv:2",
    "streamingvlm:64",
    "window:60",
)


def watched(engine: Engine, family: str, spec: str, frames: int = 16) -> Memory:
    memory = engine.memory(plan_cache(spec))
    for piece in stream(family, engine.model, frames):
        engine.append(memory, piece)
    return memory


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize(("bits", "far"), [(8, 0.02), (4, 0.25)])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_near_those_of_an_unpacked_window(family: str, bits: int, far: float) -> None:
    engine = Engine(model_of(family))
    question = text(family, engine.model, 6, 1)
    errors = []
    for place in PLACES:
        plain = engine.branch(watched(engine, family, place)).extend(question)
        packed = watched(engine, family, f"{place}+{QUANT.format(bits)}")
        assert all(isinstance(b, PackedBuffer) and b.packs for b in packed.buffers)
        answer = engine.branch(packed).extend(question)
        errors.append(float((answer - plain).norm() / plain.norm()))
    assert min(errors) > 0 and max(errors) < far, errors
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_is_held_once_in_few_bits_and_read_where_it_stands(family: str) -> None:
    """The window by hand: rows of the plain buffers, quantised block by block and rotated."""
    engine = Engine(model_of(family))
    memory = engine.memory(plan_cache("sink:6+window:60+" + QUANT.format(8)))
    plain = engine.memory()
    engine.append(memory, text(family, engine.model, 6, 0))
    engine.append(plain, text(family, engine.model, 6, 0))
    for i in range(3):
        piece = frame(family, engine.model, i)
        engine.append(memory, piece)
        engine.append(plain, piece)
    quantiser, turner = Quantiser(8), memory.turner
    packed, rows = memory.buffers[0], plain.buffers[0]  # keys of layer 0 see no packed rows
    assert isinstance(packed, PackedBuffer) and len(packed.packs) == 3
    at = 0
    for block in memory.blocks[:3]:
        keys, values = (rows.read(p, at, at + block.n) for p in (RAW, VALUES))
        keys = dequantise(quantiser.pack(keys, keys=True))
        turned = turner.rotate(0, keys, block.positions(0))
        torch.testing.assert_close(packed.read(RAW, at, at + block.n), keys)
        torch.testing.assert_close(packed.read(ROTATED, at, at + block.n), turned)
        values = dequantise(quantiser.pack(values))
        torch.testing.assert_close(packed.read(VALUES, at, at + block.n), values)
        at += block.n
    assert torch.equal(packed.read(VALUES, at), rows.read(VALUES, at))
    engine.close()


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_of_a_packed_window_stay(bits: int) -> None:
    family = "llava_onevision"
    engine = Engine(model_of(family))
    held: dict[str, list[int]] = {}
    for store in ("", f"+quant:{bits}?residual=0&group=4"):
        memory = engine.memory(plan_cache(f"sink:6+window:480{store}"))
        engine.append(memory, text(family, engine.model, 6, 0))
        held[store] = []
        for i in range(130):
            engine.append(memory, frame(family, engine.model, i))
            held[store].append(memory.stats()["bytes"])
            assert memory.tokens() <= 486
    plain, packed = held.values()
    assert max(packed[50:]) <= max(packed[40:50])
    rows = engine.memory(None)
    engine.append(rows, frame(family, engine.model, 0))
    pack = Quantiser(bits, 4).pack
    keys, values = (rows.buffers[0].read(p) for p in (RAW, VALUES))
    of_frame = pack(keys, keys=True).nbytes + pack(values).nbytes
    latest = memory.buffers[0].latest.nbytes  # rows as they are: one frame, and room for a question
    assert max(packed) <= len(memory.buffers) * (of_frame * (486 / N_FRAME + 1) + latest)
    assert max(plain) - max(packed) > (plain[-1] - latest * len(memory.buffers)) / 3
    engine.close()


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize(
    "spec", [f"{place}+{QUANT.format(4)}" for place in (*PLACES, "window:60+keynorm:0.5")]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_packed_stream_goes_on_bit_for_bit(family: str, spec: str) -> None:
    engine = Engine(model_of(family))
    pieces = stream(family, engine.model, 20)
    one, two = engine.memory(plan_cache(spec)), engine.memory(plan_cache(spec))
    for piece in pieces[:12]:
        engine.append(one, piece)
    two.restore(one.snapshot())
    for piece in pieces[12:]:
        logits = [
            engine.branch(each).extend(text(family, engine.model, 5, 1)) for each in (one, two)
        ]
        assert torch.equal(*logits)
        engine.append(one, piece)
        engine.append(two, piece)
    assert same(state(one), state(two))
    engine.close()


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("family", FAMILIES)
def test_questions_leave_a_packed_stream_alone(family: str) -> None:
    engine, spec = (
        Engine(model_of(family)),
        plan_cache("sink:6+window:60+rekv:2+" + QUANT.format(8)),
    )
    alone, asked = engine.memory(spec), engine.memory(spec)
    branches: list[Any] = []
    for i, piece in enumerate(stream(family, engine.model, 20)):
        engine.append(alone, piece)
        engine.append(asked, piece)
        if i % 3 == 0:
            branches = [*branches[-1:], engine.branch(asked)]
            branches[-1].extend(text(family, engine.model, 5, i))
        for branch in branches:
            branch.token(3)
        assert same(state(alone), state(asked))
    engine.close()


def test_what_a_packed_stream_cannot_take_is_said() -> None:
    engine = Engine(model_of("qwen3_vl"))
    with pytest.raises(MmfastError, match="bounds nothing"):
        engine.memory(plan_cache("quant:4"))
    engine.close()
