"""Run one stage of a case, stock or with a spec attached, and say what came out of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmfast.attach import attach
from mmfast.bench.cases import Case
from mmfast.bench.measure import Clock, T, timed, timed_by_events
from mmfast.models.flops import decode_bytes, prefill_flops, tower_blocks, tower_flops

GROUPS = {"vit": ("vit",), "llm": ("llm", "decode"), "ttft": ("ttft",)}
DECODE_STEPS = 8


@dataclass
class Outcome:
    """What one run gave.

    Attributes:
        ms: Milliseconds by stage; `decode` is per token.
        values: Logits of the last position `[1, 1, V]`, or tower features `[N, D]`.
        reducing_ms: What choosing and compacting took inside the run, all sites together.
        share: That, as a share of the run, both by the wall clock.
        lengths: Tokens in each decoder layer; empty for the tower.
        leaving: Tokens leaving each tower block, where they were observed.
    """

    ms: dict[str, float]
    values: Tensor
    reducing_ms: float = 0.0
    share: float = 0.0
    lengths: list[int] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)


class Stage:
    """One group of stages that one run of the model measures together.

    `vit` is the tower with its projector; `llm` the prefill behind the encoder, one logit row,
    followed by `decode`; `ttft` both halves in one call. `attach` is entered outside the clock:
    a user enters it once and calls the model many times.
    """

    def __init__(
        self,
        case: Case,
        group: str,
        stages: tuple[str, ...],
        clock: Clock = time.perf_counter,
    ) -> None:
        self.case, self.group, self.clock = case, group, clock
        self.stages = tuple(s for s in GROUPS[group] if s in stages)
        self.decode = "decode" in self.stages

    def run(self, spec: str | None) -> Outcome:
        """Run it once; `spec` None is the stock model."""
        session: AbstractContextManager[Any] = nullcontext()
        if spec is not None:
            session = attach(self.case.model, reduce=spec)
        with torch.no_grad(), session as trace:
            outcome, wall = self._tower() if self.group == "vit" else self._prefill()
            if trace is not None:
                outcome.reducing_ms = sum((row.ms for row in trace.rows), 0.0)
                outcome.share = outcome.reducing_ms / wall
            return outcome

    def observe(self, spec: str | None) -> Outcome:
        """As `run`, counting the tokens that leave each tower block; not for timing."""
        if self.group == "llm":
            return self.run(spec)
        with _leaving(self.case.model) as leaving:
            outcome = self.run(spec)
        outcome.leaving = leaving
        return outcome

    def _timed(self, fn: Callable[[], T]) -> tuple[T, float]:
        """The host's clock for a whole answer, the device's own for its parts."""
        if self.case.device.type == "cuda" and self.group != "ttft":
            return timed_by_events(fn)
        return timed(fn, self.clock)

    def _tower(self) -> tuple[Outcome, float]:
        case, start = self.case, time.perf_counter()
        out, ms = self._timed(lambda: case.model.get_video_features(**case.pixels))
        wall = 1e3 * (time.perf_counter() - start)
        features = out.pooler_output
        values = features if isinstance(features, Tensor) else torch.cat(list(features))
        return Outcome({"vit": ms}, values.flatten(0, -2)), wall

    def _prefill(self) -> tuple[Outcome, float]:
        """What came out, and the milliseconds of the prefill by the wall clock."""
        case = self.case
        inputs = {**case.prompt, "use_cache": True, "logits_to_keep": 1}
        if self.group == "ttft":
            inputs |= case.pixels
        else:
            inputs["mm_encoder_outputs"] = case.features()
        start = time.perf_counter()
        out, ms = self._timed(lambda: case.model(**inputs))
        wall = 1e3 * (time.perf_counter() - start)
        lengths = [layer.keys.shape[-2] for layer in out.past_key_values.layers]
        outcome = Outcome({self.group: ms}, out.logits, lengths=lengths)
        if self.decode:
            outcome.ms["decode"] = self._decode(out.past_key_values)
        return outcome, wall

    def _decode(self, cache: Any) -> float:
        token = self.case.prompt["input_ids"][:, :1]

        def step(n: int) -> None:
            for _ in range(n):
                self.case.model(input_ids=token, past_key_values=cache, use_cache=True)

        step(1)  # the first step after a prefill also grows the allocator
        _, ms = self._timed(lambda: step(DECODE_STEPS))
        return ms / DECODE_STEPS

    def cost(self, outcome: Outcome, stage: str) -> int:
        """FLOPs of `stage` with the token counts of `outcome`; bytes for `decode`."""
        model = self.case.model
        if stage == "decode":
            return decode_bytes(model, outcome.lengths)
        total = prefill_flops(model, outcome.lengths) if stage != "vit" else 0
        if stage != "llm":
            total += self._tower_flops(outcome.leaving)
        return total

    def _tower_flops(self, leaving: list[int]) -> int:
        rows, columns = self.case.preset.grid
        grid = (self.case.grid[0], rows, columns)
        entering = [grid[0] * rows * columns, *leaving[:-1]]
        return tower_flops(self.case.model, grid, entering, leaving)


@contextmanager
def _leaving(model: Any) -> Iterator[list[int]]:
    counts: list[int] = []

    def count(module: Any, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output  # [..., n, D]
        counts.append(hidden.shape[:-1].numel())

    handles = [block.register_forward_hook(count) for block in tower_blocks(model)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
