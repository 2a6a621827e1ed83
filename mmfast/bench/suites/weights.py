"""Benchmarks of packed weights: a step and a prompt of a whole shape, and single products.

The first compares what users get, the second the kernels of torch that were and were not chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.bench import timing
from mmfast.bench.cases import Case, build
from mmfast.bench.registry import Tick, benchmark, over, quiet
from mmfast.bench.results import Row
from mmfast.bench.suites.decode import decode_steps
from mmfast.bench.suites.step_selection import filled, steps
from mmfast.models.cache_name import CACHE, returned_cache
from mmfast.models.decoder.few_rows import few_rows
from mmfast.models.kv.room import growing_cache
from mmfast.models.packing import PackedWeights, WeightPlan, packed
from mmfast.ops.weight_forms import GROUP, Int4Weights, pack, rounded

SHAPE = "llava-onevision-0.5b"
FORMS = ("int8", "int4", "float16", "int8-dynamic")
JOINT_FORMS = ("bfloat16", "int8", "int4", "int8-dynamic")


@benchmark("decode", "weights")
def weights(tick: Tick) -> list[Row]:
    """Time steps and prompts on packed weights beside float32, and the error of their logits.

    Weights alone are rounded here; `weights-more` has the other two forms.
    """
    return weight_rows(SHAPE, 1, FORMS[:2], 5, tick=tick)


@benchmark("decode", "weights-more")
def more_weights(tick: Tick) -> list[Row]:
    """The same of float16, which rounds next to nothing, and of rounded activations."""
    return weight_rows(SHAPE, 1, FORMS[2:], 5, tick=tick)


@benchmark("decode", "weights-joint")
def joint_weights(tick: Tick) -> list[Row]:
    """Time steps and prompts with layers that read the same input as one product, and as several.

    The model is in bfloat16; the baseline of each form is that form with separate products.
    """
    return joint_rows(SHAPE, 1, JOINT_FORMS, 7, tick)


def joint_rows(
    preset: str, frames: int, forms: Sequence[str], rounds: int, tick: Tick = quiet
) -> list[Row]:
    """Compare both for each form on one shape."""
    case = build(preset, ("llm", "decode"), frames, dtype=torch.bfloat16)
    found = list[Row]()
    with torch.no_grad(), timing.one_thread(), timing.frozen():
        exact, cache = _prefill(case)
        for number, form in enumerate(forms):
            tick(f"{preset} {form}", number, len(forms))
            packs: dict[str, PackedWeights] = {}
            for name, joint in (("separate", False), (form, True)):
                with packed(case.model, WeightPlan(form, form, joint=joint)) as packs[name]:
                    pass
            packs = {"separate": packs["separate"], timing.AGAIN: packs["separate"], **packs}

            def compared(
                job: Callable[[], timing.Sample], count: int, packs: Any = packs
            ) -> timing.PairedTimes:
                jobs = {name: partial(_inside, case, each, job) for name, each in packs.items()}
                return timing.PairedTimes.of(timing.interleave(jobs, count))

            steps = compared(partial(decode_steps, case, cache, 4), rounds)
            prompts = compared(partial(_timed_prefill, case, exact), timing.FEWEST)
            row: Row = {"preset": preset, "visual": case.n, "dtype": "bfloat16"}
            row |= {**timing.ON_ONE_THREAD, **steps.row(form), "base_ms": median(steps.base)}
            row |= {"prefill_ms": median(prompts.times[form]), "prefill_noise": prompts.noise}
            found.append(row | {"prefill_speedup": prompts.speedup(form)})
    return found


@benchmark("decode", "few-rows")
def rows_at_once(tick: Tick) -> list[Row]:
    """Time steps of several answers of 500 tokens, and of one, with float32 products in pieces."""
    return at_once_rows(SHAPE, (1, 2, 4, 8, 12), 500, 5, tick)


def at_once_rows(
    preset: str, batches: Sequence[int], tokens: int, rounds: int, tick: Tick = quiet
) -> list[Row]:
    """Compare steps of so many rows with those of stock products."""
    case, found = build(preset, ("llm", "decode"), 1, torch.device("cpu"), torch.float32), []
    with torch.inference_mode(), timing.one_thread(), timing.frozen():
        for number, batch in enumerate(batches):
            tick(f"{batch} answers", number, len(batches))
            caches = [growing_cache(case.model, {})[CACHE] for _ in range(2)]
            stock, mine = (partial(steps, case, filled(case, tokens, batch, c)) for c in caches)

            def pieces(run: Callable[[], timing.Sample] = mine) -> timing.Sample:
                with few_rows(case.model):
                    return run()

            jobs: dict[str, Callable[[], timing.Sample]] = {"stock": stock, timing.AGAIN: stock}
            jobs["in pieces"] = pieces
            for run in jobs.values():  # the room of the cache is made once
                run()
            times = timing.PairedTimes.of(timing.interleave(jobs, rounds))
            row: Row = {"preset": preset, "device": "cpu", "dtype": "float32", "batch": batch}
            row |= {"tokens": tokens, **timing.ON_ONE_THREAD, **times.row("in pieces")}
            found.append(row | {"base_ms": median(times.base)})
    return found


def weight_rows(
    preset: str, frames: int, forms: Sequence[str], rounds: int, tick: Tick = quiet
) -> list[Row]:
    """Measure forms in turn on one shape."""
    case = build(preset, ("llm", "decode"), frames)
    packs: dict[str, PackedWeights] = {}
    with torch.no_grad(), timing.one_thread(), timing.frozen():
        for number, form in enumerate(forms):
            tick(f"{preset} pack {form}", number, len(forms))
            with packed(case.model, form) as packs[form]:
                pass
        exact, cache = _prefill(case)
        step = partial(decode_steps, case, cache, 2)
        tick(f"{preset} steps", 0, 2)
        steps = timing.PairedTimes.of(timing.interleave(_jobs(case, packs, step), rounds))
        tick(f"{preset} prompts", 1, 2)
        read = partial(_timed_prefill, case, exact)
        samples = timing.interleave(_jobs(case, packs, read), 1)
    prompts, found = timing.PairedTimes.of(samples), list[Row]()
    for form in ("float32", *forms):
        held = _held(case) if form == "float32" else packs[form].after
        row: Row = {"preset": preset, "visual": case.n, "dtype": "float32", **timing.ON_ONE_THREAD}
        row |= {**steps.row(form), "prompt": int(case.prompt["input_ids"].shape[1])}
        row |= {"prefill_ms": median(prompts.times[form]), "prefill_noise": prompts.noise}
        row |= {"prefill_speedup": prompts.speedup(form), "weights_mb": held / 1e6}
        found.append(row | {"logit_error": samples[form][0]["error"]})
    return found


def _jobs(
    case: Case, packs: Mapping[str, PackedWeights], job: Callable[[], timing.Sample]
) -> dict[str, Callable[[], timing.Sample]]:
    """The same work in float32, twice, and on packed weights."""
    jobs = {"float32": job, timing.AGAIN: job}
    return {**jobs, **{form: partial(_inside, case, each, job) for form, each in packs.items()}}


def _held(case: Case) -> int:
    """Bytes of the decoder's layers; a tied head has none of its own."""
    layers = case.model.get_decoder().layers
    return sum(p.nbytes for layer in layers for p in layer.parameters() if p.ndim == 2)


def _inside(case: Case, found: PackedWeights, job: Callable[[], timing.Sample]) -> timing.Sample:
    with packed(case.model, found):
        return job()


def _prefill(case: Case) -> tuple[Tensor, Any]:
    inputs = {**case.prompt, "mm_encoder_outputs": case.features(), "logits_to_keep": 1}
    out = case.model(**inputs, use_cache=True)
    return out.logits[0, -1], returned_cache(out)


def _timed_prefill(case: Case, exact: Tensor) -> timing.Sample:
    clock, _ = timing.clock_of(case.device, 1)
    (logits, _), ms = timing.timed(partial(_prefill, case), clock)
    return {"ms": ms, "error": _error(logits, exact)}


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


# outputs, inputs and copies: enough for the weights to leave the processor's caches
PRODUCTS = ((4864, 896, 12), (896, 4864, 12), (896, 896, 24), (152000, 896, 1))
ROWS = (1, 8)


@benchmark("decode", "weight-kernels")
def weight_kernels(tick: Tick) -> list[Row]:
    """Time single products of the 0.5B shape in every kernel, the ones that lose among them."""
    cases = [(shape, m) for shape in PRODUCTS for m in ROWS]
    return over(cases, lambda case: product_rows(*case), tick)


def product_rows(shape: tuple[int, int, int], rows: int, rounds: int = 5) -> list[Row]:
    """Time `rows` rows through `copies` weights in every kernel; milliseconds a product."""
    outputs, inputs, copies = shape
    noise = torch.Generator().manual_seed(0)
    parts = [torch.randn(outputs, inputs, generator=noise) * inputs**-0.5 for _ in range(copies)]
    x = torch.randn(rows, inputs, generator=noise)
    ways = _ways(x, parts)
    exact = x.double() @ parts[0].double().t()
    errors = {name: {"error": _error(way(0).double(), exact)} for name, way in ways.items()}
    shared = {"preset": f"{outputs} x {inputs}", "rows": rows}
    jobs = {name: partial(_all, way, copies) for name, way in ways.items()}
    found = timing.compare_jobs(jobs, rounds, shared, extra=errors)
    keys = ("median_ms", "p20_ms", "p80_ms")
    return [{**row, **{key: row[key] / copies for key in keys}} for row in found]


def _all(way: Callable[[int], Tensor], copies: int) -> None:
    for number in range(copies):
        way(number)


def _ways(x: Tensor, parts: Sequence[Tensor]) -> dict[str, Callable[[int], Tensor]]:
    """Products with weight `number` by kernel."""
    forms = {name: [pack(name, each) for each in parts] for name in (*FORMS, "bfloat16")}
    whole = [rounded(each) for each in parts]
    aten = torch.ops.aten

    def int8_kernel(dtype: torch.dtype) -> Callable[[int], Tensor]:
        found = [(each, scale.to(dtype)) for each, scale in whole]
        return lambda n: aten._weight_int8pack_mm(x.to(dtype), *found[n])

    def of(name: str) -> Callable[[int], Tensor]:
        return lambda n: forms[name][n].product(x)

    ways: dict[str, Callable[[int], Tensor]] = {"float32": lambda n: F.linear(x, parts[n])}
    ways |= {f"`{name}`": of(name) for name in forms}
    ways["int8pack, float32 rows"] = int8_kernel(torch.float32)
    ways["int8pack, bfloat16 rows"] = int8_kernel(torch.bfloat16)
    four = [each for each in forms["int4"] if isinstance(each, Int4Weights)]
    if four:
        scales = [each.scales.float() for each in four]
        run = aten._weight_int4pack_mm_for_cpu
        ways["int4pack, float32 rows"] = lambda n: run(x, four[n].packed, GROUP, scales[n])
    return ways
