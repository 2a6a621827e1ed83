"""Benchmarks of media that are paid for once: time, error and answers beside a full prefill."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.bench.cases import Case, build, video_features
from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.suites.camera import embedded_clips
from mmfast.bench.timing import ON_ONE_THREAD, compare_jobs, one_thread
from mmfast.core.trace import Trace
from mmfast.frontends.image import read_image
from mmfast.models.cache_name import CACHE
from mmfast.models.loading import embedded_path, load
from mmfast.models.prompt import Shot, build_inputs, chat_inputs
from mmfast.models.reduction.inputs import PromptRows
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.plan import ReusePlan, parse_reuse
from mmfast.streams.reuse.prefill import ReusePrefill, SeenPart
from mmfast.streams.reuse.store import ReuseStore
from mmfast.tiny.evaluate import interval
from mmfast.tiny.suites import SuiteCase, order_cases, suite_of

PRESET, ROUNDS = "llava-onevision-0.5b", 5
SPECS = ("blend:0.15", "craft:0.15")
BEFORE, AFTER = (14, 24), 18  # text tokens before the pictures, when they are seen and seen again
COUNTS = (1, 2)


@benchmark("stream", "reuse")
def reuse(
    tick: Tick, name: str = PRESET, rounds: int = ROUNDS, pictures: Sequence[int] = COUNTS
) -> list[Row]:
    """Compare a prefill with pictures that were seen at another place with a full prefill."""
    case = build(name, ["llm"], frames=1)
    found: list[Row] = []
    for number, count in enumerate(pictures):
        tick("timing", number, len(pictures))
        with torch.no_grad(), one_thread():
            found += _reuse_rows(case, count, rounds, {"preset": name, "dtype": "float32"})
    return found


def _reuse_rows(case: Case, pictures: int, rounds: int, shared: Row) -> list[Row]:
    prefill = ReusePrefill(case.model)
    seen, again = (_prompt(case, before, pictures) for before in BEFORE)
    first = prefill.run(seen)
    size = int(seen.visual.sum()) // pictures
    parts = []
    for start in range(0, size * pictures, size):
        span = BEFORE[0] + start, BEFORE[0] + start + size
        block, impact = first.part(*span, seen.positions), first.impact(*span, prefill.scaling)
        parts.append(SeenPart(BEFORE[1] + start, block, False, impact))
    del first
    whole = prefill.run(again)
    extra: dict[str, Mapping[str, Any]] = {"full": {"computed": len(again.hidden)}}
    for spec in SPECS:
        extra[spec] = _distance(prefill.run(again, parts, parse_reuse(spec)), whole)
    del whole
    jobs: dict[str, Any] = {"full": partial(prefill.run, again)}
    jobs |= {spec: partial(prefill.run, again, parts, parse_reuse(spec)) for spec in SPECS}
    shared |= {"tokens": len(again.hidden), "visual": size * pictures}
    if pictures > 1:
        shared["note"] = f"{pictures} pictures"
    measured = compare_jobs(jobs, rounds, shared, extra=extra)
    return [row | {"of_full": 1 / row["speedup"]} for row in measured]


def _prompt(case: Case, before: int, pictures: int) -> PromptRows:
    """Pictures of the tower's whole raster behind `before` tokens of text."""
    rows, columns = case.preset.grid
    embed = case.model.get_input_embeddings()
    picture = video_features((pictures, rows, columns), embed.weight.shape[1]).to(embed.weight)
    generator = torch.Generator().manual_seed(before)
    ids = torch.randint(min(1000, len(embed.weight)), (before + AFTER,), generator=generator)
    text = embed(ids).detach()
    hidden = torch.cat([text[:before], picture, text[before:]])
    visual = torch.zeros(len(hidden), dtype=torch.bool)
    visual[before : before + len(picture)] = True
    places = torch.arange(len(hidden))[None]
    return PromptRows(hidden, places, {}, visual, (), torch.zeros_like(visual))


def _distance(found: Any, whole: Any) -> dict[str, Any]:
    """Relative distances from a full prefill: of the last hidden state, of keys and values."""
    kv = [_relative(a, b) for a, b in zip(found.layers, whole.layers, strict=True)]
    gap = _relative(found.hidden, whole.hidden)
    return {"computed": found.computed, "hidden_gap": gap, "kv_gap": statistics.mean(kv)}


def _relative(found: Tensor, want: Tensor) -> float:
    return float((found - want).norm() / want.norm())


MODEL, SEED, CASES = "tiny-video", 3000, 400
CHECKED: tuple[str | None, ...] = (None, "blend:0.15", "craft:0.15", "blend:0")
KINDS = {"one picture": "multi-image", "two pictures": None}


@benchmark("stream", "reuse-questions")
def reuse_questions(tick: Tick, n: int = CASES) -> list[Row]:
    """Ask about pictures seen before at other places, with all tokens read and with a share.

    They were seen in another order, behind a picture of the case before. Questions that one of
    three pictures answers are those of `eval --suite multi-image`; the others ask which of two
    things comes first, each of which is in one of two pictures alone.
    """
    pair = load(embedded_path(MODEL), "cpu", "float32")
    rows = []
    for kind, name in KINDS.items():
        cases = order_cases(SEED) if name is None else suite_of(name).cases(SEED)
        with one_thread():
            rows += _question_rows(pair, kind, itertools.islice(cases, n), n, tick)
    return rows


def _question_rows(
    pair: tuple[Any, Any], kind: str, cases: Iterator[SuiteCase], n: int, tick: Tick
) -> list[Row]:
    asked = {spec: _Asked(pair, spec) for spec in CHECKED}
    full, foreign = asked[None], Shot("image", np.zeros((96, 96, 3), np.uint8), None)
    for done, case in enumerate(cases):
        tick(kind, done, n)
        shots = [Shot("image", read_image(file), None) for file in case.media]
        store = ReuseStore()
        for spec in CHECKED[1:2]:  # who looks first pays; what is stored is the same for all
            asked[spec].look(store, [foreign, *reversed(shots)])
        for each in asked.values():
            each.ask(case, shots, store, full)
        foreign = shots[0]
    return [{"questions": kind, **each.row(full)} for each in asked.values()]


class _Asked:
    """Answers under one spec, None for a full prefill."""

    def __init__(self, pair: tuple[Any, Any], spec: str | None) -> None:
        self.model, self.processor = pair
        self.spec = spec
        plan = parse_reuse(spec) or ReusePlan("prefix")
        self.media = MediaReuse(*pair, plan, ReuseStore())
        self.answers: list[str] = []
        self.logits: list[Tensor] = []
        self.right: list[bool] = []
        self.gaps: list[float] = []
        self.kv: list[Tensor] = []  # of the last prompt
        self.kv_gaps: list[float] = []
        self.shares: list[float] = []

    def look(self, store: ReuseStore, shots: Sequence[Shot]) -> None:
        """See pictures for the first time."""
        self.media.store = store
        self.media.prompt(self.media.encoded(self._inputs(shots, "What is it?")))

    def ask(self, case: SuiteCase, shots: Sequence[Shot], store: ReuseStore, full: _Asked) -> None:
        """Answer a case; a full prefill has a store of its own, where nothing was seen."""
        self.answer(case, self._inputs(shots, case.question), store, full)

    def answer(
        self, case: SuiteCase, inputs: Mapping[str, Any], store: ReuseStore, full: _Asked
    ) -> None:
        """The same, of a prompt that is made already."""
        self.media.store = ReuseStore() if self.spec is None else store
        trace = Trace()
        given = self.media.prompt(self.media.encoded(inputs), trace=trace)
        self.kv = [torch.cat([each.keys, each.values]) for each in given[CACHE].layers]
        answer, logits = self._answer(given)
        self.answers.append(answer)
        self.kv_gaps += [statistics.mean(map(_relative, self.kv, full.kv))]
        self.logits.append(logits)
        self.right.append(answer == case.answer)
        read = next(row for row in trace.rows if row.stage == "reuse kv")
        self.shares.append(read.tokens_out / read.tokens_in)
        self.gaps.append(_relative(logits, full.logits[len(self.answers) - 1]))

    def _inputs(self, shots: Sequence[Shot], question: str) -> dict[str, Any]:
        return build_inputs(self.processor, [shots], [question], self.model.device)

    @torch.inference_mode()
    def _answer(self, given: Mapping[str, Any]) -> tuple[str, Tensor]:
        found = self.model.generate(
            **given,
            do_sample=False,
            max_new_tokens=8,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = found.sequences[:, given["input_ids"].shape[1] :]
        text = self.processor.batch_decode(new, skip_special_tokens=True)[0]
        return text.strip().lower(), found.logits[0][0].clone()

    def row(self, full: _Asked) -> Row:
        """Accuracy and interval, its share of that of a full prefill, agreement, and the gap."""
        n, right = len(self.right), sum(self.right)
        same = sum(a == b for a, b in zip(self.answers, full.answers, strict=True))
        row: Row = {"reuse": self.spec, "n": n, "seed": SEED, "model": MODEL}
        row |= {"accuracy": right / n}
        row |= {"interval": interval(right, n), "of_full": right / max(1, sum(full.right))}
        row |= {"same_answer": same / n, "logit_gap": statistics.median(self.gaps)}
        row |= {"kv_gap": statistics.mean(self.kv_gaps)}
        return row | {"computed": statistics.mean(self.shares), "device": "cpu", "dtype": "float32"}


AGENTS = (
    "You look at colours and answer in one word.",
    "You count what you see, one after the other, and say which of it moves and which does not.",
    "You check what others have said about a picture. They are often wrong, so look for yourself.",
)
AGENTS_CHECKED = (None, "blend:0", "blend:0.15", "craft:0.15", "kvcomm")
PICTURES, WARM = 30, 10


@benchmark("stream", "reuse-agents")
def reuse_agents(tick: Tick, n: int = PICTURES) -> list[Row]:
    """Let three agents, each with an opening of its own, ask about the same pictures.

    The first agent reads a picture in full, the others take what it kept: rotated alone
    (`blend:0`), with a share of the tokens read again, or with the offsets of pictures before.
    Answers of the others count, behind `WARM` pictures.
    """
    pair = load(embedded_path(MODEL), "cpu", "float32")
    cases = list(itertools.islice(suite_of("image").cases(SEED), n))
    stores = {spec: ReuseStore(host=None) for spec in AGENTS_CHECKED}
    asked: dict[str | None, _Asked] = {}
    for done, case in enumerate(cases):
        tick("agents", done, n)
        if done in (0, WARM):
            asked = {spec: _Asked(pair, spec) for spec in AGENTS_CHECKED}
        with one_thread():
            _agents_ask(pair, case, asked, stores)
    return [{"agents": len(AGENTS), **each.row(asked[None])} for each in asked.values()]


def _agents_ask(
    pair: tuple[Any, Any],
    case: SuiteCase,
    asked: Mapping[str | None, _Asked],
    stores: Mapping[str | None, ReuseStore],
) -> None:
    picture = Shot("image", read_image(case.media[0]), None)
    for number, agent in enumerate(AGENTS):
        chat: list[dict[str, Any]] = [{"role": "system", "content": [agent]}]
        chat.append({"role": "user", "content": [picture, case.question]})
        inputs = chat_inputs(pair[1], [chat], torch.device("cpu"))
        for spec, each in asked.items():
            if number:
                each.answer(case, inputs, stores[spec], asked[None])
            elif spec is not None:
                each.media.store = stores[spec]
                each.media.prompt(each.media.encoded(inputs))


QUESTIONS = (
    "What colour is the circle?",
    "How many objects are there?",
    "What number is on the screen?",
    "Which way does the red circle move?",
    "What shape is the red object?",
)


@benchmark("stream", "reuse-clip")
def reuse_clip(tick: Tick) -> list[Row]:
    """Ask five questions about a clip: calls of the tower, tokens read and processor time."""
    import mmfast

    clip = str(embedded_clips()[0])
    stock = mmfast.pipeline("video-qa", MODEL, device="cpu", dtype="float32")
    pair, rows, texts = (stock.model, stock.processor), list[Row](), list[list[str]]()
    for done, spec in enumerate((None, "encoder", "prefix")):
        tick(str(spec), done, 3)
        with one_thread():
            row, said = _clip_row(mmfast.pipeline("video-qa", pair, reuse=spec), clip)
        rows.append({"reuse": spec, **row})
        texts.append(said)
    return [row | {"identical": said == texts[0]} for row, said in zip(rows, texts, strict=True)]


def _clip_row(pipe: Any, clip: str) -> tuple[Row, list[str]]:
    """Figures of five questions, the first of which pays."""
    calls, times, tokens, said = list[int](), list[float](), list[int](), list[str]()
    with pipe.model.get_encoder("image").register_forward_hook(lambda *_: calls.append(1)):
        for question in QUESTIONS:
            start = time.process_time()
            answer = pipe(clip, question)
            times.append((time.process_time() - start) * 1e3)
            stages = {row.stage: row for row in answer.trace.rows}
            read = stages.get("reuse kv")
            whole = stages["prefill"].tokens_in
            tokens.append(whole if read is None else read.tokens_out + 1)
            said.append(answer.text)
    row: Row = {"n": len(QUESTIONS), "tower_calls": len(calls), "tokens_first": tokens[0]}
    row |= {"tokens_later": statistics.median(tokens[1:]), "first_ms": times[0]}
    return row | {"later_ms": statistics.median(times[1:]), "model": MODEL, **ON_ONE_THREAD}, said
