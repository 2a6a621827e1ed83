"""Work of a frame where tokens leave one by one: the same however many frames have one left."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from stream_checks import model_of, stream

from mmfast.bench.timing import counted
from mmfast.caches.plan import plan_cache
from mmfast.streams.engine import Engine
from mmfast.streams.memory import Memory
from mmfast.streams.script import Piece

FULL, LATE = 16, 150  # pieces; the window holds ten whole frames


def _work(engine: Engine, memory: Memory, pieces: list[Piece]) -> tuple[float, float]:
    """Operations of torch and calls of Python functions that a piece costs on the average."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def run() -> None:
        for piece in pieces:
            engine.append(memory, piece)

    operations = counted(run).count
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return operations / len(pieces), calls / len(pieces)


@pytest.mark.parametrize("family", ["llava_onevision"])
def test_a_frame_costs_as_many_operations_however_many_frames_have_a_token_left(
    family: str,
) -> None:
    torch.manual_seed(0)
    engine = Engine(model_of(family))
    memory = engine.memory(plan_cache("sink:6+keynorm:120"), slack=0.0)
    pieces = [p for p in stream(family, engine.model, LATE) if p.kind == "frame"]
    for piece in pieces[:FULL]:
        engine.append(memory, piece)
    assert memory.tokens() == 126
    few = memory.stats()["live_blocks"]
    early = _work(engine, memory, pieces[FULL : FULL + 6])
    for piece in pieces[FULL + 6 : -6]:
        engine.append(memory, piece)
    late = _work(engine, memory, pieces[-6:])
    assert memory.stats()["live_blocks"] > 1.2 * few  # else nothing was tried
    assert late[0] <= early[0] * 1.02 and late[1] <= early[1] * 1.05


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
def test_blocks_are_made_of_the_rows_and_rows_of_the_blocks(family: str) -> None:
    engine = Engine(model_of(family))
    memory = engine.memory(plan_cache("sink:6+keydiff:48"))
    for piece in stream(family, engine.model, 20):
        engine.append(memory, piece)
        blocks = memory.blocks
        assert len(blocks) == memory.stats()["live_blocks"]
        for layer, buffer in enumerate(memory.buffers):
            assert sum(block.size_at(layer) for block in blocks) == buffer.length
            places = torch.cat([block.positions(layer) for block in blocks], 1)
            turned = memory.turner.rotate(layer, buffer.read(0), places)
            torch.testing.assert_close(turned, buffer.read(1), atol=1e-5, rtol=1e-5)
    engine.close()
