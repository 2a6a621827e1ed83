"""Benchmark of a decode step on a long cache of which policies of role `select` read a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from mmfast.attach import attach
from mmfast.bench import timing
from mmfast.bench.cases import Case, build
from mmfast.bench.registry import Tick, benchmark, quiet
from mmfast.bench.results import Row, dtype_name
from mmfast.models.cache_name import CACHE
from mmfast.models.packing import PackedLinear, PackedWeights, packed
from mmfast.ops.weight_forms import GROUP, Int4Weights, Int8Weights, WeightForm

STEPS = 2  # of a sample, behind one that is not timed
FLOOR = 16  # entries of the cache that stands for none


class LongCache(NamedTuple):
    """Entries of a cache, the policies that read it, and rounds."""

    tokens: int
    specs: tuple[str, ...]
    rounds: int = 3
    packed: tuple[tuple[str, str], ...] = ()  # a form of weights beside a policy


_ALL = (
    "quest:0.1",
    "quest:0.1?skip=0",
    "tokenselect:0.1",
    "tidaldecode:0.1",
    "twilight:0.85?base=0.1",
    "kinetics:0.1",
    "specache:0.1",
    "slimfer:0.1",
)
# The whole path: what a step reads of weights in fewer bits, and of the cache in part.
_PACKED = tuple((form, "quest:0.1?skip=0") for form in ("int8", "int4"))
PRESET = "llava-onevision-0.5b"


@benchmark("decode", "selection")
def selection(tick: Tick) -> list[Row]:
    """Compare a decode step of the stock model with one that reads a part of a long cache.

    The cache is filled with random keys and values, and every step reads another random token.
    """
    return selection_rows(PRESET, torch.float32, LongCache(16384, _ALL, packed=_PACKED), tick)


@benchmark("decode", "selection-bfloat16")
def selection_bfloat16(tick: Tick) -> list[Row]:
    """Compare the same in bfloat16."""
    return selection_rows(PRESET, torch.bfloat16, LongCache(16384, _ALL, packed=_PACKED), tick)


@benchmark("decode", "selection-32k")
def selection_32k(tick: Tick) -> list[Row]:
    """Compare the same on a cache that is twice as long."""
    return selection_rows(PRESET, torch.float32, LongCache(32768, _ALL[:2]), tick)


def selection_rows(
    preset: str, dtype: torch.dtype, cache: LongCache, tick: Tick = quiet
) -> list[Row]:
    """Measure a cache on one shape: a row for each policy, and one of a step with next to none."""
    tick("building", 0, 2)
    case = build(preset, ("llm", "decode"), 1, torch.device("cpu"), dtype)
    tick(f"{cache.tokens} entries, {dtype_name(dtype)}", 1, 2)
    with torch.no_grad(), timing.one_thread(), timing.frozen():
        return _rows(case, preset, cache)


def _rows(case: Case, preset: str, long: LongCache) -> list[Row]:
    stock, mine = (filled(case, long.tokens) for _ in range(2))
    floor = filled(case, FLOOR)
    reads: dict[str, list[Any]] = {}

    packs: dict[str, PackedWeights] = {}
    for form, _ in long.packed:
        with packed(case.model, form) as packs[form]:
            pass
    beside = {f"{spec}, weights {form}": (form, spec) for form, spec in long.packed}
    weights = dict.fromkeys(("no cache", *long.specs), decoder_bytes(case.model))
    weights |= {way: step_bytes(packs[form]) for way, (form, _) in beside.items()}

    def policy(way: str, spec: str) -> timing.Sample:
        with attach(case.model, cache=spec) as trace:
            sample = steps(case, mine)
        reads.setdefault(way, []).extend(trace.reads[1:])
        return sample

    def both(way: str, form: str, spec: str) -> timing.Sample:
        with packed(case.model, packs[form]):
            return policy(way, spec)

    ways: dict[str, Callable[[], timing.Sample]] = {
        "stock": partial(steps, case, stock),
        timing.AGAIN: partial(steps, case, stock),
        "no cache": partial(steps, case, floor),
        **{spec: partial(policy, spec, spec) for spec in long.specs},
        **{way: partial(both, way, *parts) for way, parts in beside.items()},
    }
    for run in ways.values():
        run()
    taken = timing.interleave(ways, long.rounds)
    times = {way: [each["ms"] for each in found] for way, found in taken.items()}
    base, least = times.pop("stock"), median(times["no cache"])
    again = times.pop(timing.AGAIN)
    noise = median(abs(a - b) / b for a, b in zip(again, base, strict=True))
    stock_bytes = weights["no cache"]
    whole = sum(layer.keys.nbytes + layer.values.nbytes for layer in stock.layers)
    shared: Row = {"preset": preset, "device": "cpu", "dtype": dtype_name(case.visual.dtype)}
    shared |= {"tokens": long.tokens, "clock": timing.PROCESSOR_CLOCK, "threads": 1}
    shared |= {"n": long.rounds, "stock_ms": median(base), "noise": noise}
    shared |= {"cache_mb": whole / 1e6}
    found = []
    for way, ms in times.items():
        seen = reads.get(way, [])
        nbytes = sum(each.nbytes for each in seen) / len(seen) if seen else 0
        row = {**shared, "job": way, "step_ms": median(ms), "read_mb": nbytes / 1e6}
        row |= {"weights_mb": weights[way] / 1e6, "speedup": timing.paired(base, ms)}
        row["ideal"] = (stock_bytes + whole) / (weights[way] + nbytes)
        # The stock cache is copied at every step: read, written, and read by attention.
        row["ideal_copied"] = (stock_bytes + 3 * whole) / (weights[way] + nbytes)
        if seen:
            row["read_share"] = sum(each.read / each.held for each in seen) / len(seen)
        if seen and way not in beside:  # the rest of the step is another one there
            row["attention_speedup"] = (median(base) - least) / max(1e-3, median(ms) - least)
        found.append(row)
    return found


def filled(case: Case, tokens: int, batch: int = 1, cache: Any = None) -> Any:
    """A cache, the stock one if none is given, with so many random entries in every layer."""
    from transformers import DynamicCache

    text = get_text(case)
    heads, layers = text.num_key_value_heads, text.num_hidden_layers
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    source = torch.Generator().manual_seed(tokens)
    cache = DynamicCache() if cache is None else cache
    for index in range(layers):
        shape = (batch, heads, tokens, width)
        pair = (torch.randn(shape, generator=source).to(case.visual.dtype) for _ in range(2))
        cache.update(*pair, index)
    return cache


def get_text(case: Case) -> Any:
    """The config of the text model."""
    return case.model.config.get_text_config()


def steps(case: Case, cache: Any) -> timing.Sample:
    """Milliseconds of a step, each with another token, without the first one."""

    def run(count: int) -> None:
        for _ in range(count):
            held = int(cache.get_seq_length())
            token = (1000 + held * 7919 % 50_000) % get_text(case).vocab_size
            ids = torch.full((len(cache.layers[0].keys), 1), token)
            case.model(input_ids=ids, **{CACHE: cache}, use_cache=True)

    run(1)
    _, ms = timing.timed(partial(run, STEPS), timing.clock_of(case.device, 1)[0])
    return {"ms": ms / STEPS}


def step_bytes(found: PackedWeights) -> int:
    """Bytes of packed weights that a step reads: those for prompts are held beside some."""
    layers = [layer for *_, layer in found.places if isinstance(layer, PackedLinear)]
    return form_bytes({layer: layer.few for layer in layers if layer.few is not None})


def form_bytes(forms: Mapping[Any, WeightForm]) -> int:
    """Bytes that a step reads of linear layers in such forms."""
    share = {Int8Weights: 1.0, Int4Weights: 0.5 + 4 / GROUP}  # a scale and a middle a group
    sizes = ((share[type(form)], each) for each, form in forms.items())
    return int(sum(part * each.in_features * each.out_features for part, each in sizes))


def decoder_bytes(model: Any) -> int:
    """Bytes of the weights that a decode step reads: decoder layers, norm and head."""
    decoder = model.get_decoder()
    inside = {id(p): p for p in decoder.layers.parameters()}
    inside |= {id(p): p for p in (*decoder.norm.parameters(), *model.lm_head.parameters())}
    return sum(p.nbytes for p in inside.values())
