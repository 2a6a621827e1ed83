"""What drafting costs and gains on the shape of a 7-billion model, random weights.

Layers share the weights of two of them, modules too, so that it fits in memory. A layer is larger
than any cache of a processor: each use reads it from memory anew, as in the whole model. Modules
see one place, as those of the embedded speech model do.

Two ideals: by the weights read, as if a pass over eleven tokens cost one over one; and with that
pass of the backbone alone as it was measured beside.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mmfast.bench.cases import fill_
from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.speech_modes import draft_weights, trunk_weights
from mmfast.bench.timing import Sample, frozen, interleave, noise, one_thread, paired
from mmfast.decoding.adapt import Costs
from mmfast.decoding.drafting import parse_schedule
from mmfast.decoding.loop import SingleDecoder
from mmfast.decoding.row import Open

ROUNDS, PROMPT = 5, 8
SCHEDULES = {"vanilla": 4, "boost": 2, "turbo": 3}  # cycles that are timed


@dataclass(frozen=True)
class LanguageShape:
    """Of a language model; audio rows are its last."""

    name: str = "7b"
    hidden: int = 3584
    layers: int = 28
    inner: int = 18944
    heads: int = 28
    keys: int = 4
    vocabulary: int = 168_072
    audio: int = 16_384
    modules: int = 10
    distinct: int = 2


def rows(progress: Tick) -> list[Row]:
    """Rows of the shape of Qwen2-7B with the vocabulary of VITA-Audio (arXiv 2505.03739)."""
    return measure(LanguageShape(), ROUNDS, progress)


def build(shape: LanguageShape, dtype: torch.dtype) -> tuple[Any, Any]:
    """Backbone and `mctp` head of a shape, on the CPU."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from mmfast.heads.mctp import Mctp
    from mmfast.models.decoder.backbone import Backbone

    config = Qwen2Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.distinct,
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.keys,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model: Any = Qwen2ForCausalLM(config)
        model = model.to_empty(device="cpu")
        model.tie_weights()
        fill_(model)
        rotary = model.model.rotary_emb  # angles, which weights on no device do not have
        model.model.rotary_emb = type(rotary)(model.config)
        layers = model.model.layers
        spread = [layers[i % shape.distinct] for i in range(shape.layers)]
        model.model.layers = nn.ModuleList(spread)
        config.layer_types = ["full_attention"] * shape.layers
        backbone = Backbone(model.eval(), lean=False, check=False)
        head = Mctp(_Sharing(backbone, shape.distinct), shape.modules, window=1).eval()
    finally:
        torch.set_default_dtype(old)
    return backbone, head


class _Sharing:
    """A trunk whose new layers are those it has, in turn: a module reads as much, and fits."""

    def __init__(self, backbone: Any, distinct: int) -> None:
        self._backbone, self._distinct, self._made = backbone, distinct, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)

    def new_layer(self, ffn: int | None = None) -> nn.Module:
        """One of the backbone's own."""
        self._made += 1
        layer: nn.Module = self._backbone.decoder.layers[self._made % self._distinct]
        return layer


def measure(
    shape: LanguageShape, rounds: int, progress: Tick, dtype: torch.dtype | None = None
) -> list[Row]:
    """The same for another shape.

    Args:
        shape: What is built.
        rounds: How often each schedule runs.
        progress: Called with a label, runs done and runs in all.
        dtype: bfloat16 where the processor multiplies it, else float32, unless told.
    """
    backbone, head = build(shape, dtype := dtype or _dtype())
    wide = 1 + parse_schedule("turbo").most
    clocked, audio = _Clocked(head), slice(shape.vocabulary - shape.audio, shape.vocabulary)
    done, names = 0, [*SCHEDULES, "again", "wide"]

    def job(name: str) -> Callable[[], dict[str, float]]:
        mode = "vanilla" if name == "again" else name

        def run() -> dict[str, float]:
            nonlocal done
            done += 1
            progress(name, done, (rounds + 1) * len(names))
            if name == "wide":
                return {"ms": wide_pass(backbone, wide, audio)}
            return decode(backbone, clocked, mode, SCHEDULES[mode], audio)

        return run

    jobs = {name: job(name) for name in names}
    with torch.inference_mode(), one_thread(), frozen():
        for run in jobs.values():  # once before the clock starts
            run()
        samples = interleave(jobs, rounds)
    share = draft_weights(head, shape.audio) / trunk_weights(backbone, shape.audio)
    shared = {
        "preset": shape.name,
        "dtype": str(dtype).removeprefix("torch."),
        "distinct_layers": shape.distinct,
        "module_share": share,
        "n": rounds,
        "clock": "processor time of the process",
        "threads": 1,
        "device": "cpu",
    }
    return [{**shared, **_row(name, samples, share)} for name in SCHEDULES]


def _row(name: str, samples: Mapping[str, Sequence[Sample]], share: float) -> Row:
    def times(job: str, part: str = "ms") -> list[float]:
        return [sample[part] for sample in samples[job]]

    base = [(a + b) / 2 for a, b in zip(times("vanilla"), times("again"), strict=True)]
    speedup = 1.0 if name == "vanilla" else paired(base, times(name))
    ideal = ideal_speedup(name, share)
    module = statistics.median(times(name, "module"))
    pass_ms = statistics.median([*times("vanilla", "main"), *times("again", "main")])
    wide = statistics.median(times("wide"))
    here = 1.0 if name == "vanilla" else ideal_speedup(name, share, wide / pass_ms)
    return {
        "job": name,
        "score": speedup,
        "ms_per_token": statistics.median(times(name)),
        "pass_ms": pass_ms,
        "main_ms": statistics.median(times(name, "main")),
        "module_ms": module,
        "module_cost": module / pass_ms,
        "speedup": speedup,
        "ideal": ideal,
        "of_ideal": speedup / ideal,
        "wide_ms": wide,
        "ideal_here": here,
        "of_ideal_here": speedup / here,
        "noise": noise(times("vanilla"), times("again")),
    }


class _Clocked:
    """A head whose drafting is timed."""

    def __init__(self, head: Any) -> None:
        self._head, self.seconds = head, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def draft(self, *given: Any) -> int:
        """As the head's."""
        start = time.process_time()
        ran = int(self._head.draft(*given))
        self.seconds += time.process_time() - start
        return ran


def ideal_speedup(schedule: str, share: float, wide: float = 1.0) -> float:
    """Tokens for the weights read, relative to one token per pass, once the schedule repeats.

    A pass reads the same for one token or ten, a module `share` of it; behind drafts it is `wide`.
    """
    main, drafts = parse_schedule(schedule).pairs[-1]
    return (main + drafts) / (main - 1 + wide + share * drafts)


def wide_pass(backbone: Any, tokens: int, audio: slice) -> float:
    """Milliseconds of the backbone alone, over so many tokens at once, to the logits of one."""
    state = backbone.state(1, PROMPT + tokens)
    state.lengths = [PROMPT]
    start = time.process_time()
    hidden = backbone.run(state, backbone.embed(torch.arange(tokens)[None]), [tokens])
    backbone.logits(backbone.norm(hidden)[:, -1], audio)
    return 1e3 * (time.process_time() - start)


def decode(
    backbone: Any, head: _Clocked, schedule: str, cycles: int, audio: slice
) -> dict[str, float]:
    """Milliseconds per token behind the first cycle, of a main pass, and of a module."""
    opening, (main, drafts) = parse_schedule(schedule).pairs[0], parse_schedule(schedule).pairs[-1]
    tokens = sum(opening) + cycles * (main + drafts)
    guide, reserve = Open(tokens, rows=audio), PROMPT + tokens + 32
    decoder = SingleDecoder(
        backbone, head, guide, schedule=schedule, costs=Costs(), reserve=reserve
    )
    decoder.feed(list(range(PROMPT)))
    steps = iter(decoder)
    next(steps)  # the prompt
    stats, before, head.seconds = decoder.stats, replace(decoder.stats), 0.0
    start = time.process_time()
    list(steps)
    spent = time.process_time() - start
    modules = stats.draft_passes - before.draft_passes
    return {
        "ms": 1e3 * spent / (stats.tokens - before.tokens),
        "main": 1e3 * (spent - head.seconds) / (stats.passes - before.passes),
        "module": 1e3 * head.seconds / modules if modules else 0.0,
    }


def _dtype() -> torch.dtype:
    """bfloat16 where the processor has instructions for it; elsewhere it is slower than float32."""
    capable = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if capable else torch.float32
