"""Rates of one model on its device, and the measurement of unknown ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import MmfastError
from mmfast.core.spec import Spec, count, parse, run
from mmfast.core.tokens import Tokens
from mmfast.models.cost import Clock
from mmfast.planner.calibration import (
    Bench,
    Tick,
    decoder_rates,
    encoder_rates,
    missing_points,
    unknown_pixels,
    unrest,
)
from mmfast.planner.cost import (
    Cost,
    DraftShape,
    ModelShape,
    Work,
    fingerprint,
    predict,
    select_key,
    shape_of,
    tower_depth,
)
from mmfast.planner.rates import Rates, rates_key, read_rates, write_rates

Run = Callable[[str | None], float]  # spec -> measured ms to the first token, inputs ready
PROBE = "uniform:0.25"  # chooses in no time: what a reduced call takes beside choosing
SHORT_MS = 2000.0  # calls predicted to be this short are run, to learn their overhead
ROUNDS = 5
AGAIN = 60.0  # seconds until a busy machine is measured anew: a call may take far less than that
# Each time twice as long, up to this: a server that is never quiet would halt once a minute for it.
AT_MOST = 3600.0


class Learner:
    """Rates of one model of a known family, those of earlier runs unless given.

    `shape` is the model's where the one at hand is cut down to fewer layers; `remember` keeps what
    is measured; `clock` gives seconds of the processor where a machine is too busy. `refused` holds
    what a method said that would not choose, by the key of its time; `busy` says why nothing that
    is measured now is kept. The memory of a `draft` model counts.
    """

    def __init__(
        self,
        model: Any,
        rates: Rates | None = None,
        shape: ModelShape | None = None,
        remember: bool = True,
        clock: Clock = time.perf_counter,
        draft: DraftShape | None = None,
    ) -> None:
        self.draft = draft
        self.bench = Bench(model, shape or shape_of(model, tower_depth(model)), clock)
        self.key: dict[str, Any] | None = None
        if remember:
            whole = f"{fingerprint(model)} {self.bench.shape.depth} {self.bench.shape.blocks}"
            self.key = rates_key(self.bench.device, self.bench.dtype, whole)
        known = read_rates(self.key) if self.key is not None and rates is None else rates
        self.rates = known or Rates()
        self.measuring_ms = 0.0
        self.busy, self._again, self._pause = "", 0.0, AGAIN
        self.refused: dict[str, str] = {}
        self._asides = 0

    def cost(
        self,
        work: Work,
        stages: Sequence[Spec],
        call: str = "generate",
        cache: CachePlan | None = None,
    ) -> Cost:
        """Predict one call under a parsed spec, or a KV policy."""
        cost = predict(self.bench.shape, self.rates, work, stages, call, cache)
        if (draft := self.draft) is None:
            return cost
        weights, kv = draft.shape.weights, draft.kept_bytes(work, stages)
        return replace(cost, weights=cost.weights + weights, kv=cost.kv + kv)

    def learn(
        self,
        inputs: Mapping[str, Any],
        work: Work,
        call: str = "generate",
        run: Run | None = None,
        tick: Tick | None = None,
    ) -> None:
        """Measure what is not known yet about calls (`generate` or `forward`) of this size.

        `run` runs one call for real, where calls are short; `tick` gets (steps done, steps, label).
        """
        with self._saving():
            self.rates = decoder_rates(self.bench, self.rates, work.prompt * work.rows, tick)
            if work.pixels:
                if tick is not None and unknown_pixels(self.rates, work.pixels):
                    tick(0, 1, "the encoder")
                self.rates = encoder_rates(self.bench, self.rates, inputs)
            if run is not None and call not in self.rates.overhead:
                self._learn_overhead(work, call, run)

    def settle(
        self, work: Work, call: str = "generate", run: Run | None = None, tick: Tick | None = None
    ) -> str:
        """Compare the machine with itself before it is measured; the reason not to trust it.

        What a busy machine was found to do holds for `AGAIN` seconds, and longer where it stays so.
        """
        if self.busy and time.monotonic() < self._again:
            return self.busy
        known = not missing_points(self.rates.linear, work.prompt * work.rows)
        known = known and not unknown_pixels(self.rates, work.pixels)
        learnt = run is None or call in self.rates.overhead or not self._short(work, call)
        if known and learnt and not self.busy:
            return ""
        if tick is not None:
            tick(0, 1, "the noise of this machine")
        if self.busy:
            self.forget()
        noise, self.busy = unrest(self.bench)
        self._again = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, AT_MOST) if self.busy else AGAIN
        self.rates = self.rates.gain(noise=noise)
        return self.busy

    def _learn_overhead(self, work: Work, call: str, run: Run) -> None:
        """Learn the overhead of short calls beyond the prediction; long calls hide it."""
        if not self._short(work, call):
            return
        specs = (None, PROBE)
        costs = [self.cost(work, parse(text), call) for text in specs]
        for text in specs:
            run(text)
        # Turn about, so that a busy machine treats both alike.
        times = [[run(text) for text in specs] for _ in range(ROUNDS)]
        middle = [sorted(column)[ROUNDS // 2] for column in zip(*times, strict=True)]
        # It may be below 0: layers can be faster in their place than alone.
        rest = tuple(ms - cost.ttft for ms, cost in zip(middle, costs, strict=True))
        self.rates = self.rates.gain(overhead={call: rest})

    def _short(self, work: Work, call: str) -> bool:
        return all(self.cost(work, parse(s), call).ttft <= SHORT_MS for s in (None, PROBE))

    def price(self, stages: Sequence[Spec], work: Work) -> None:
        """Measure what choosing takes, where that is not known; note what refuses to choose."""
        with self._saving():
            for stage in stages:
                key = select_key(stage, work)
                if key in self.rates.select or key in self.refused:
                    continue
                try:
                    ms = selection_ms(self.bench, stage, work)
                except MmfastError as error:
                    self.refused[key] = str(error)
                else:
                    self.rates = self.rates.gain(select={key: ms})

    def forget(self) -> None:
        """Measure everything anew: rates of a busy hour are too slow for a quiet one."""
        self.rates = Rates()

    def check(self, stages: Sequence[Spec], work: Work) -> None:
        """Refuse a method that refused these tokens, in its own words."""
        for stage in stages:
            reason = self.refused.get(select_key(stage, work))
            if reason is not None:
                raise MmfastError(reason)

    def priced(self, stages: Sequence[Spec], work: Work) -> bool:
        """Tell whether the time of choosing is known."""
        return all(select_key(stage, work) in self.rates.select for stage in stages)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        before = self.rates
        with self.aside():
            yield
        if self.rates != before and self.key is not None and not self.busy:
            write_rates(self.key, self.rates)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work that happens once and is no part of any request; may be nested."""
        start, self._asides = time.perf_counter(), self._asides + 1
        try:
            yield
        finally:
            self._asides -= 1
            if self._asides == 0:
                self.measuring_ms += (time.perf_counter() - start) * 1e3


_SHARE = 0.25  # of the budget it is timed at: choosing depends on it far less than the layers do
_WORDS = 16  # text tokens of a question
_SCORES = ("attn_first", "attn_middle", "attn_visual", "attn_window", "attn_before", "attn_peak",
           "attn_mutual", "key_norm", "drift")  # fmt: skip


def selection_ms(bench: Bench, stage: Spec, work: Work) -> float:
    """Milliseconds that a stage takes to choose from all items of a request, unless it refuses."""
    spec = replace(stage, budget=_SHARE)
    total, known = 0.0, dict[int, float]()
    for n, grid in zip(work.items, work.grids, strict=True):
        if count(_SHARE, n) == n:
            continue
        if n not in known:
            tokens = _tokens(bench, n, grid if stage.site != "llm" else None)
            run(spec, tokens)  # raises here, outside the clock
            known[n] = bench.duration(partial(run, spec, tokens))
        total += known[n]
    return total


def _tokens(bench: Bench, n: int, grid: tuple[int, int, int] | None) -> Tokens:

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, device=bench.device).to(bench.dtype)

    def scores(*size: int) -> Tensor:
        return torch.rand(*size, device=bench.device)

    signals = {
        **{name: scores(n) for name in _SCORES},
        "attn_text": scores(n, _WORDS),
        "text_key_norm": scores(_WORDS),
        "keys": noise(n, 64),
        "values": noise(n, 128),
        "text_values": noise(_WORDS, 2, 64),
        "rope": noise(n, 2),
        "tile": torch.arange(n, device=bench.device) * 5 // n,
        "place": torch.cartesian_prod(*map(torch.arange, grid or (1, 1, n))).reshape(n, 3),
    }
    return Tokens(
        noise(n, bench.shape.hidden),
        attn=scores(n),
        query=noise(_WORDS, bench.shape.hidden),
        grid=grid,
        signals=signals,
    )
