"""Work of a frame where tokens leave one by one: the same however many frames have one left."""

from __future__ import annotations

import sys
from functools import partial
from statistics import median
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_checks import model_of, stream

from mmfast.bench.timing import counted
from mmfast.caches.plan import plan_cache
from mmfast.streams.buffers import live, walk
from mmfast.streams.engine import Engine
from mmfast.streams.families import starts
from mmfast.streams.memory import Memory
from mmfast.streams.rows import LiveRows
from mmfast.streams.script import Piece

FULL, LATE = 16, 150  # pieces; the window holds ten whole frames


def _work(engine: Engine, memory: Memory, pieces: list[Piece]) -> tuple[float, float]:
    """Operations of torch and calls of Python functions that a piece costs; medians.

    Now and then a piece moves all rows to lower places, which belongs to none in particular.
    """
    calls, operations, spent = 0, list[float](), list[float]()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for piece in pieces:
        operations.append(counted(partial(engine.append, memory, piece)).count)
        calls = 0
        sys.setprofile(count)
        try:
            engine.append(memory, piece)
        finally:
            sys.setprofile(None)
        spent.append(calls)
    return median(operations), median(spent)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "qwen3_vl"])
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


class _Mover:
    """Where rows are told to move to."""

    def __init__(self) -> None:
        self.to = torch.empty(0)

    def move_rows(self, layer: int, buffer: Any, first: int, to: torch.Tensor) -> None:
        self.to = to


_PLACES = st.lists(st.integers(0, 9), min_size=3, max_size=3)
_PIECES = st.tuples(_PLACES, _PLACES, st.booleans(), st.booleans())


@settings(max_examples=200)
@given(drawn=st.lists(_PIECES, min_size=1, max_size=20))
def test_tables_close_up_as_pieces_follow_each_other(drawn: list[Any]) -> None:
    """Fresh and level pieces in any order, of which some tokens stand anywhere."""
    pieces = [
        Piece(
            torch.zeros(2, 4),
            torch.stack([torch.zeros(3, dtype=torch.int64), torch.tensor(far)], 1),
            torch.tensor(advance),
            "text",
            fresh=fresh,
            level=level,
        )
        for far, advance, fresh, level in drawn
    ]
    blocks = [live(piece, i, (1000 + i,) * 3) for i, piece in enumerate(pieces)]
    rows, mover = LiveRows.of(blocks, 1, 3), _Mover()
    assert rows.close_up(mover, [None], 0.0)  # type: ignore[arg-type, list-item]
    expected = torch.tensor(walk(blocks, 3)).T
    assert torch.equal(rows.start, expected)
    # A frame of which tokens have been left out is known to be higher than its tokens are.
    highest = [tuple(piece.relative.amax(1).tolist()) for piece in pieces]
    if highest == [block.highest for block in blocks]:
        assert torch.equal(expected, torch.stack(starts(pieces)[:-1], 1))
    every = torch.cat([p.relative + s[:, None] for p, s in zip(pieces, expected.T, strict=True)], 1)
    assert torch.equal(mover.to, every)
