"""Benchmarks of decoding steps: compiled, under hooks, and a frame of Moshi.

A frame stands beside the lower bound that its bytes set. On the CPU it has a tiny shape; the large
shape is then a row without a time.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mmfast.attach import attach
from mmfast.bench import timing
from mmfast.bench.cases import Case, build, fill_, pick_dtype, unfilled
from mmfast.bench.presets import get_preset
from mmfast.bench.registry import Tick, benchmark, collect, quiet
from mmfast.bench.results import Row, dtype_name
from mmfast.bench.stages import ceilings
from mmfast.bench.timing import frozen, one_thread, quantile
from mmfast.decoding.sampling import Sampling
from mmfast.models.cache_name import CACHE, returned_cache
from mmfast.models.loading import pick_device
from mmfast.models.speech.moshi import MoshiVoice
from mmfast.models.speech.moshi_graphs import (
    GraphRecorder,
    MoshiFrames,
    compile_run,
    frame_bytes,
    graphs_for,
)
from mmfast.models.speech.moshi_steps import UserSound

K = TypeVar("K")


def _rows(
    preset: str,
    frames: int,
    device: str | None,
    asked: Mapping[str, K],
    measure: Callable[[Case, K], Row],
    tick: Tick,
) -> list[Row]:
    """Measure all that is asked, by label, on one shape and one thread."""
    where, shape = pick_device(device), get_preset(preset)
    case = build(preset, ("llm", "decode"), frames, where, pick_dtype("auto", shape, where))
    shared = {"preset": preset, "device": where.type, "visual": case.n}
    clock = "wall, synchronised" if where.type == "cuda" else "processor time"
    shared |= {"dtype": dtype_name(case.visual.dtype), "clock": clock}
    found: list[Row] = []
    with torch.no_grad(), timing.one_thread(), timing.frozen():
        for number, (label, each) in enumerate(asked.items()):
            found.append({**shared, **measure(case, each)})
            tick(f"{preset} {label}", number + 1, len(asked))
    return found


def _clock(case: Case) -> Callable[[], float]:
    return time.perf_counter if case.device.type == "cuda" else time.process_time


SPECS = (None, "evs:0.25", "fastv@llm3:0.5", "holitom_inner@llm3:0.5")
COMPILED = (("tiny", 4, 33, 9), ("llava-onevision-0.5b", 1, 6, 3))  # frames, steps, rounds


@benchmark("decode", "compiled")
def compiled(tick: Tick) -> list[Row]:
    """Compare eager with compiled decoding behind a reduced prompt: one graph, the same tokens."""
    return [row for shape in COMPILED for row in compiled_rows(*shape, tick=tick)]


def compiled_rows(
    preset: str,
    frames: int,
    steps: int,
    rounds: int,
    specs: Sequence[str | None] = SPECS,
    device: str | None = None,
    options: dict[str, Any] | None = None,
    tick: Tick = quiet,
) -> list[Row]:
    """Measure specs on one shape."""

    def measure(case: Case, spec: str | None) -> Row:
        how = default_options(case.device) if options is None else options
        figures = _compiled_row(case, spec, steps, rounds, how)
        return {"steps": steps, "n": rounds, "reduce": spec, **figures}

    asked = {spec or "stock": spec for spec in specs}
    return _rows(preset, frames, device, asked, measure, tick)


def default_options(device: torch.device) -> dict[str, Any]:
    """Return options of torch.compile: on a GPU steps become a CUDA graph."""
    return {"mode": "reduce-overhead"} if device.type == "cuda" else {"backend": "inductor"}


class Compilation(NamedTuple):
    """Graphs and graph breaks of a compiled step."""

    graphs: int
    breaks: int
    again: int  # compilations after the first step
    seconds: float  # of the first step


def _compiled_row(
    case: Case, spec: str | None, steps: int, rounds: int, options: dict[str, Any]
) -> Row:
    run = CompiledRun(case, steps)
    with attach(case.model, spec):
        step = torch.compile(case.model, fullgraph=True, **options)
        eager = run.tokens(case.model)
        mine, did = run.compile(step)
    ways: dict[str, Callable[[], timing.Sample]] = {
        "eager": partial(run.sample, spec, case.model),
        "compiled": partial(run.sample, spec, step),
    }
    for run_once in ways.values():  # attached anew: nothing is to be compiled again
        run_once()
    again = _graphs() - did.graphs
    slow, fast = ([s["ms"] for s in mine] for mine in timing.interleave(ways, rounds).values())
    row: Row = {"eager_ms": median(slow), "compiled_ms": median(fast)}
    row |= {"speedup": timing.paired(slow, fast), "graphs": did.graphs, "breaks": did.breaks}
    row |= {"recompiles": did.again, "recompiles_attached_anew": again, "compile_s": did.seconds}
    compiler = str(options.get("mode") or options.get("backend"))
    return row | {"same_tokens": torch.equal(eager, mine), "compiler": compiler}


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class CompiledRun:
    """Greedy decoding of `steps` tokens of one case on a static cache."""

    def __init__(self, case: Case, steps: int) -> None:
        self.case, self.steps = case, steps
        self.length = int(case.prompt["input_ids"].shape[1])

    def prefill(self) -> tuple[Any, Tensor]:
        """Return a static cache with the prompt in it, and the first token `[1, 1]`."""
        from transformers import StaticCache

        case = self.case
        config = case.model.config.get_text_config()
        # As long as stock `generate` makes it: the prompt before reduction, and the answer.
        cache = StaticCache(config=config, max_cache_len=self.length + self.steps + 1)
        inputs = {**case.prompt, "mm_encoder_outputs": case.features(), "logits_to_keep": 1}
        out = case.model(**inputs, **{CACHE: cache}, use_cache=True)
        return cache, out.logits[:, -1:].argmax(-1)

    def decode(self, step: Any, cache: Any, token: Tensor, first: int, count: int) -> list[Tensor]:
        """Decode `count` tokens from position `first` of the answer."""
        found = [token]
        for position in range(first, first + count):
            where = torch.full((1, 1), self.length + position, device=token.device)
            inputs = {"input_ids": found[-1].clone(), "position_ids": where}
            out = step(**inputs, **{CACHE: cache}, use_cache=True)
            found.append(out.logits[:, -1:].argmax(-1))
        return found[1:]

    def tokens(self, step: Any) -> Tensor:
        """Return all tokens `[1, steps]` that a step decodes."""
        cache, token = self.prefill()
        return torch.cat(self.decode(step, cache, token, 0, self.steps), dim=1)

    def compile(self, step: Any) -> tuple[Tensor, Compilation]:
        """Return all tokens, and the work of torch.compile."""
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        cache, token = self.prefill()
        start = time.perf_counter()
        found = self.decode(step, cache, token, 0, 1)
        seconds, first = time.perf_counter() - start, _graphs()
        found += self.decode(step, cache, found[-1], 1, self.steps - 1)
        breaks = sum(counters["graph_break"].values())
        did = Compilation(_graphs(), breaks, _graphs() - first, seconds)
        return torch.cat(found, dim=1), did

    def sample(self, spec: str | None, step: Any) -> timing.Sample:
        """Measure milliseconds per step, without the first one."""
        with attach(self.case.model, spec):
            cache, token = self.prefill()
            token = self.decode(step, cache, token, 0, 1)[0]
            rest = self.steps - 1
            work = partial(self.decode, step, cache, token, 1, rest)
            _, ms = timing.timed(work, _clock(self.case))
        return {"ms": ms / rest}


class HookJob(NamedTuple):
    """Specs of reducers and KV policies, and their own work at every step."""

    reduce: str | None = None
    cache: str | None = None
    work: str = "none"

    @property
    def name(self) -> str:
        """Both specs."""
        return " | ".join(filter(None, (self.reduce, self.cache)))


JOBS = (
    HookJob("evs:0.25"),
    HookJob("fastv@llm3:0.5"),
    HookJob("holitom_inner@llm3:0.5"),
    HookJob(cache="snapkv:0.5"),
    HookJob(cache="lookm:0.5"),
    HookJob("evs:0.25+fastv@llm3:0.5", "snapkv:0.5"),
    HookJob(cache="sink:4+window:64", work="evicts"),
    HookJob(cache="retrieve:2", work="reads a part"),
    HookJob(cache="quant:8", work="unpacks"),
)
HOOKED = (("tiny", 4, 32, 15), ("llava-onevision-0.5b", 2, 4, 7))  # frames, steps, rounds


@benchmark("decode", "hooks")
def hooks(tick: Tick) -> list[Row]:
    """Overhead of `attach` in one decode step, beside stock on a cache with as many entries.

    Policies that evict, unpack or read a part at every step do work of their own (`work`).
    """
    return [row for shape in HOOKED for row in hook_rows(*shape, tick=tick)]


def hook_rows(
    preset: str,
    frames: int,
    steps: int,
    rounds: int,
    jobs: Sequence[HookJob] = JOBS,
    device: str | None = None,
    tick: Tick = quiet,
) -> list[Row]:
    """Measure jobs on one shape."""
    measure = partial(_hook_row, steps=steps, rounds=rounds)
    return _rows(preset, frames, device, {job.name: job for job in jobs}, measure, tick)


def _hook_row(case: Case, job: HookJob, steps: int, rounds: int) -> Row:
    with attach(case.model, job.reduce, job.cache):
        inputs = {**case.prompt, "mm_encoder_outputs": case.features(), "logits_to_keep": 1}
        held = returned_cache(case.model(**inputs, use_cache=True))
    plain = partial(decode_steps, case, _twin(held), steps)

    def attached() -> timing.Sample:
        with attach(case.model, job.reduce, job.cache):
            return decode_steps(case, held, steps)

    ways: Mapping[str, Callable[[], timing.Sample]] = {
        "twin": plain,
        "attached": attached,
        timing.AGAIN: plain,
    }
    for run in ways.values():
        run()
    taken = timing.interleave(ways, rounds)
    times, again = timing.PairedTimes.of(taken), [each["ms"] for each in taken[timing.AGAIN]]
    mine, base = times.times["attached"], times.base
    pairs = list(zip(times.times["twin"], again, strict=True))
    row: Row = {"job": job.name, "reduce": job.reduce, "cache": job.cache, "work": job.work}
    row |= {"layers": len(held.layers), "held": [_length(layer) for layer in held.layers]}
    row |= {"step_ms": median(mine), "twin_ms": median(base), "noise": times.noise}
    row["overhead"] = timing.paired(mine, base) - 1
    row["overhead_us"] = 1e3 * median(a - b for a, b in zip(mine, base, strict=True))
    row["noise_us"] = 1e3 * median(abs(a - b) for a, b in pairs)
    return row | {"steps": steps, "n": rounds}


def decode_steps(case: Case, cache: Any, steps: int) -> timing.Sample:
    """Measure milliseconds per step on a copy of the cache, without the first step."""
    own = copy.deepcopy(cache)
    case.decode(own, 1)
    _, ms = timing.timed(partial(case.decode, own, steps), _clock(case))
    return {"ms": ms / steps}


def _twin(held: Any) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache()
    for index, layer in enumerate(held.layers):
        keys = layer.keys
        shape = (len(keys), keys.shape[1], _length(layer), keys.shape[3])
        cache.update(*(torch.randn(shape, dtype=keys.dtype, device=keys.device),) * 2, index)
    return cache


def _length(layer: Any) -> int:
    return int(layer.keys.shape[2]) + int(getattr(layer, "extra", 0))


BATCHES, FRAMES, BUDGET_MS = (1, 8, 32), 200, 80.0
GOAL_MS = {1: 6.5, 32: 20.0}  # by batch, on an H200
FEW = 20  # frames by value at least
CHECKED = 8  # frames whose codes are compared between both ways
SEVEN_B: dict[str, Any] = {"audio_vocab_size": 2048}  # the rest is the default of MoshiConfig
_WIDE = ("hidden_size", "vocab_size", "audio_vocab_size", "sliding_window")
_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
_LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
_MIMI = {"codebook_size": 64, "num_filters": 4, "num_quantizers": 8, "upsample_groups": 32}
_MIMI |= dict.fromkeys(("codebook_dim", "vector_quantization_hidden_dimension", "head_dim"), 16)
_MIMI |= {"hidden_size": 32, "intermediate_size": 32, "sliding_window": 50, **_LAYERS}
TINY: dict[str, Any] = {
    **dict.fromkeys((*_WIDE, "max_position_embeddings"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_codebooks"), 4),
    "ffn_dim": 128,
    "depth_decoder_config": {"hidden_size": 32, **_SMALL},
    "audio_encoder_config": {"model_type": "mimi", **_MIMI},
}
Frame = Callable[[Tensor], UserSound]


@benchmark("decode", "moshi-frame")
def moshi_frame(tick: Tick) -> list[Row]:
    """Measure the 7B shape where there is a GPU, else the tiny one."""
    if torch.cuda.is_available():
        return measure_moshi(SEVEN_B, "moshi-7b", BATCHES, FRAMES, "cuda", tick=tick)
    # This one compiles for minutes.
    small = measure_moshi(TINY, "tiny", (1,), 60, "cpu", compile_run, tick=tick)
    small += measure_moshi(TINY, "tiny", (8,), 60, "cpu", tick=tick)
    return [*small, *(unmeasured(SEVEN_B, "moshi-7b", batch) for batch in BATCHES)]


def unmeasured(sizes: Mapping[str, Any], name: str, batch: int) -> Row:
    """Return the bytes of a shape that this machine cannot run, without a time."""
    model = build_moshi(sizes, "meta", torch.bfloat16)
    parts = frame_bytes(model, batch)
    row = {"preset": name, "job": "graphs", "batch": batch, "device": "not measured"}
    mb = sum(parts.values()) / 1e6
    return {**row, "mb": mb, "median_ms": None, "goal_ms": GOAL_MS.get(batch)}


@torch.no_grad()
def measure_moshi(
    sizes: Mapping[str, Any],
    name: str,
    batches: Sequence[int],
    frames: int,
    device: str,
    compiled: GraphRecorder | None = None,
    copy_gb_s: float | None = None,
    tick: Tick = quiet,
) -> list[Row]:
    """Measure every batch and way."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = build_moshi(sizes, device, dtype)
    voice = MoshiVoice(model, text=Sampling(), audio=Sampling())
    bandwidth = copy_gb_s or ceilings(device)["copy_gb_s"]

    def rows(number: int, batch: int) -> Iterator[Row]:
        floor = sum(frame_bytes(model, batch).values()) / bandwidth / 1e6
        shared = {"preset": name, "batch": batch, "device": device, "floor_ms": floor}
        shared |= {"window": model.config.sliding_window, "dtype": dtype_name(dtype)}
        gc.collect()  # buffers of the batch before: a window of 32 streams fills half of a GPU
        if device == "cuda":
            torch.cuda.empty_cache()
        for row in _moshi_rows(voice, batch, frames, device, compiled):
            yield {**shared, **row, "of_floor": floor / row["median_ms"]}
        tick(f"{name} batch {batch}", number + 1, len(batches))

    with one_thread() if device == "cpu" else frozen():
        parts = enumerate(batches)
        return collect((f"batch {batch}", partial(rows, i, batch)) for i, batch in parts)


def _moshi_rows(
    voice: MoshiVoice, batch: int, frames: int, device: str, compiled: GraphRecorder | None
) -> Iterator[Row]:
    pcm = torch.randn(CHECKED + frames, batch, voice.codec.hop) * 0.1
    recorded = "graphs" if device == "cuda" else "static"
    graphs = {recorded: graphs_for(device)} | ({"compiled": compiled} if compiled else {})
    ways: dict[str, Frame] = {"steps": _by_value(voice, batch)}
    spent: dict[str, float] = {"steps": 0.0}
    for way, recorder in graphs.items():
        start = time.perf_counter()
        ready = MoshiFrames(voice, batch, recorder)
        ready.frame(pcm[0])
        spent[way] = time.perf_counter() - start
        ready.reset()
        ways[way] = ready.frame
    said = {way: [frame(p).codes.clone() for p in pcm[:CHECKED]] for way, frame in ways.items()}
    times = _times(ways, pcm[CHECKED:], device)
    for way, ms in times.items():
        same = torch.stack(said[way]) == torch.stack(said["steps"])
        middle, late, cuda = median(ms), quantile(ms, 0.99), device == "cuda"
        row = {"job": way, "median_ms": middle, "p99_ms": late, "p99_of_median": late / middle}
        row |= {"speedup": median(times["steps"]) / middle, "prepare_s": spent[way], "n": len(ms)}
        row |= {"goal_ms": GOAL_MS.get(batch) if cuda else None, "budget_ms": BUDGET_MS}
        clock = "wall, sound on the host" if cuda else "processor time"
        yield {**row, "same_codes": float(same.float().mean()), "clock": clock}


def _times(ways: Mapping[str, Frame], pcm: Tensor, device: str) -> dict[str, list[float]]:
    clock = time.perf_counter if device == "cuda" else time.process_time
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number, each in enumerate(pcm):
        for way, frame in ways.items():
            if way == "steps" and number >= max(FEW, len(pcm) // 8):
                continue  # frames by value take ten times as long, and a median needs few
            start = clock()
            frame(each).pcm.cpu()
            times[way].append(1e3 * (clock() - start))
    return times


def _by_value(voice: MoshiVoice, batch: int) -> Frame:
    state = voice.start(batch)

    def frame(pcm: Tensor) -> UserSound:
        nonlocal state
        state, heard = voice.step(state, pcm)
        return heard

    return frame


def build_moshi(sizes: Mapping[str, Any], device: str, dtype: torch.dtype) -> Any:
    """Build `MoshiForConditionalGeneration` with random weights."""
    from transformers import MoshiConfig, MoshiForConditionalGeneration

    with unfilled(device, dtype):
        model: Any = MoshiForConditionalGeneration(MoshiConfig(**sizes))
    if device != "meta":
        fill_(model)
        for weight in model.depth_decoder.parameters():
            if weight.ndim == 3:  # weights of all codebooks side by side: the fan-in is of one
                weight.mul_(weight.shape[1] ** 0.5)
        source = torch.Generator(device).manual_seed(0)
        for name, table in model.audio_encoder.named_buffers():
            if name.endswith("embed_sum"):  # codebooks are buffers, not parameters
                table.normal_(generator=source)
    return model.eval()
