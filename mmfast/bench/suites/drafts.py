"""Benchmark of draft and verify: acceptance by draft, measured without labels, and cost by shape.

Acceptance is that of the embedded model, which has learned something; a shape with random weights
agrees with itself or not by chance. Cost is that of the shape, whose weights need not be right. The
speed-up that is shown joins both; the ideal one joins the acceptance with the bytes that a draft
and a pass have to read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmfast.attach import attach
from mmfast.bench import timing
from mmfast.bench.cases import build, pick_dtype
from mmfast.bench.presets import get_preset
from mmfast.bench.registry import Tick, benchmark, quiet
from mmfast.bench.results import Row, dtype_name
from mmfast.models.cache_name import CACHE
from mmfast.models.cost import decode_bytes
from mmfast.models.decoder.grouped import grouped
from mmfast.tiny.evaluate import Subject
from mmfast.tiny.suites import suite

# What a draft of one token sees; knobs make every pass draft exactly once.
VIEWS = (
    *(f"self:{share}" for share in (0.5, 0.25, 0.1, 0.05)),
    *(f"self:0.1?score={name}" for name in ("snapkv", "keydiff", "knorm", "random")),
    *(f"self?reduce={name}:0.25" for name in ("divprune", "evs", "visionzip", "uniform")),
    *(f"self?reduce={name}:0.1" for name in ("divprune", "evs", "visionzip", "uniform")),
    *("recycle?tree=0", "lookup"),
)
QUESTIONS, TOKENS = 16, 16
SHAPE = ("llava-onevision-0.5b", 8000, (0.25, 0.1, 0.05), (1, 2, 4, 8))


@benchmark("decode", "draft")
def drafts(tick: Tick) -> list[Row]:
    """Measure acceptance of drafts on the embedded model, and their speed-up on a 0.5B shape."""
    rows = acceptance_rows(tick=tick)
    found = {row["job"]: row["acceptance"] for row in rows}
    return rows + cost_rows(*SHAPE, found, tick=tick)


def acceptance_rows(
    views: Sequence[str] = VIEWS, n: int = QUESTIONS, tokens: int = TOKENS, tick: Tick = quiet
) -> list[Row]:
    """Ask the embedded model about unseen clips, under each draft; all answers must be the same.

    The end of the answer is put off to `tokens`, so that there is something to draft.
    """
    subject = Subject()
    # One by one: in a batch, rows that are ahead wait, and the drafts of the others would count.
    asked = [subject.inputs([case]) for case in suite(n, 1000)]
    whole = _answers(subject.model, asked, tokens)
    rows: list[Row] = []
    for number, view in enumerate(views):
        tick(f"acceptance {view}", number, len(views))
        # A reducer takes all that follows it, so the knobs go in front.
        once = "most=1&adapt=0&least=0"
        head, _, knobs = view.partition("?")
        spec = f"{head}?{once}" + (f"&{knobs}" if knobs else "")
        with attach(subject.model, decode=spec) as trace:
            found = _answers(subject.model, asked, tokens)
        counts = [row for row in trace.rows if row.stage == "draft"]
        proposed, accepted = (sum(row[k] for row in counts) for k in ("tokens_in", "tokens_out"))
        figures: Row = {"preset": "embedded", "job": view, "n": n, "tokens": tokens}
        figures |= {"device": "cpu", "proposed": proposed, "accepted": accepted}
        figures["acceptance"] = accepted / proposed if proposed else None
        same = all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))
        rows.append(figures | {"same_tokens": same})
    return rows


@torch.inference_mode()
def _answers(model: Any, asked: Sequence[dict[str, Any]], tokens: int) -> list[Tensor]:
    """Greedy answers of so many tokens each."""
    how: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    return [model.generate(**inputs, **how, do_sample=False) for inputs in asked]


def cost_rows(
    preset: str,
    visual: int,
    shares: Sequence[float],
    lengths: Sequence[int],
    acceptance: dict[str, float | None],
    rounds: int = 5,
    dtype: str = "auto",
    tick: Tick = quiet,
) -> list[Row]:
    """Time steps, drafts and verifying passes over caches of random numbers of one shape.

    A row for each share that a draft reads, at the number of drafts that pays most.
    """
    shape, device = get_preset(preset), torch.device("cpu")
    case = build(preset, ("llm", "decode"), 1, device, pick_dtype(dtype, shape, device))
    text = case.model.config.get_text_config()
    held = visual + 33  # a system line, a newline token and a short question
    short = {share: 33 + round(share * visual) for share in shares}
    jobs = {"step": (held, 1), **{f"draft {s}": (short[s], 1) for s in shares}}
    jobs |= {f"verify {k}": (held, k + 1) for k in lengths}
    run = {name: partial(_pass, case.model, text, *job) for name, job in jobs.items()}
    with torch.no_grad(), timing.one_thread(), timing.frozen(), grouped(case.model):
        for each in run.values():
            each()
        times: dict[str, list[float]] = {name: [] for name in run}
        for number in range(rounds):
            for name, each in run.items():
                tick(f"{preset} {name}", number, rounds)
                times[name].append(each())
    ms = {name: median(found) for name, found in times.items()}
    weights = decode_bytes(case.model, [0] * text.num_hidden_layers)
    whole = decode_bytes(case.model, [held] * text.num_hidden_layers)
    rows = []
    for share in shares:
        alpha = acceptance.get(f"self:{share}")
        part = decode_bytes(case.model, [short[share]] * text.num_hidden_layers)
        rows.append(
            {
                "preset": preset,
                "device": "cpu",
                "job": f"self:{share}",
                "visual": visual,
                "dtype": dtype_name(case.visual.dtype),
                "clock": timing.PROCESSOR_CLOCK,
                "n": rounds,
                "step_ms": ms["step"],
                "draft_ms": ms[f"draft {share}"],
                "acceptance": alpha,
                "kv_share_of_bytes": 1 - weights / whole,
                **_best(alpha, lengths, ms, share, part / whole),
            }
        )
    return rows


def expected_tokens(alpha: float, drafts: int) -> float:
    """Tokens that a pass makes certain, where each of `drafts` stands with chance `alpha`."""
    return sum(alpha**i for i in range(drafts + 1))


def _best(
    alpha: float | None, lengths: Sequence[int], ms: dict[str, float], share: float, part: float
) -> Row:
    """Figures of the number of drafts that pays most; ideal: a pass reads all bytes once."""
    if alpha is None:
        return {}
    gains = {
        k: expected_tokens(alpha, k) * ms["step"] / (k * ms[f"draft {share}"] + ms[f"verify {k}"])
        for k in lengths
    }
    k = max(gains, key=lambda each: gains[each])
    ideal = max(expected_tokens(alpha, each) / (each * part + 1) for each in lengths)
    return {"drafts": k, "verify_ms": ms[f"verify {k}"], "speedup": gains[k], "ideal": ideal}


def _pass(model: Any, text: Any, held: int, width: int) -> float:
    """Milliseconds of one pass over `width` tokens behind `held` random entries."""
    cache = DynamicCache(config=text)
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    like = next(model.parameters())
    for index in range(text.num_hidden_layers):
        shape = (1, text.num_key_value_heads, held, dim)
        cache.update(_noise(shape, like), _noise(shape, like), index)
    ids = torch.arange(width)[None]
    where = torch.arange(held, held + width)[None]
    start = time.process_time()
    model(input_ids=ids, position_ids=where, **{CACHE: cache}, use_cache=True)
    return 1e3 * (time.process_time() - start)


def _noise(shape: tuple[int, ...], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like.dtype)
