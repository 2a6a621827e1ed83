"""Ten thousand evictions, each with a re-basing: no error may add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stream_checks import text
from stream_math import rope
from tiny_models import build
from torch import Tensor

from mmfast.caches.plan import plan_cache
from mmfast.streams.buffers import LiveBlock, Turner, highest
from mmfast.streams.engine import Engine
from mmfast.streams.memory import Memory

N, SINK, WINDOW = 2, 3, 12
EVICTIONS = 10_000
FAMILY = {"llava_onevision": 1, "qwen2_5_vl": 3, "qwen3_vl": 3}


def engine_of(family: str, dtype: torch.dtype) -> Engine:
    return Engine(build(family, layers=1).model.to(dtype))


def endless(
    memory: Memory, turner: Turner, dtype: torch.dtype, evictions: int
) -> dict[int, Tensor]:
    """Push random keys until so many blocks have left; the keys of the last blocks."""
    generator, last = torch.Generator().manual_seed(0), {}
    axes = turner.axes
    relative, advance = torch.arange(N).expand(axes, N), (N,) * axes
    kinds, top = torch.zeros(N, dtype=torch.int64), highest(relative, advance)
    with torch.no_grad():
        while memory.counts["evicted_blocks"] < evictions:
            start = memory.next_start
            block = LiveBlock(
                memory.number, "text", None, relative, advance, False, False, top, kinds, start
            )
            raw = torch.randn(2, N, 8, generator=generator).to(dtype)
            last[block.number] = raw
            last.pop(block.number - 50, None)
            memory.buffers[0].write(raw, turner.rotate(0, raw, block.positions(0)), raw)
            memory.admit(block)
    return last


def drift(memory: Memory, turner: Turner, last: dict[int, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The window's rotated keys: those held, rotated once from raw, and exact in float64."""
    window = [block for block in memory.blocks if block.number in last]
    raw = torch.cat([last[block.number] for block in window], 1)
    places = torch.cat([block.positions(0) for block in window], 1)
    held = memory.buffers[0].read(1)[:, -raw.shape[1] :]
    return held, turner.rotate(0, raw, places), places


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3_vl", torch.float32), ("llava_onevision", torch.bfloat16)],
    ids=["fp32", "bf16"],
)
def test_no_drift(family: str, dtype: torch.dtype) -> None:
    engine = engine_of(family, dtype)
    memory = engine.memory(plan_cache(f"sink:{SINK}+window:{WINDOW}"), slack=0)
    last = endless(memory, engine.turner, dtype, EVICTIONS)
    stats = memory.stats()
    assert stats["rebases"] >= EVICTIONS
    assert stats["position"] < SINK + WINDOW + 2 * N
    held, once, places = drift(memory, engine.turner, last)
    assert held.shape[1] == WINDOW
    assert torch.equal(held, once)
    parameters = engine.decoder.config.rope_parameters
    raw = torch.cat([last[b.number] for b in memory.blocks if b.number in last], 1)
    exact = rope(raw, places, parameters)
    worst = (held.double() - exact).abs().max()
    assert worst <= 4 * torch.finfo(dtype).eps * raw.abs().max()  # of one rotation: cos, sin, sum
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rotation_in_place_would_drift(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: keys turned on by the distance they move, from where they stand."""

    def in_place(
        self: Turner, layer: int, buffer: Any, blocks: Any, starts: Any, known: Any = None
    ) -> None:
        moved = [start != block.start for block, start in zip(blocks, starts, strict=True)]
        first, end = moved.index(True), len(moved) - moved[::-1].index(True)
        at = sum(block.size_at(layer) for block in blocks[:first])
        pairs = list(zip(blocks, starts, strict=True))[first:end]
        stop = at + sum(block.size_at(layer) for block, _ in pairs)
        steps = torch.cat(
            [block.positions(layer, start) - block.positions(layer) for block, start in pairs], 1
        )
        rows = buffer.read(1, at, stop)
        rows.copy_(self.rotate(layer, rows.clone(), steps))

    engine = engine_of("llava_onevision", dtype)
    monkeypatch.setattr(Turner, "move_layer", in_place)
    memory = engine.memory(plan_cache(f"sink:{SINK}+window:{50 * N}"), slack=0)
    last = endless(memory, engine.turner, dtype, 60)
    held, once, _ = drift(memory, engine.turner, last)
    assert not torch.equal(held, once)
    oldest = (held[:, 0].double() - once[:, 0].double()).abs().max()
    assert oldest > 4 * torch.finfo(dtype).eps
    engine.close()


@pytest.mark.parametrize("family", FAMILY)
def test_positions_stay_bounded_and_keys_are_those_of_their_places(family: str) -> None:
    engine = engine_of(family, torch.bfloat16)
    memory = engine.memory(plan_cache("sink:3+window:24"))
    rebases = []
    for i in range(120):
        engine.append(memory, text(family, engine.model, 3, i))
        rebases.append(memory.counts["rebases"])
        assert memory.stats()["position"] <= 1.25 * 27 + 3
        places = torch.cat([block.positions(0) for block in memory.blocks], 1)
        turned = engine.turner.rotate(0, memory.buffers[0].read(0), places)
        assert torch.equal(turned, memory.buffers[0].read(1))
    assert 20 < rebases[-1] < 100
    engine.close()
