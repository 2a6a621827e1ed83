"""Runs of one stage of a case, its memory, and the ceilings of the machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmfast.attach import attach
from mmfast.bench.cases import TOWER_STAGES, Case, empty_model, feature_rows, video_grid
from mmfast.bench.presets import Preset
from mmfast.bench.timing import Clock, T, clock_of, peak_now, reset_peak, timed, timed_by_events
from mmfast.core.errors import MmfastError
from mmfast.core.spec import Spec, expand
from mmfast.core.trace import free_bytes, synchronize
from mmfast.models.cache_name import returned_cache
from mmfast.models.cost import decode_bytes, prefill_flops, tower_blocks, tower_flops
from mmfast.models.encoder_names import encode_media
from mmfast.models.reduction.decoder_signals import INNER
from mmfast.models.reduction.tower_signals import from_tower

GROUPS = {"vit": ("vit",), "llm": ("llm", "decode"), "ttft": ("ttft",)}
DECODE_STEPS = 8


@dataclass
class RunOutcome:
    """The result of one run."""

    ms: dict[str, float]  # milliseconds by stage; `decode` is per token
    values: Tensor  # logits of the last position `[1, 1, V]`, or tower features `[N, D]`
    reducing_ms: float = 0.0  # time of choosing and compacting inside the run, at all sites
    share: float = 0.0  # its share of the run, both by the wall clock
    # tokens in each decoder layer; empty for the tower
    lengths: list[int] = field(default_factory=list)
    # tokens leaving each tower block, where they were observed
    leaving: list[int] = field(default_factory=list)


class MeasuredStage:
    """One group of stages that one run of the model measures together.

    `vit` is the tower with its projector, `llm` the prefill behind it and one logit row, followed
    by `decode`; `ttft` both halves. `attach` is entered outside the clock.
    """

    def __init__(
        self, case: Case, group: str, stages: tuple[str, ...], clock: Clock = time.perf_counter
    ) -> None:
        self.case, self.group, self.clock = case, group, clock
        self.stages = tuple(s for s in GROUPS[group] if s in stages)
        self.decode = "decode" in self.stages

    def run(self, spec: str | None) -> RunOutcome:
        """Run it once; `spec` None is the stock model."""
        session: AbstractContextManager[Any] = nullcontext()
        if spec is not None:
            session = attach(self.case.model, reduce=spec)
        with torch.no_grad(), session as trace:
            outcome, wall = self._tower() if self.group == "vit" else self._prefill()
            if trace is not None:
                # A row of the tower has the milliseconds of its whole pass.
                outcome.reducing_ms = sum((r.ms for r in trace.rows if r.stage != "vit"), 0.0)
                outcome.share = outcome.reducing_ms / wall
            return outcome

    def observe(self, spec: str | None) -> RunOutcome:
        """As `run`, counting the tokens that leave each tower block; not for timing."""
        if self.group == "llm":
            return self.run(spec)
        with _leaving(self.case.model) as leaving:
            outcome = self.run(spec)
        outcome.leaving = leaving
        return outcome

    def _timed(self, fn: Callable[[], T]) -> tuple[T, float]:
        """Use the host's clock for a whole answer, the device's own for its parts."""
        if self.case.device.type == "cuda" and self.group != "ttft":
            return timed_by_events(fn)
        return timed(fn, self.clock)

    def _tower(self) -> tuple[RunOutcome, float]:
        case, start = self.case, time.perf_counter()
        out, ms = self._timed(lambda: encode_media(case.model, "video", case.pixels))
        wall = 1e3 * (time.perf_counter() - start)
        return RunOutcome({"vit": ms}, feature_rows(out)), wall

    def _prefill(self) -> tuple[RunOutcome, float]:
        case = self.case
        inputs = {**case.prompt, "use_cache": True, "logits_to_keep": 1}
        if self.group == "ttft":
            inputs |= case.pixels
        else:
            inputs["mm_encoder_outputs"] = case.features()
        start = time.perf_counter()
        out, ms = self._timed(lambda: case.model(**inputs))
        wall = 1e3 * (time.perf_counter() - start)
        lengths = [layer.keys.shape[-2] for layer in returned_cache(out).layers]
        outcome = RunOutcome({self.group: ms}, out.logits, lengths=lengths)
        if self.decode:
            outcome.ms["decode"] = self._decode(returned_cache(out))
        return outcome, wall

    def _decode(self, cache: Any) -> float:
        self.case.decode(cache, 1)  # the first step after a prefill also grows the allocator
        _, ms = self._timed(lambda: self.case.decode(cache, DECODE_STEPS))
        return ms / DECODE_STEPS

    def cost(self, outcome: RunOutcome, stage: str) -> int:
        """Count FLOPs of `stage` for one prompt by the tokens of `outcome`; bytes of `decode`."""
        model = self.case.model
        if stage == "decode":
            weights = decode_bytes(model, [0] * len(outcome.lengths))  # read once for all prompts
            return weights + self.case.batch * (decode_bytes(model, outcome.lengths) - weights)
        total = prefill_flops(model, outcome.lengths) if stage != "vit" else 0
        if stage != "llm":
            grid, leaving = (self.case.grid[0], *self.case.preset.grid), outcome.leaving
            total += tower_flops(model, grid, [math.prod(grid), *leaving[:-1]], leaving)
        return total


@contextmanager
def _leaving(model: Any) -> Iterator[list[int]]:
    counts: list[int] = []

    def count(module: Any, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output  # [..., n, D]
        counts.append(hidden.shape[:-1].numel())

    with ExitStack() as stack:
        for block in tower_blocks(model):
            stack.enter_context(block.register_forward_hook(count))
        yield counts


Span = tuple[str, int]  # ("tower", 0), or ("layer", number)


def spans(model: Any, specs: Sequence[Spec], tower: bool) -> list[Span]:
    """Return the spans whose attention is read: the tower, if it runs, and decoder layers."""
    found: list[Span] = []
    for spec in expand(tuple(specs), len(model.get_decoder().layers)):
        if spec.site == "llm" and spec.layer and INNER & set(spec.method.needs):
            found.append(("layer", spec.layer - 1))
        elif tower and spec.site in ("pre", "vit") and from_tower(spec.method.needs):
            found.append(("tower", 0))
    return list(dict.fromkeys(found))


def peaks_in(model: Any, where: Sequence[Span], run: Callable[[], object]) -> dict[Span, float]:
    """Measure peak megabytes of each span in one run; a layer's ends where the next one begins."""
    peaks: dict[Span, float] = {}
    if where:
        with _watched(model, where, peaks):
            run()
    return peaks


@contextmanager
def _watched(model: Any, where: Sequence[Span], peaks: dict[Span, float]) -> Iterator[None]:
    layers, tower = model.get_decoder().layers, model.get_encoder("image")

    def note(span: Span, *_: Any) -> None:
        synchronize()
        peaks[span] = max(peaks.get(span, 0.0), peak_now())

    def reset(*_: Any) -> None:
        synchronize()
        reset_peak()

    with ExitStack() as stack:
        for span in where:
            kind, number = span
            first, read = tower if kind == "tower" else layers[number], partial(note, span)
            stack.enter_context(first.register_forward_pre_hook(reset))
            if kind == "tower":
                stack.enter_context(tower.register_forward_hook(read))
            elif number + 1 < len(layers):
                stack.enter_context(layers[number + 1].register_forward_pre_hook(read))
        yield


_OWN_BYTES = 1 << 30  # libraries, matrices of the ceilings, reserve of the allocator
_REFUSED = ("can't allocate memory", "not enough memory", "CUDA out of memory")


def needed_bytes(preset: Preset, stages: Collection[str], frames: int, dtype: torch.dtype) -> int:
    """Estimate the peak of a run: weights, keys and values, one layer's activations."""
    model = empty_model(preset, stages, torch.device("meta"), dtype)
    size = torch.empty((), dtype=dtype).element_size()
    weights = sum(p.numel() for p in model.parameters())  # shared ones count once
    text, vision = model.config.get_text_config(), model.config.vision_config
    steps, rows, columns = video_grid(preset, frames)
    n = steps * rows * columns
    heads = text.num_attention_heads
    entries = 2 * text.num_hidden_layers * n * text.hidden_size // heads * text.num_key_value_heads
    inside = n * (3 * text.intermediate_size + 6 * text.hidden_size)
    if TOWER_STAGES & set(stages):
        patches = frames * preset.grid[0] * preset.grid[1]
        inside = max(inside, patches * (2 * vision.intermediate_size + 6 * vision.hidden_size))
    return int(size * (weights + entries + inside))


def check_fits(
    preset: Preset, stages: Collection[str], frames: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a run that would exhaust the memory."""
    free = free_bytes(device)
    needed = needed_bytes(preset, stages, frames, dtype) + _OWN_BYTES
    if free is None or needed <= free:
        return
    smaller = ["a smaller --preset"]
    if dtype == torch.float32:
        smaller.insert(0, "--dtype bfloat16")
    if TOWER_STAGES & set(stages):
        smaller.append("--stages llm")
    raise MmfastError(
        f"{preset.name} in {str(dtype).removeprefix('torch.')} with {frames} frames needs about "
        f"{needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free on {device}; "
        f"choose {', '.join(smaller)} or fewer --frames"
    )


@contextmanager
def one_line_when_full(preset: str, frames: int) -> Iterator[None]:
    """Report exhausted memory in one line."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(text in str(error) for text in _REFUSED):
            raise MmfastError(
                f"memory ran out on {preset} with {frames} frames; choose fewer --frames, "
                "--dtype bfloat16 or a smaller --preset"
            ) from None
        raise


ROUNDS = 3
CPU_COPY_BYTES, CUDA_COPY_BYTES = 256 << 20, 1 << 30  # past every cache
PROBE_SIDE = 256
CPU_SIDE, CUDA_SIDE = 3072, 8192  # three matrices of 38 MB, of 134 MB
SLOW = 2.0  # seconds: smaller matrices are used where a product would take longer


def ceilings(device: torch.device | str, dtype: torch.dtype | None = None) -> dict[str, float]:
    """Return `copy_gb_s`, read plus written, and `matmul_tflop_s`, the best of a few runs."""
    where = torch.device(device)
    kind = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
    copy, product = _measured(str(where), kind, torch.get_num_threads())
    return {"copy_gb_s": copy, "matmul_tflop_s": product}


@cache
def _measured(device: str, dtype: torch.dtype, threads: int) -> tuple[float, float]:
    """Return (GB/s, TFLOP/s); `threads` is part of the key of the cache."""
    cuda = torch.device(device).type == "cuda"
    with torch.cuda.device(device) if cuda else nullcontext():
        return _copy(device, cuda), _product(device, dtype, cuda)


def _copy(device: str, cuda: bool) -> float:
    size = CUDA_COPY_BYTES if cuda else CPU_COPY_BYTES
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_seconds(lambda: target.copy_(source), cuda) / 1e9


def _product(device: str, dtype: torch.dtype, cuda: bool) -> float:
    """Choose the size by `SLOW` seconds: an emulated type would take minutes at full size."""
    side = PROBE_SIDE
    seconds = _product_seconds(side, device, dtype, cuda)
    affordable = int(side * (SLOW / seconds) ** (1 / 3))
    best = min(CUDA_SIDE if cuda else CPU_SIDE, affordable // side * side)
    if best > side:
        side, seconds = best, _product_seconds(best, device, dtype, cuda)
    return 2 * side**3 / seconds / 1e12


def _product_seconds(side: int, device: str, dtype: torch.dtype, cuda: bool) -> float:
    """Multiply by `linear`, as models do: bfloat16 on an old CPU is far slower by `mm`."""
    generator = torch.Generator(device=device).manual_seed(0)
    # A product of zeros draws less power and runs faster.
    a, b = torch.randn(2, side, side, device=device, generator=generator).to(dtype)
    return _best_seconds(lambda: F.linear(a, b), cuda)


def _best_seconds(job: Callable[[], object], cuda: bool) -> float:
    clock, _ = clock_of(torch.device("cpu"), torch.get_num_threads())
    once = partial(timed_by_events, job) if cuda else partial(timed, job, clock)
    return min([once()[1] for _ in range(ROUNDS * 4 + 1 if cuda else ROUNDS + 1)][1:]) / 1e3
