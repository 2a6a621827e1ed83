"""Benchmark of draft and verify: what drafts a model accepts, measured without labels, and cost.

Acceptance is that of the embedded model, which has learned to describe clips in 30 to 60 tokens; a
shape with random weights agrees with itself or not by chance. Cost is that of the shape, whose
weights need not be right. The speed-up that is shown joins both; the ideal one joins what was
accepted with the bytes that a draft and a pass have to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mmfast.attach import attach
from mmfast.bench import timing
from mmfast.bench.cases import build
from mmfast.bench.registry import Tick, benchmark, quiet
from mmfast.bench.results import Row, dtype_name
from mmfast.bench.suites.step_selection import filled, form_bytes
from mmfast.decoding.speculation import DecodePlan, plan_decode
from mmfast.models.cache_name import CACHE
from mmfast.models.cost import decode_bytes
from mmfast.models.decoder.draft_weights import DraftWeights
from mmfast.models.decoder.few_rows import few_rows
from mmfast.models.decoder.grouped import grouped
from mmfast.models.kv.room import growing_cache
from mmfast.models.loading import load
from mmfast.models.prompt import chat_inputs
from mmfast.tiny.scenes.evaluate import SceneCase, scene_cases

# Drafts whose cost is measured: on how much of the keys, and on which weights.
COSTLY = (
    *(f"self:{share}" for share in (0.25, 0.1)),
    *(f"self:{share}?weights=int4" for share in (0.5, 0.25, 0.1)),
    "self:0.1?weights=int8",
    "self?weights=int4",
)
VIEWS = (
    *COSTLY,
    "self:0.05",
    *(f"self:0.1?score={name}" for name in ("snapkv", "keydiff", "knorm", "random")),
    *(f"self?reduce={name}:0.25" for name in ("divprune", "evs", "visionzip", "uniform")),
    *(f"self?reduce={name}:0.1" for name in ("divprune", "evs", "visionzip", "uniform")),
    *("recycle?tree=0", "lookup"),
)
MODEL, QUESTIONS, TOKENS = "tiny-scenes", 16, 64
LENGTHS = (1, 2, 3, 4, 5, 8)  # drafts of a pass
SHAPE = ("llava-onevision-0.5b", 8000)


def described(seed: int) -> Iterator[SceneCase]:
    """Questions for a description of a clip."""
    return scene_cases(seed, ("describe",), stills=False)


@dataclass
class Descriptions:
    """Clips that the embedded model describes, greedily, and what it says of each."""

    count: int = QUESTIONS
    tokens: int = TOKENS
    whole: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.model, processor = load(MODEL, "cpu", "float32")
        # One by one: in a batch, rows that are ahead wait, and drafts of the others would count.
        chats = [[case.chat(case.shot())] for case in islice(described(2), self.count)]
        self._asked = [chat_inputs(processor, each, self.model.device) for each in chats]
        self.whole = self._answers()

    @torch.inference_mode()
    def _answers(self) -> list[Tensor]:
        how: dict[str, Any] = {"max_new_tokens": self.tokens, "do_sample": False}
        found = [self.model.generate(**inputs, **how) for inputs in self._asked]
        pairs = zip(found, self._asked, strict=True)
        return [ids[:, inputs["input_ids"].shape[1] :] for ids, inputs in pairs]

    def drafted(self, view: str, most: int) -> Row:
        """Describe all under drafts of a fixed number; answers must be the same."""
        # A reducer takes all that follows it, so the knobs go in front.
        head, _, knobs = view.partition("?")
        spec = f"{head}?most={most}&adapt=0&least=0" + (f"&{knobs}" if knobs else "")
        with attach(self.model, decode=spec) as trace:
            found = self._answers()
        rows = [row for row in trace.rows if row.stage == "draft"]
        proposed, accepted = (sum(row[k] for row in rows) for k in ("tokens_in", "tokens_out"))
        passes = sum(int(row.method.split()[-2]) for row in rows)
        said = sum(ids.shape[1] - 1 for ids in found)  # the prompt itself says the first one
        pairs = zip(found, self.whole, strict=True)
        return {
            "proposed": proposed,
            "accepted": accepted,
            "acceptance": accepted / proposed if proposed else None,
            "tokens_a_pass": said / passes,
            "same_tokens": all(torch.equal(one, other) for one, other in pairs),
        }


@benchmark("decode", "draft")
def drafts(tick: Tick) -> list[Row]:
    """Measure acceptance of drafts on the embedded model, and their speed-up on a 0.5B shape."""
    asked = Descriptions()
    rows = acceptance_rows(asked, tick=tick)
    found = {row["job"]: row["acceptance"] for row in rows}
    passes = dict[str, dict[int, float]]()
    for number, view in enumerate(COSTLY):
        tick(f"tokens a pass {view}", number, len(COSTLY))
        passes[view] = {k: asked.drafted(view, k)["tokens_a_pass"] for k in LENGTHS}
    return rows + cost_rows(*SHAPE, passes, found, tick=tick)


def acceptance_rows(
    asked: Descriptions, views: Sequence[str] = VIEWS, tick: Tick = quiet
) -> list[Row]:
    """Describe unseen clips under each view, one draft a pass."""
    rows: list[Row] = []
    shared: Row = {"preset": "embedded", "n": asked.count, "tokens": asked.tokens, "device": "cpu"}
    for number, view in enumerate(views):
        tick(f"acceptance {view}", number, len(views))
        rows.append({**shared, "job": view, **asked.drafted(view, 1)})
    return rows


def cost_rows(
    preset: str,
    visual: int,
    passes: Mapping[str, Mapping[int, float]],
    acceptance: Mapping[str, float | None],
    rounds: int = 5,
    tick: Tick = quiet,
) -> list[Row]:
    """Time steps, drafts and verifying passes over caches of random numbers of one shape.

    A row for each view of `passes`, tokens of a pass by its drafts, at the number that pays most.
    Caches grow in place, as those of pipelines do.
    """
    case = build(preset, ("llm", "decode"), 1, torch.device("cpu"), torch.float32)
    held = visual + 33  # a system line, a newline token and a short question
    plans = {view: _plan(view) for view in passes}
    short = {view: _entries(plan, visual) + 33 for view, plan in plans.items()}
    light = {form: DraftWeights(case.model, form) for form in _forms(plans)}
    model = case.model

    def cache(entries: int) -> Any:
        return filled(case, entries, 1, growing_cache(model, {})[CACHE])

    whole, lengths = cache(held), sorted({k for each in passes.values() for k in each})
    jobs = {"step": partial(_pass, model, whole, 1), timing.AGAIN: partial(_pass, model, whole, 1)}
    for view, plan in plans.items():
        weights = light.get(plan.weights)
        jobs[view] = partial(_pass, model, cache(short[view]), 1, weights)
    jobs |= {f"verify {k}": partial(_pass, model, whole, k + 1) for k in lengths}
    with ExitStack() as stack, torch.no_grad(), timing.one_thread(), timing.frozen():
        stack.enter_context(grouped(model))
        stack.enter_context(few_rows(model))
        for each in light.values():
            stack.enter_context(each.installed())
        for run in jobs.values():
            run()
        tick(f"{preset}, {len(jobs)} passes", 0, 1)
        found = timing.PairedTimes.of(timing.interleave(jobs, rounds))
    ms = {name: median(times) for name, times in found.times.items()}
    layers = model.config.get_text_config().num_hidden_layers
    stored = decode_bytes(model, [0] * layers)
    bytes_ = decode_bytes(model, [held] * layers)
    rows = list[Row]()
    for view, plan in plans.items():
        part = decode_bytes(model, [short[view]] * layers)
        if plan.weights:
            part += form_bytes(light[plan.weights].forms) - stored
        shared: Row = {"preset": preset, "device": "cpu", "job": view, "visual": visual}
        shared |= {"dtype": dtype_name(case.visual.dtype), "noise": found.noise, "n": rounds}
        shared |= {**timing.ON_ONE_THREAD, "step_ms": ms["step"], "draft_ms": ms[view]}
        shared |= {"acceptance": acceptance.get(view), "kv_share_of_bytes": 1 - stored / bytes_}
        rows.append(shared | _best(passes[view], ms, view, part / bytes_))
    return rows


def _plan(view: str) -> DecodePlan:
    found = plan_decode(view)
    assert found is not None
    return found


def _entries(plan: DecodePlan, visual: int) -> int:
    """Visual entries that a draft reads."""
    return visual if plan.budget is None else round(plan.budget * visual)


def _forms(plans: Mapping[str, DecodePlan]) -> set[str]:
    return {plan.weights for plan in plans.values() if plan.weights}


def _best(passes: Mapping[int, float], ms: Mapping[str, float], view: str, part: float) -> Row:
    """Figures of the number of drafts that pays most; ideal: a pass reads all bytes once."""
    gains = {
        k: tokens * ms["step"] / (k * ms[view] + ms[f"verify {k}"]) for k, tokens in passes.items()
    }
    k = max(gains, key=lambda each: gains[each])
    ideal = max(tokens / (each * part + 1) for each, tokens in passes.items())
    return {
        "drafts": k,
        "tokens_a_pass": passes[k],
        "verify_ms": ms[f"verify {k}"],
        "speedup": gains[k],
        "ideal": ideal,
    }


def _pass(model: Any, cache: Any, width: int, weights: DraftWeights | None = None) -> timing.Sample:
    """Milliseconds of one pass over `width` tokens, which leaves the cache as it was."""
    held = int(cache.get_seq_length())
    given = {"input_ids": torch.arange(width)[None], CACHE: cache, "use_cache": True}
    with ExitStack() as stack:
        if weights is not None:
            stack.enter_context(weights.drafting())
            stack.enter_context(grouped(model, steps=True))
        run = partial(model, position_ids=torch.arange(held, held + width)[None], **given)
        _, ms = timing.timed(run, timing.clock_of(torch.device("cpu"), 1)[0])
    cache.crop(-width)
    return {"ms": ms}
