"""Measure a model on questions about unseen media, with all visual tokens and with fewer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmfast.attach import attach
from mmfast.caches.plan import call_plan
from mmfast.core.spec import Spec, parse
from mmfast.frontends.image import read_image
from mmfast.frontends.video.reader import read_video
from mmfast.models.attention import with_attn
from mmfast.models.cache_name import returned_cache
from mmfast.models.cost import FirstToken
from mmfast.models.families.adapter import token_counts
from mmfast.models.kv.packs import nbytes
from mmfast.models.loading import embedded_path, load
from mmfast.models.packing import pack_weights
from mmfast.models.prompt import Shot, build_inputs
from mmfast.models.reduction.inputs import encoded
from mmfast.ops.weight_forms import FEW
from mmfast.prefill.plan import PrefillPlan, plan_prefill
from mmfast.tiny.suites import Suite, SuiteCase, suite_of
from mmfast.tiny.suites import suite as suite
from mmfast.tiny.training import shares
from mmfast.tiny.video.scene import SAMPLED

Z = 1.959964  # 95 %


def interval(right: int, n: int) -> list[float]:
    """Wilson score interval (95 %) of the share of `right` among `n` answers: its two bounds."""
    share, spread = right / n, Z * Z / n
    middle = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return [max(0.0, middle - half), min(1.0, middle + half)]


BATCH = 20
Progress = Callable[[str, int, int], None]
Inputs = dict[str, Any]


class Subject:
    """A model under test with its processor; the suite's embedded model by default."""

    def __init__(
        self,
        model: Any = None,
        device: str | None = "cpu",
        asked: Suite | None = None,
        weights: str | None = None,
        attn: str | None = None,
    ) -> None:
        self.asked = asked or suite_of("video")
        self.name = self.asked.model if model is None else str(model)
        source = embedded_path(self.asked.model) if model is None else model
        kwargs = with_attn(None, attn)
        self.model, self.processor = load(source, device, "auto", model_kwargs=kwargs)
        if weights is not None:
            pack_weights(self.model, weights)

    def inputs(self, cases: Sequence[SuiteCase]) -> Inputs:
        """Processor output for a batch of cases, padded on the left."""
        shots = [[self.shot(file) for file in case.media] for case in cases]
        questions = [case.question for case in cases]
        return build_inputs(self.processor, shots, questions, self.model.device)

    def shot(self, file: bytes) -> Shot:
        """Decode a file of the suite."""
        if self.asked.media == "image":
            return Shot("image", read_image(file), None)
        clip = read_video(file, frames=SAMPLED)
        return Shot("video", clip.frames, clip.metadata())

    def answers(self, inputs: Inputs) -> list[str]:
        """Greedy answers as plain text."""
        return self.timed_answers(inputs)[0]

    def timed_answers(self, inputs: Inputs) -> tuple[list[str], float]:
        """Greedy answers, and the milliseconds to the batch's first token per question."""
        return self._generate(inputs)[1:]

    def replies(self, inputs: Inputs) -> Replies:
        """Greedy answers with the model's confidence in them, and the cache that they left."""
        out, texts, ms = self._generate(
            inputs, output_logits=True, return_dict_in_generate=True, use_cache=True
        )
        chances = out.logits[0].float().softmax(-1).amax(-1)  # [B]
        held = sum(map(nbytes, returned_cache(out).layers)) / len(texts)
        return Replies(texts, ms, chances.tolist(), held)

    @torch.inference_mode()
    def _generate(self, inputs: Inputs, **how: Any) -> tuple[Any, list[str], float]:
        first, start = FirstToken(), time.perf_counter()
        prompt = inputs["input_ids"]
        how |= {"do_sample": False, "max_new_tokens": 8, "streamer": first}
        out = self.model.generate(**inputs, **how)
        ids = getattr(out, "sequences", out)[:, prompt.shape[1] :]
        texts = self.processor.batch_decode(ids, skip_special_tokens=True)
        return out, [t.strip().lower() for t in texts], (first.at - start) * 1e3 / len(prompt)


@dataclass(frozen=True)
class Replies:
    """Answers to a batch of questions."""

    texts: list[str]
    ms: float  # milliseconds to the batch's first token, per question
    chances: list[float]  # probability of the first token of each answer
    kv_bytes: float  # bytes of keys and values behind the answers, per question


class QuestionBatch:
    """Questions answered together; the encoder runs once for all reductions behind it."""

    def __init__(self, subject: Subject, cases: Sequence[SuiteCase], needs: set[str]) -> None:
        self.cases = cases
        self.inputs = subject.inputs(cases)
        start = time.perf_counter()
        self.encoded = encoded(subject.model, self.inputs, needs)
        self.encode_ms = (time.perf_counter() - start) * 1e3 / len(cases)


def run_eval(
    specs: Sequence[str | None],
    n: int = 400,
    seed: int = 0,
    model: str | Path | None = None,
    progress: Progress | None = None,
    device: str = "cpu",
    name: str = "video",
    caches: Sequence[str] = (),
    sink: Callable[[dict[str, Any]], object] = lambda document: None,
    weights: str | None = None,
    prefill: str | None = None,
    attn: str | None = None,
    known: Callable[[str | None, str | None], dict[str, Any] | None] = lambda spec, cache: None,
) -> dict[str, Any]:
    """Accuracy with all tokens (always the first row) and under each reduction.

    A spec is such as "divprune:0.25", None = all tokens. All rows are repeated under each KV policy
    of `caches` ("snapkv:0.25") and then name theirs under `cache`. Progress is called with (spec,
    questions done, n), `sink` with a result of each row by itself. The result is the document of
    `mmfast eval --json`: accuracy and by_kind are shares of exact answers, interval the 95 %
    interval of the accuracy (Wilson), kept the mean number of visual tokens a question, ttft_ms
    the median time to the first token (in batches, encoder included). `weights` packs those of
    the decoder ("int8"), `prefill` says what prompts read ("hip:0.25?least=64&block=16"), and
    `attn` names the attention back end; every row then names them. A row that is `known` by its
    spec and policy is not measured again, but given to `sink` as well.
    """
    wanted: list[str | None] = [None, *(spec for spec in specs if spec is not None)]
    stages = {spec: parse(spec) for spec in wanted}
    for each in caches:
        call_plan(each)
    ways = [(spec, cache) for cache in (None, *caches) for spec in wanted]
    before = {way: row for way in ways if (row := known(*way)) is not None}
    new = {spec for spec, cache in ways if (spec, cache) not in before}
    subject = Subject(model, device, suite_of(name), weights, attn)
    sparse = plan_prefill(prefill)
    tell: Progress = progress or (lambda *_: None)
    tell("making cases", 0, n)
    cases = suite(n, seed, name) if new else []
    behind = [spec for spec in new if not in_tower(stages[spec])]
    needs = {need for spec in behind for stage in stages[spec] for need in stage.method.needs}
    together = FEW if weights else BATCH  # packed kernels are those of few rows
    sizes = {1 if answered_alone(stages[spec]) else together for spec in new}
    batches: dict[int, list[QuestionBatch]] = {size: [] for size in sizes}
    for size, prepared in batches.items():
        for at in range(0, n, size):
            prepared.append(QuestionBatch(subject, cases[at : at + size], needs))
            tell("encoding", min(at + size, n), n)
    head, rows = {"suite": name, "n": n, "seed": seed, "model": subject.name}, []
    for spec, cache in ways:
        row = before.get((spec, cache))
        if row is None:
            done = batches[1 if answered_alone(stages[spec]) else together]
            row = _row(subject, done, spec, not in_tower(stages[spec]), progress, cache, sparse)
            how = {"weights": weights, "prefill": prefill, "attn": attn}
            row |= {key: value for key, value in how.items() if value}
        row = {key: value for key, value in row.items() if key != "cache"}
        rows.append({**row, "cache": cache} if caches else row)
        sink({**head, "rows": rows[-1:]})
    return {**head, "rows": rows}


def in_tower(stages: Sequence[Spec]) -> bool:
    """Return whether a stage reduces inside the encoder, which then runs for it alone."""
    return any(stage.site in ("vit", "pixel") for stage in stages)


def answered_alone(stages: Sequence[Spec]) -> bool:
    """Return whether a stage brings tokens back while decoding, which a batch cannot."""
    return any(stage.method.revives for stage in stages)


def _row(
    subject: Subject,
    batches: Sequence[QuestionBatch],
    spec: str | None,
    behind: bool,
    progress: Progress | None,
    cache: str | None = None,
    prefill: PrefillPlan | None = None,
) -> dict[str, Any]:
    found, kept, times = list[tuple[str, bool]](), list[int](), list[float]()
    total = sum(len(batch.cases) for batch in batches)
    for batch in batches:
        with attach(subject.model, spec, cache, prefill=prefill) as trace:
            answers, ms = subject.timed_answers(batch.encoded if behind else batch.inputs)
        times.append(ms + (batch.encode_ms if behind else 0.0))
        counts = token_counts(subject.model, subject.asked.media, batch.inputs, trace)
        kept += [left for _, left in counts]
        pairs = zip(batch.cases, answers, strict=True)
        found += [(case.kind, answer == case.answer) for case, answer in pairs]
        if progress is not None:
            label = " ".join(filter(None, (spec or "all tokens", cache)))
            progress(label, len(found), total)
    right, kinds = sum(mark for _, mark in found), shares(found, subject.asked.kinds)
    row = {"reduce": spec, "accuracy": right / total, "interval": interval(right, total)}
    ttft = sorted(times)[len(times) // 2]
    return {**row, "by_kind": kinds, "kept": sum(kept) / total, "ttft_ms": ttft}
