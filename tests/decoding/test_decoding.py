"""Exact decoding says what one token per pass says: greedy, and in distribution when sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import decode_models as small
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from mmfast.core.errors import ModelError, SpecError
from mmfast.decoding import row as row_module
from mmfast.decoding.accept import AcceptRule
from mmfast.decoding.drafting import MODES, parse_mode
from mmfast.decoding.loop import BatchDecoder, SingleDecoder
from mmfast.decoding.row import Costs, Open
from mmfast.decoding.sampling import Sampling, process
from mmfast.models.decoder.backbone import make_head

HEADS = [("mctp", 0), ("mtp", 0), ("mctp", 1)]
CHEAP = Costs(draft=0.01, wide=0.0)  # drafts are always worth trying


def _prompts(n: int, length: int, seed: int = 0) -> Tensor:
    return small.sentences(n, length, torch.Generator().manual_seed(seed + 50))


def _decode(
    backbone: Any, head: Any, prompts: Sequence[Any], limit: int = 20, **options: Any
) -> tuple[list[list[int]], Any]:
    guides = [Open(limit) for _ in prompts]
    decoder = BatchDecoder(backbone, head, guides, costs=CHEAP, reserve=32, **options)
    decoder.feed(prompts)
    said: list[list[int]] = [[] for _ in prompts]
    for steps in decoder:
        for line, step in zip(said, steps, strict=True):
            line += step.tokens if step is not None else ()
    assert said == [guide.said for guide in guides]
    return said, decoder


@pytest.mark.parametrize("each", [60, pytest.param(250, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "window"), HEADS)
def test_greedy_exact_equals_stock_generate(name: str, window: int, each: int) -> None:
    """For 1000 prompts where all is run, and for 240 by default."""
    model, backbone, head = small.trained(name, window)
    tested = stood = 0
    for i, schedule in enumerate(("1,10", "boost", "balance", "MmmMMm")):
        prompts = _prompts(each, 3 + 2 * i, i)
        want = small.greedy(model, prompts, 16)
        found, decoder = _decode(
            backbone, head, prompts.tolist(), 16, schedule=schedule, verify="exact"
        )
        assert found == want, schedule
        for stats in decoder.stats:
            tested += sum(n for n, _ in stats.by_place)
            stood += sum(n for _, n in stats.by_place)
    assert 0.15 < stood / tested < 0.97  # else nothing was put to the test


def test_greedy_exact_with_untrained_drafts() -> None:
    model, backbone, _ = small.trained("mctp")
    for name in ("mctp", "mtp"):
        torch.manual_seed(5)
        head = make_head(name, backbone, modules=3, start="random").eval()
        prompts = _prompts(50, 4)
        found, _ = _decode(backbone, head, prompts.tolist(), 12, verify="exact")
        assert found == small.greedy(model, prompts, 12)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("verify", ["exact", "none", "typical:0.2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("name", "window"), HEADS[:2])
def test_a_batch_says_what_its_streams_say_alone(
    name: str, window: int, verify: str, temperature: float
) -> None:
    _, backbone, head = small.trained(name, window)
    prompts = [p[: 2 + i].tolist() for i, p in enumerate(_prompts(5, 9))]
    options: dict[str, Any] = {"schedule": "MmmmMMmm", "verify": verify}
    sampling = {"temperature": temperature, "top_k": 9, "penalty": 1.2, "penalty_window": 6}
    together, batch = _decode(
        backbone, head, prompts, sampling=Sampling(**sampling, seed=7), **options
    )
    for i, prompt in enumerate(prompts):
        alone, decoder = _decode(
            backbone, head, [prompt], sampling=Sampling(**sampling, seed=7 + i), **options
        )
        assert alone[0] == together[i]
        assert decoder.stats[0].by_place == batch.stats[i].by_place


def test_ragged_acceptance_really_happens() -> None:
    _, backbone, head = small.trained("mctp")
    _, decoder = _decode(backbone, head, _prompts(8, 6).tolist(), verify="exact")
    assert len({stats.passes for stats in decoder.stats}) > 1


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize(("foresee", "every"), [(False, 0), (True, 0), (True, 4)])
@pytest.mark.parametrize(("name", "window"), HEADS)
def test_exact_under_a_guide(name: str, window: int, foresee: bool, every: int) -> None:
    """Forced words, rows of the vocabulary, stops: all as with one token per pass."""
    _, backbone, head = small.trained(name, window)
    prompts = _prompts(20, 5, 3).tolist()
    lines = []
    for drafts in (False, True):
        guides = [small.Spelling(30, foresee, every=every) for _ in prompts]
        decoder = BatchDecoder(
            backbone, head if drafts else None, guides, verify="exact", costs=CHEAP
        )
        decoder.feed(prompts)
        for _ in decoder:
            pass
        lines.append([guide.line for guide in guides])
        forced = sum(stats.forced for stats in decoder.stats)
        passes = sum(stats.passes for stats in decoder.stats)
    assert lines[0] == lines[1]
    assert forced > 20 and any(8 in guide.said for guide in guides)
    assert all(token >= 8 for guide in guides for token in guide.said)
    assert passes < 30 * 20
    assert set().union(*(stats.by_book for stats in decoder.stats)) == {0, 1}


def test_foresight_saves_passes() -> None:
    _, backbone, head = small.trained("mctp")
    passes = []
    for foresee in (False, True):
        guides = [small.Spelling(40, foresee) for _ in range(20)]
        decoder = BatchDecoder(backbone, head, guides, verify="exact", costs=CHEAP)
        decoder.feed(_prompts(20, 5, 3).tolist())
        list(decoder)
        passes.append(sum(stats.passes for stats in decoder.stats))
    assert passes[1] < passes[0]


# --- sampling -------------------------------------------------------------------------------------

FEW = slice(3, 6)


def _enumerated(
    backbone: Any, prompt: list[int], sampling: Sampling
) -> dict[tuple[int, ...], float]:
    """Chances of all lines of three tokens, one token per pass and nothing shared between."""

    def after(line: tuple[int, ...]) -> Tensor:
        ids = torch.tensor([[*prompt, *line]])
        hidden, _ = small.read(backbone, ids)
        logits = backbone.logits(hidden[0, -1:], FEW)
        return process(logits, sampling, [[*prompt, *line]], FEW.start)[0].softmax(-1)

    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        found = {
            (*line, FEW.start + i): chance * float(share)
            for line, chance in found.items()
            for i, share in enumerate(after(line))
        }
    return found


def _distance(head: str, sampling: Sampling, n: int = 1500) -> float:
    _, backbone, drafts = small.trained(head)
    prompt = [4, 5, 6, 5]
    want = _enumerated(backbone, prompt, sampling)
    guides = [Open(3, rows=FEW) for _ in range(n)]
    decoder = BatchDecoder(
        backbone, drafts, guides, verify="exact", sampling=sampling, costs=CHEAP, reserve=16
    )
    decoder.feed([prompt] * n)
    for _ in decoder:
        pass
    counts: dict[tuple[int, ...], float] = {}
    for guide in guides:
        counts[tuple(guide.said)] = counts.get(tuple(guide.said), 0) + 1 / n
    assert sum(stats.draft_passes for stats in decoder.stats) > 0
    return sum(abs(counts.get(line, 0) - want.get(line, 0)) for line in {*counts, *want}) / 2


def _other_than_before(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor as of transformers: the token said last becomes unlikely."""
    return scores.scatter_add(1, ids[:, -1:], torch.full((1, 1), -1.5, dtype=scores.dtype))


SAMPLINGS = [
    Sampling(temperature=1.3, seed=1),
    Sampling(temperature=1.5, top_k=2, top_p=0.95, penalty=1.6, seed=2),
    Sampling(
        temperature=1.4,
        min_p=0.1,
        processors=LogitsProcessorList([_other_than_before, NoRepeatNGramLogitsProcessor(3)]),
        seed=3,
    ),
]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_sampling_exact_has_the_distribution_of_one_token_per_pass(sampling: Sampling) -> None:
    assert _distance("mctp", sampling) < 0.045


class _Books(Open):
    """Token 4 is of codebook 1, the others are of codebook 0."""

    def book(self, token: int) -> int:
        return int(token == 4)


def _by_book(logits: Tensor, heats: tuple[float, float]) -> Tensor:
    """Chances of one place, its temperature that of the codebook of its likeliest token."""
    heat = heats[int(logits.argmax()) + FEW.start == 4]
    if heat == 0:
        return torch.eye(len(logits), dtype=logits.dtype)[int(logits.argmax())]
    return (logits / heat).softmax(-1)


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("heats", [(0.5, 2.0), (0.0, 1.5)])
@pytest.mark.parametrize("fault", [False, True])
def test_a_temperature_per_codebook(
    heats: tuple[float, float], fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of the first two tokens; one temperature for both books is noticed."""
    _, backbone, head = small.trained("mctp")
    if fault:
        monkeypatch.setattr(Sampling, "heat", lambda self, book: 1.0)
    prompt, n = [4, 5, 6, 5], 900

    def after(*line: int) -> Tensor:
        hidden, _ = small.read(backbone, torch.tensor([[*prompt, *line]]))
        return _by_book(backbone.logits(hidden[0, -1], FEW), heats)

    tokens = range(FEW.start, FEW.stop)
    first, second = after(), {token: after(token) for token in tokens}
    want = {
        (a, b): n * float(first[a - FEW.start] * second[a][b - FEW.start])
        for a in tokens
        for b in tokens
    }
    guides = [_Books(2, rows=FEW) for _ in range(n)]
    sampling = Sampling(temperature=heats, seed=5)
    decoder = BatchDecoder(backbone, head, guides, sampling=sampling, costs=CHEAP, reserve=16)
    decoder.feed([prompt] * n)
    list(decoder)
    counts = Counter(tuple(guide.said) for guide in guides)
    never = sum(counts[line] for line, expected in want.items() if not expected)
    square = sum((counts[line] - e) ** 2 / e for line, e in want.items() if e)
    assert (never == 0 and square < 26.12) is not fault  # 8 degrees of freedom at 0.001


@pytest.mark.parametrize("mode", ["exact", "fast", "turbo"])
def test_processors_leave_out_what_they_forbid(mode: str) -> None:
    """What stock `generate` says with them, and no forbidden token in any mode."""
    model, backbone, head = small.trained("mctp")
    prompts = _prompts(6, 5, 7)
    chain = LogitsProcessorList(
        [SuppressTokensLogitsProcessor([3, 9]), NoRepeatNGramLogitsProcessor(2)]
    )
    found, decoder = _decode(
        backbone, head, prompts.tolist(), 16, mode=mode, sampling=Sampling(processors=chain)
    )
    assert sum(stats.drafted for stats in decoder.stats) > 20
    for prompt, line in zip(prompts.tolist(), found, strict=True):
        pairs = list(pairwise([*prompt, *line]))[len(prompt) - 1 :]
        assert not {3, 9} & set(line) and len(set(pairs)) == len(pairs)
    if mode == "exact":
        want = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=16,
            do_sample=False, logits_processor=chain,
        )  # fmt: skip
        assert found == want[:, 5:].tolist()


def test_processors_that_leave_nothing_are_named() -> None:
    _, backbone, head = small.trained("mctp")
    sampling = Sampling(processors=lambda ids, scores: scores - torch.inf)
    with pytest.raises(ModelError, match="leave no token"):
        _decode(backbone, head, [[1, 2]], sampling=sampling)
    with pytest.raises(SpecError, match="'top'"):
        Sampling(processors=["top"])


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("fault", ["always", "resample"])
def test_a_planted_wrong_rule_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = row_module.accept_sampled

    def always(drafts: Tensor, p: Tensor, q: Tensor, counts: Tensor, u: Tensor, v: Tensor) -> Any:
        return counts, row_module.draw(p[:, -1], v)

    def resample(drafts: Tensor, p: Tensor, q: Tensor, counts: Tensor, u: Tensor, v: Tensor) -> Any:
        accepted, _ = right(drafts, p, q, counts, u, v)
        return accepted, row_module.draw(p[0, accepted], v)

    monkeypatch.setattr(
        row_module, "accept_sampled", {"always": always, "resample": resample}[fault]
    )
    assert any(_distance("mctp", sampling) > 0.09 for sampling in SAMPLINGS[:2])


def test_a_seed_says_everything() -> None:
    _, backbone, head = small.trained("mctp")
    lines = []
    for seed in (3, 3, 4):
        guide = Open(40)
        decoder = SingleDecoder(
            backbone, head, guide, verify="exact", sampling=Sampling(temperature=1.5, seed=seed)
        )
        decoder.feed([1, 2, 3])
        list(decoder)
        lines.append(guide.said)
    assert lines[0] == lines[1] != lines[2]


# --- modes ----------------------------------------------------------------------------------------


def _unlikely(model: Any, prompts: Tensor, lines: list[list[int]]) -> list[float]:
    """Of every token the share of the likeliest one's probability, by the stock forward pass."""
    ids = torch.cat([prompts, torch.tensor(lines)], 1)
    p = model(input_ids=ids, use_cache=False).logits.softmax(-1)[:, prompts.shape[1] - 1 : -1]
    said = p.gather(-1, ids[:, prompts.shape[1] :, None]).squeeze(-1)
    return (said / p.amax(-1)).flatten().tolist()


def test_modes_differ_in_what_they_accept() -> None:
    """Exact says what one token per pass says; looser rules say less likely tokens, sooner."""
    model, backbone, head = small.trained("mctp")
    prompts = _prompts(60, 5, 11)
    passes, lowest = {}, {}
    for mode in ("exact", "fast", "turbo"):
        found, decoder = _decode(backbone, head, prompts.tolist(), 16, mode=mode)
        assert (found == small.greedy(model, prompts, 16)) is (mode == "exact")
        passes[mode] = sum(stats.passes for stats in decoder.stats)
        lowest[mode] = min(_unlikely(model, prompts, found))
        assert sum(n for stats in decoder.stats for n, _ in stats.by_place) > 0  # verified
    assert passes["turbo"] < passes["fast"] < passes["exact"]
    assert lowest["turbo"] < lowest["fast"] < lowest["exact"] == 1
    assert decoder.rule == AcceptRule("typical", MODES["turbo"].rule.epsilon)


def test_a_mode_is_never_raw_unless_told() -> None:
    """A verifier that is left out, as `verify="none"` does, is noticed by every mode's test."""
    model, backbone, head = small.trained("mctp")
    prompts = _prompts(20, 5, 12)
    for mode in MODES:
        found, decoder = _decode(backbone, head, prompts.tolist(), 16, mode=mode, verify="none")
        assert sum(n for stats in decoder.stats for n, _ in stats.by_place) == 0
        assert found != small.greedy(model, prompts, 16)
    assert all(mode.rule.kind != "none" for mode in MODES.values())


def test_the_run_ends_where_the_head_is_not_confident() -> None:
    _, backbone, head = small.trained("mctp")
    prompts, kept = _prompts(20, 5, 13).tolist(), {}
    for confidence in (0.0, 0.5, 0.9):
        for temperature in (0.0, 1.0):
            mode = replace(MODES["exact"], confidence=confidence)
            guides = [Open(12) for _ in prompts]
            decoder = BatchDecoder(
                backbone, head, guides, mode=mode, sampling=Sampling(temperature), costs=CHEAP
            )
            decoder.feed(prompts)
            sure: list[float] = []
            for _ in decoder:
                sure += [c for row in decoder.rows for c in row.confidences]
            assert all(each >= confidence for each in sure)
            kept[confidence, temperature] = len(sure)
    assert kept[0.0, 0.0] > kept[0.5, 0.0] > kept[0.9, 0.0]
    assert kept[0.0, 1.0] > kept[0.5, 1.0] > kept[0.9, 1.0]


def test_a_stop_on_confidence_keeps_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "exact", replace(MODES["exact"], confidence=0.5))
    assert _distance("mctp", SAMPLINGS[0]) < 0.045


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mode": "boost"}, "schedule='boost'"),
        ({"mode": "turob"}, "did you mean 'turbo'"),
        ({"mode": (1, 10)}, "schedule=(1, 10)"),
        ({"schedule": "bost"}, "did you mean 'boost'"),
        ({"verify": "tipical"}, "did you mean 'typical"),
    ],
)
def test_unknown_modes(options: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_mode(**options)
    assert told in str(error.value) and "\n" not in str(error.value)
