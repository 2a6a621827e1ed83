"""Measure this device on the model's own layers: some seconds, once per model shape and device.

Only single layers run, whatever the size of the model, and a point that would take long is left
out: rates barely change there. Where a whole call is short it runs too, since then what lies
between the layers counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from mmfast.models.timing import Clock
from mmfast.planner.capture import reach
from mmfast.planner.rates import Point, Rates
from mmfast.planner.shape import Shape
from mmfast.planner.stopwatch import duration

GRID = (8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384)
LONG_MS = 3000.0  # a point that would take longer is extrapolated to

Tick = Callable[[int, int, str | None], None]


@dataclass
class Bench:
    """A model to be measured.

    Attributes:
        model: The model.
        shape: Its shape; layers that the model at hand was cut down by are counted here.
        clock: Seconds.
    """

    model: Any
    shape: Shape
    clock: Clock = time.perf_counter

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        device: torch.device = next(self.model.get_decoder().parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
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
    """The first decoder layer on `n` tokens, called as the decoder calls it."""
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
