"""Calibration of this device on single layers of the model, once per model and device."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.models.cost import Clock, linear_macs, timed, tower_pairs
from mmfast.models.encoder_names import encode_media, encoder_arguments
from mmfast.models.families.adapter import tower_of
from mmfast.models.reduction.probe import received
from mmfast.models.reduction.record import features_given
from mmfast.planner.cost import ModelShape, pixels_of
from mmfast.planner.rates import Point, Rates


class _ReachedError(Exception):
    """The module was reached; nothing behind it needs to run."""


@dataclass
class Reached:
    """A call that was caught."""

    args: tuple[Any, ...]  # its positional arguments
    kwargs: dict[str, Any]  # its keyword arguments
    ms: float  # milliseconds until it came

    @property
    def hidden(self) -> Tensor:
        """The first tensor among the arguments: what the module works on."""
        found = [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor)]
        return found[0]

    def rows(self, count: int) -> Reached:
        """The same call for the first `count` rows of the batch."""
        batch = self.hidden.shape[0]

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor) and value.ndim and value.shape[0] == batch:
                return value[:count]
            return value

        args = tuple(map(cut, self.args))
        return Reached(args, {k: cut(v) for k, v in self.kwargs.items()}, self.ms)


def reach(
    module: nn.Module, run: Callable[[], Any], clock: Clock = time.perf_counter
) -> Reached | None:
    """Call `run` until it calls `module` in this thread; None where it never does."""
    me, found = threading.get_ident(), list[Reached]()

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == me:
            found.append(Reached(args, kwargs, 0.0))
            raise _ReachedError

    def attempt() -> None:
        with contextlib.suppress(_ReachedError):
            run()

    with module.register_forward_pre_hook(stop, with_kwargs=True):
        _, ms = timed(attempt, clock)
    if not found:
        return None
    found[0].ms = ms
    return found[0]


SLOW_MS = 400.0  # a job this long is timed once more and no oftener
SAMPLES = 5
SAMPLE_MS = 20.0  # shorter jobs run several times per sample, so that the clock and launches vanish


def duration(job: Callable[[], Any], clock: Clock = time.perf_counter) -> float:
    """Milliseconds of `job`: the median of five samples; of a slow job the better of two runs."""
    _, first = timed(job, clock)
    _, once = timed(job, clock) if first < 4 * SLOW_MS else (None, first)
    if once > SLOW_MS:
        return min(first, once)
    count = max(1, min(20, int(SAMPLE_MS / max(once, 1e-3))))

    def sample() -> None:
        for _ in range(count):
            job()

    return median(timed(sample, clock)[1] / count for _ in range(SAMPLES))


PAIRS = 3
BUSY_NOISE, BUSY_LOAD = 0.1, 1.5  # relative difference; runnable tasks per processor


def unrest(bench: Bench) -> tuple[float, str]:
    """Time the same decoder layer in pairs (A/A): their typical difference, relative.

    Also returns the reason why times of this machine mean nothing now, "" where it is quiet.
    """
    times = [(_layer(bench, 128), _layer(bench, 128)) for _ in range(PAIRS)]
    noise = median(abs(one / other - 1) for one, other in times)
    load = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0
    if noise <= BUSY_NOISE and load <= BUSY_LOAD:
        return noise, ""
    return noise, (
        f"this machine is too busy to be measured (the same work took {noise:.0%} longer or "
        f"shorter, load {load:.1f} per processor), so nothing is kept; ask again when it is quiet"
    )


GRID = (8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384)
LONG_MS = 3000.0  # a point that would take longer is extrapolated to

Tick = Callable[[int, int, str | None], None]


@dataclass
class Bench:
    """A model to be measured."""

    model: Any  # the model
    shape: ModelShape  # its shape; layers that the model at hand was cut down by are counted here
    clock: Clock = time.perf_counter  # seconds

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        device: torch.device = next(self.model.get_decoder().parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Type in which it computes."""
        dtype: torch.dtype = next(self.model.get_decoder().parameters()).dtype
        return dtype

    def duration(self, job: Callable[[], Any]) -> float:
        """Milliseconds of a job."""
        with torch.inference_mode():
            return duration(job, self.clock)


def missing_points(known: tuple[Point, ...], longest: int) -> list[int]:
    """Token counts to measure so that `longest` lies within the known points, or nearly."""
    have = [n for n, _ in known]
    if have and max(have) * 1.3 >= longest:
        return []
    wanted = [n for n in GRID if n < 0.8 * longest] + [longest]
    return [n for n in wanted if not any(0.8 <= n / h <= 1.25 for h in have)]


def decoder_rates(bench: Bench, rates: Rates, longest: int, tick: Tick | None = None) -> Rates:
    """Time one decoder layer and its attention up to `longest` tokens."""
    wanted = missing_points(rates.linear, longest)
    last: tuple[int, float] | None = None
    for done, n in enumerate(wanted):
        if tick is not None:
            tick(done, len(wanted), f"a decoder layer at {n} tokens")
        if last is not None and last[1] * n / last[0] > LONG_MS:
            break
        whole = _layer(bench, n)
        attention = _attention(bench, n)
        last = (n, whole)
        linear = max(whole - attention, 0.05 * whole)  # alone it may be slower than in its place
        rates = rates.gain(linear=[(n, linear)], attention=[(n, min(attention, 0.95 * whole))])
    if not rates.head:
        rates = rates.gain(head=_head(bench))
    return rates


def _layer(bench: Bench, n: int) -> float:
    decoder = bench.model.get_decoder()
    embeds = torch.randn(1, n, bench.shape.hidden, device=bench.device).to(bench.dtype)
    with torch.inference_mode():
        found = reach(decoder.layers[0], lambda: decoder(inputs_embeds=embeds, use_cache=False))
    assert found is not None
    return bench.duration(lambda: decoder.layers[0](*found.args, **found.kwargs))


def _attention(bench: Bench, n: int) -> float:
    config = bench.model.config.get_text_config()
    heads = config.num_attention_heads
    q = torch.randn(1, heads, n, bench.shape.width // heads, device=bench.device).to(bench.dtype)
    return bench.duration(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))


def _head(bench: Bench) -> float:
    head = bench.model.get_output_embeddings()
    row = torch.randn(1, 1, bench.shape.hidden, device=bench.device).to(bench.dtype)
    return bench.duration(lambda: head(row))


SHORT_MS = 1500.0  # an encoder this fast is run as a whole
SAMPLE_ROWS = 4  # frames or tiles of a batch are alike; more of them are counted, not run


def unknown_pixels(rates: Rates, pixels: int) -> bool:
    """Tell whether the encoder is to be measured at a size."""
    return pixels > 0 and not any(0.5 <= pixels / size <= 2.0 for size, _ in rates.encode)


def encoder_rates(bench: Bench, rates: Rates, inputs: Mapping[str, Any]) -> Rates:
    """Add a point for these inputs, unless one of half to twice their size is known."""
    pixels = pixels_of(inputs)
    if not unknown_pixels(rates, pixels):
        return rates
    total, signal = 0.0, 0.0
    for kind in features_given(inputs):
        ms, read = _one_kind(bench, kind, inputs)
        total, signal = total + ms, signal + read
    return rates.gain(encode=[(pixels, total)], signal=[(pixels, signal)])


def _one_kind(bench: Bench, kind: str, inputs: Mapping[str, Any]) -> tuple[float, float]:
    base = bench.model.base_model
    names = [name for name in encoder_arguments(base, kind) if name in inputs]
    arguments = {name: inputs[name] for name in names}

    def whole() -> Any:
        return encode_media(base, kind, arguments)

    blocks = _blocks(bench.model)
    with torch.inference_mode():
        found = reach(blocks[0], whole, bench.clock) if blocks else None
    if found is None:  # a tower of convolutions, or another encoder than the vision tower
        return bench.duration(whole), 0.0
    estimate, signal = _estimate(bench, found, blocks, arguments)
    complete = len(blocks) == bench.shape.blocks
    return bench.duration(whole) if estimate < SHORT_MS and complete else estimate, signal


def _blocks(model: Any) -> nn.ModuleList:
    try:
        return tower_of(model).blocks
    except (ModelError, StopIteration):
        return nn.ModuleList()


def _estimate(
    bench: Bench, found: Reached, blocks: nn.ModuleList, arguments: Mapping[str, Any]
) -> tuple[float, float]:
    """Milliseconds of the encoder, and of reading one attention signal."""
    hidden = found.hidden
    batch = hidden.shape[0] if hidden.ndim == 3 else 1
    rows = min(batch, SAMPLE_ROWS)
    call = found.rows(rows) if batch > rows else found
    one = bench.duration(lambda: blocks[0](*call.args, **call.kwargs)) * batch / rows
    tokens = hidden.shape[:-1].numel()
    rate = one / max(1, linear_macs(blocks[0]) * tokens)
    rest = _rest_macs(bench) * tokens * rate
    grid = next((v for k, v in arguments.items() if k.endswith("grid_thw")), None)
    segment = tokens // batch if grid is None else int(grid[0, 1] * grid[0, 2])
    extra = _whole_frames(bench, arguments, len(blocks))
    signal = _signal(bench, segment) * tokens / segment
    return found.ms + one * bench.shape.blocks + rest + extra, signal


def _rest_macs(bench: Bench) -> int:
    base = bench.model.base_model
    names = ("multi_modal_projector", "connector", "mlp1", "aligner")
    found = [getattr(base, name) for name in names if hasattr(base, name)]
    merger = getattr(tower_of(bench.model).module, "merger", None)
    macs = sum(linear_macs(module) for module in found)
    return macs + (linear_macs(merger) // 4 if isinstance(merger, nn.Module) else 0)


def _whole_frames(bench: Bench, arguments: Mapping[str, Any], present: int) -> float:
    """Extra milliseconds of full-attention blocks beyond windowed ones, block 0 being windowed."""
    vision = bench.model.config.vision_config
    grid = next((v for k, v in arguments.items() if k.endswith("grid_thw")), None)
    if not isinstance(grid, Tensor) or not getattr(vision, "window_size", None):
        return 0.0
    full = sum(1 for index in vision.fullatt_block_indexes if index < bench.shape.blocks)
    t, h, w = (int(v) for v in grid[0])
    pairs = t * (h * w) ** 2 - min(tower_pairs(bench.model, (t, h, w))[:present])
    q = _random_heads(bench, h * w)
    per_pair = bench.duration(lambda: F.scaled_dot_product_attention(q, q, q)) / (h * w) ** 2
    return full * pairs * per_pair * len(grid)


def _random_heads(bench: Bench, n: int) -> Tensor:
    vision = bench.model.config.vision_config
    names = ("num_attention_heads", "num_heads")
    heads = next((int(getattr(vision, n)) for n in names if hasattr(vision, n)), 1)
    size = max(1, int(getattr(vision, "hidden_size", heads)) // heads)
    return torch.randn(1, heads, n, size, device=bench.device).to(bench.dtype)


def _signal(bench: Bench, n: int) -> float:
    """Attention received within one frame: a softmax that the fused kernel never shows."""
    q = _random_heads(bench, n)
    return bench.duration(lambda: received(q, q, None, is_causal=False))
