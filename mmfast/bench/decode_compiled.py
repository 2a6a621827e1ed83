"""Compiled decoding on a static cache with reduction attached: one graph, no breaks, same tokens.

The prefill is reduced eagerly, every step behind it runs compiled. Masks, positions and cache
lengths are tensors of fixed shape, so nothing is compiled again while the cache fills, and a GPU
can capture the step (`mode="reduce-overhead"`). The stock model is measured the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mmfast.attach import attach
from mmfast.bench.cases import Case, build, pick_device, pick_dtype
from mmfast.bench.named import Row, Tick
from mmfast.bench.presets import get_preset
from mmfast.bench.timing import Sample, frozen, interleave, one_thread, paired
from mmfast.models.timing import timed

SPECS = (None, "evs:0.25", "fastv@llm3:0.5", "holitom_inner@llm3:0.5")
SHAPES = (("tiny", 4, 33, 9), ("llava-onevision-0.5b", 1, 6, 3))  # frames, steps, rounds


def rows(tick: Tick) -> list[Row]:
    """Rows of the tiny shape and of the 0.5B shape."""
    return [row for shape in SHAPES for row in measure(*shape, tick=tick)]


def measure(
    preset: str,
    frames: int,
    steps: int,
    rounds: int,
    specs: Sequence[str | None] = SPECS,
    device: str | None = None,
    options: dict[str, Any] | None = None,
    tick: Tick = lambda *_: None,
) -> list[Row]:
    """A row per spec.

    Args:
        preset: Model shape.
        frames: Frames of the clip in the prompt.
        steps: Decode steps per sample; tokens of eager and compiled steps are compared.
        rounds: Samples of each way.
        specs: What is attached; None is the stock model.
        device: Where; CUDA where there is one.
        options: Of torch.compile; inductor, with CUDA graphs on a GPU, if None.
        tick: Told of every spec.
    """
    where, shape = pick_device(device), get_preset(preset)
    case = build(preset, ("llm", "decode"), frames, where, pick_dtype("auto", shape, where))
    shared: Row = {"preset": preset, "device": where.type, "visual": case.n, "steps": steps}
    shared |= {"dtype": str(case.visual.dtype).removeprefix("torch."), "n": rounds}
    options = default_options(where) if options is None else options
    found: list[Row] = []
    with torch.no_grad(), one_thread(), frozen():
        for number, spec in enumerate(specs):
            found.append({**shared, "reduce": spec, **_row(case, spec, steps, rounds, options)})
            tick(f"{preset} {spec or 'stock'}", number + 1, len(specs))
    return found


def default_options(device: torch.device) -> dict[str, Any]:
    """How steps are compiled here: for a GPU into a CUDA graph."""
    return {"mode": "reduce-overhead"} if device.type == "cuda" else {"backend": "inductor"}


@dataclass(frozen=True)
class Compilation:
    """What torch.compile did with a step.

    Attributes:
        graphs: Graphs that were compiled.
        breaks: Places where it gave up on one graph.
        again: Compilations after the first step.
        seconds: Of the first step.
    """

    graphs: int
    breaks: int
    again: int
    seconds: float


def _row(
    case: Case, spec: str | None, steps: int, rounds: int, options: dict[str, Any]
) -> dict[str, Any]:
    run = CompiledRun(case, steps)
    with run.attached(spec):
        compiled = torch.compile(case.model, fullgraph=True, **options)
        eager = run.tokens(case.model)
        mine, did = run.compile(compiled)
    ways: dict[str, Callable[[], Sample]] = {
        "eager": partial(run.sample, spec, case.model),
        "compiled": partial(run.sample, spec, compiled),
    }
    for run_once in ways.values():  # attached anew: nothing is to be compiled again
        run_once()
    again = _graphs() - did.graphs
    taken = interleave(ways, rounds)
    slow, fast = ([s["ms"] for s in taken[name]] for name in ways)
    return {
        "eager_ms": median(slow),
        "compiled_ms": median(fast),
        "speedup": paired(slow, fast),
        "graphs": did.graphs,
        "breaks": did.breaks,
        "recompiles": did.again,
        "recompiles_attached_anew": again,
        "compile_s": did.seconds,
        "same_tokens": torch.equal(eager, mine),
        "compiler": str(options.get("mode") or options.get("backend")),
        "clock": "wall, synchronised" if case.device.type == "cuda" else "processor time",
    }


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class CompiledRun:
    """Greedy decoding of one case on a static cache.

    Args:
        case: The model and its prompt.
        steps: Tokens behind the prompt.
    """

    def __init__(self, case: Case, steps: int) -> None:
        self.case, self.steps = case, steps
        self.length = int(case.prompt["input_ids"].shape[1])

    @contextmanager
    def attached(self, spec: str | None) -> Iterator[None]:
        """Attach, or not."""
        with attach(self.case.model, spec):
            yield

    def prefill(self) -> tuple[Any, Tensor]:
        """A static cache with the prompt in it, and the first token `[1, 1]`."""
        from transformers import StaticCache

        case = self.case
        config = case.model.config.get_text_config()
        # As long as stock `generate` makes it: the prompt before reduction, and the answer.
        cache = StaticCache(config=config, max_cache_len=self.length + self.steps + 1)
        inputs = {**case.prompt, "mm_encoder_outputs": case.features(), "logits_to_keep": 1}
        out = case.model(**inputs, past_key_values=cache, use_cache=True)
        return cache, out.logits[:, -1:].argmax(-1)

    def decode(self, step: Any, cache: Any, token: Tensor, first: int, count: int) -> list[Tensor]:
        """`count` tokens from place `first` on."""
        found = [token]
        for place in range(first, first + count):
            where = torch.full((1, 1), self.length + place, device=token.device)
            given = {"input_ids": found[-1].clone(), "position_ids": where}
            out = step(**given, past_key_values=cache, use_cache=True)
            found.append(out.logits[:, -1:].argmax(-1))
        return found[1:]

    def tokens(self, step: Any) -> Tensor:
        """All tokens `[1, steps]` that a step decodes."""
        cache, token = self.prefill()
        return torch.cat(self.decode(step, cache, token, 0, self.steps), dim=1)

    def compile(self, step: Any) -> tuple[Tensor, Compilation]:
        """The same, counting what torch.compile does."""
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

    def sample(self, spec: str | None, step: Any) -> Sample:
        """Milliseconds per step, the first one not timed."""
        cuda = self.case.device.type == "cuda"
        with self.attached(spec):
            cache, token = self.prefill()
            token = self.decode(step, cache, token, 0, 1)[0]
            rest = self.steps - 1
            work = partial(self.decode, step, cache, token, 1, rest)
            _, ms = timed(work, time.perf_counter if cuda else time.process_time)
        return {"ms": ms / rest}
