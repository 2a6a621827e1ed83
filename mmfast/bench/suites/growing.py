"""Benchmark of decoding steps on the cache of pipelines, which grows in place."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache

from mmfast.bench import timing
from mmfast.bench.cases import Case, build
from mmfast.bench.registry import Tick, benchmark, quiet
from mmfast.bench.results import Row, dtype_name
from mmfast.models.cache_name import CACHE
from mmfast.models.kv.growing import growing_cache

PRESET = "llava-onevision-0.5b"
SIZES = ((1, 1024), (1, 4096), (1, 16384), (8, 1024))  # answers at once, entries of each
ROUNDS, STEPS = 5, 3
STOCK, OURS = "stock", "growing"


@benchmark("decode", "growing")
def growing(tick: Tick) -> list[Row]:
    """Time steps on both caches, filled with the same random entries."""
    return growing_rows(PRESET, SIZES, ROUNDS, tick)


def growing_rows(
    preset: str, sizes: tuple[tuple[int, int], ...], rounds: int, tick: Tick = quiet
) -> list[Row]:
    """Measure caches of each size on one shape."""
    case = build(preset, ("llm", "decode"), 1, torch.device("cpu"), torch.bfloat16)
    found: list[Row] = []
    with torch.inference_mode(), timing.one_thread(), timing.frozen():
        for number, (batch, tokens) in enumerate(sizes):
            tick(f"{batch} x {tokens} entries", number, len(sizes))
            found += _rows(case, preset, batch, tokens, rounds)
    return found


def _rows(case: Case, preset: str, batch: int, tokens: int, rounds: int) -> list[Row]:
    ways = {
        name: partial(_steps, case, _filled(case, batch, tokens, name != OURS), batch)
        for name in (STOCK, timing.AGAIN, OURS)
    }
    for run in ways.values():  # the room of the cache is made once
        run()
    times = timing.PairedTimes.of(timing.interleave(ways, rounds))
    shared: Row = {"preset": preset, "device": "cpu", "dtype": dtype_name(torch.bfloat16)}
    shared |= {"tokens": tokens, "batch": batch, **timing.ON_ONE_THREAD}
    return [{**shared, **times.row(name)} for name in (STOCK, OURS)]


def _filled(case: Case, batch: int, tokens: int, stock: bool) -> DynamicCache:
    """A cache of so many random entries in every layer."""
    text = case.model.config.get_text_config()
    cache = DynamicCache(config=text) if stock else growing_cache(case.model, {})[CACHE]
    width = text.hidden_size // text.num_attention_heads
    source = torch.Generator().manual_seed(tokens)
    for index in range(text.num_hidden_layers):
        shape = (batch, text.num_key_value_heads, tokens, width)
        pair = [torch.randn(shape, generator=source).bfloat16() for _ in range(2)]
        cache.update(*pair, index)
    return cache


def _steps(case: Case, cache: DynamicCache, batch: int) -> timing.Sample:
    ids: Tensor = torch.arange(batch)[:, None] + int(cache.get_seq_length())
    clock, _ = timing.clock_of(case.device, 1)

    def run() -> None:
        for _ in range(STEPS):
            case.model(input_ids=ids, **{CACHE: cache}, use_cache=True)

    return {"ms": timing.timed(run, clock)[1] / STEPS}
