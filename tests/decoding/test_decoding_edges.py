"""Decoding at its edges: schedules, processors, ends, turns, cancellation, strange numbers."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, cycle, islice
from typing import Any

import decode_models as small
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mmfast.core.errors import ModelError, SpecError
from mmfast.decoding.drafting import parse_schedule
from mmfast.decoding.loop import BatchDecoder, SingleDecoder
from mmfast.decoding.row import Costs, DraftLength, Open
from mmfast.decoding.sampling import Sampling, process

# --- schedules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "letters"),
    [
        ("vanilla", "MMMMMMMMMM"),
        ("1,10", "MmmmmmmmmmmMmmmmmmmmmmMmm"),
        ("boost", "MmmmmmmmmmmMMMMmmmmmmmmmmMMMMm"),
        ("balance", "MmmmmMMMmmmmmmmmMMMMmmmmmmmmmmMMMMmmmmmmmmmmMMMM"),
        ("MmmMMm", "MmmMMmMMmMMm"),
        ("1,2,2,1", "MmmMMmMMmMMm"),
        ((1, 2, 2, 1), "MmmMMmMMmMMm"),
    ],
)
def test_schedules(spec: Any, letters: str) -> None:
    passes = (each for drafts in parse_schedule(spec).runs() for each in "M" + "m" * drafts)
    assert "".join(islice(passes, len(letters))) == letters


@pytest.mark.parametrize("spec", ["turbo", "mM", "1", "1,2,3", "0,4", (), "", "M m"])
def test_unknown_schedules(spec: Any) -> None:
    with pytest.raises(SpecError) as error:
        parse_schedule(spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["mctp", "mtp"])
def test_the_passes_are_those_of_the_schedule(name: str) -> None:
    _, backbone, head = small.trained(name)
    decoder = SingleDecoder(backbone, head, Open(40), schedule="1,2,3,4", verify="none")
    decoder.feed([1, 2, 3])
    steps = list(decoder)
    made = [step.drafted for step in steps]
    assert made[:9] == [2, 0, 0, 4, 0, 0, 4, 0, 0]
    assert [len(step.tokens) for step in steps[:4]] == [3, 1, 1, 5]  # the first pass says three
    assert sum(len(step.tokens) for step in steps) == decoder.stats.tokens == 40
    assert decoder.stats.widths[3] == 2  # the prompt, and the first run with its main token
    assert decoder.stats.draft_passes == sum(step.draft_passes for step in steps)


def test_the_last_run_is_cut_at_the_limit_and_at_an_end() -> None:
    model, backbone, head = small.trained("mctp")
    ids = torch.tensor([[1, 2, 3, 4]])
    line = small.greedy(model, ids, 20)[0]
    end = line[7]
    for verify in ("exact", "none"):
        guide = Open(20, ends=(end,))
        decoder = SingleDecoder(backbone, head, guide, verify=verify)
        decoder.feed([1, 2, 3, 4])
        said = [token for step in decoder for token in step.tokens]
        assert said == guide.said and said.index(end) == len(said) - 1
        if verify == "exact":
            assert said == line[: line.index(end) + 1]


# --- processors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.3, top_p=0.6),
        Sampling(temperature=0.9, top_k=9, top_p=0.8, penalty=1.7),
        Sampling(temperature=1.2, top_k=12, top_p=0.9, min_p=0.1),
        Sampling(temperature=1.2, min_p=0.3, penalty=1.3),
        Sampling(temperature=1.1, processors=[SuppressTokensLogitsProcessor([5, 7])], penalty=1.3),
    ],
)
def test_processors_equal_those_of_transformers(sampling: Sampling) -> None:
    logits = torch.randn(6, 24, generator=torch.Generator().manual_seed(0)) * 2
    prefix = torch.randint(0, 24, (6, 7), generator=torch.Generator().manual_seed(1))
    want = logits.clone()
    if sampling.penalty != 1:
        want = RepetitionPenaltyLogitsProcessor(sampling.penalty)(prefix, want)
    for each in sampling.processors:
        want = each(prefix, want)
    want = TemperatureLogitsWarper(sampling.temperature)(prefix, want)
    if sampling.top_k:
        want = TopKLogitsWarper(sampling.top_k)(prefix, want)
    if sampling.top_p < 1:
        want = TopPLogitsWarper(sampling.top_p)(prefix, want)
    if sampling.min_p:
        want = MinPLogitsWarper(sampling.min_p)(prefix, want)
    found = process(logits, sampling, prefix.tolist())
    torch.testing.assert_close(found.softmax(-1), want.softmax(-1))


def test_the_penalty_counts_rows_and_a_window() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    sampling = Sampling(penalty=2.0, penalty_window=2)
    assert process(logits, sampling, [[10, 11, 3, 12]], 10).tolist() == [[2.0, -2.0, 0.5]]
    assert process(logits, sampling, [[3, 11, 10]], 10).tolist() == [[1.0, -4.0, 1.0]]


def test_greedy_penalty_equals_generate() -> None:
    model, backbone, head = small.trained("mctp")
    ids = small.sentences(6, 5, torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    want = model.generate(
        ids, attention_mask=mask, max_new_tokens=20, do_sample=False, repetition_penalty=1.4
    )
    guides = [Open(20) for _ in ids]
    decoder = BatchDecoder(
        backbone, head, guides, verify="exact", sampling=Sampling(penalty=1.4), costs=Costs(0.01, 0)
    )
    decoder.feed(ids.tolist())
    list(decoder)
    assert [guide.said for guide in guides] == want[:, 5:].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": (0.5, -1)},
        {"temperature": ()},
        {"min_p": 1.5},
        {"top_k": -2},
        {"top_p": 0},
        {"top_p": 1.5},
        {"penalty": 0},
        {"penalty_window": -1},
    ],
)
def test_impossible_sampling(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(options))):
        Sampling(**options)


def test_hard_logits() -> None:
    inf = float("inf")
    hard = torch.tensor([[-inf, 3.0, -inf], [-1e30, 1e30, 0.0], [0.0, 1e-30, -0.0]])
    for sampling in (Sampling(1e-9), Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6), Sampling()):
        found = process(hard, sampling, [(), (), ()]).softmax(-1)
        assert found.isfinite().all() and found[:2, 1].tolist() == [1.0, 1.0]
    for bad in (torch.nan, inf):
        broken = hard.clone()
        broken[1, 0] = bad
        with pytest.raises(ModelError, match="NaN or infinite") as error:
            process(broken, Sampling(1.0), [(), (), ()])
        assert "\n" not in str(error.value)
    with pytest.raises(ModelError):
        process(torch.full((1, 3), -inf), Sampling(1.0), [()])


@pytest.mark.parametrize("where", ["backbone", "head"])
@pytest.mark.parametrize("verify", ["exact", "none", "typical:0.3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_one_line(where: str, verify: str, temperature: float) -> None:
    _, backbone, head = small.trained("mctp")
    logits = backbone.logits
    calls = []

    def broken(hidden: torch.Tensor, rows: slice) -> torch.Tensor:
        calls.append(1)
        found = logits(hidden, rows)
        return found * torch.nan if len(calls) > (where == "head") else found

    backbone.logits = broken
    try:
        decoder = SingleDecoder(
            backbone, head, Open(9), verify=verify, sampling=Sampling(temperature=temperature)
        )
        decoder.feed([1, 2])
        with pytest.raises(ModelError, match="NaN or infinite"):
            list(decoder)
    finally:
        backbone.logits = logits


# --- streams --------------------------------------------------------------------------------------


def _say(decoder: SingleDecoder) -> list[int]:
    return [token for step in decoder for token in step.tokens]


@pytest.mark.parametrize("verify", ["exact", "none"])
def test_two_streams_on_one_model_never_touch(verify: str) -> None:
    model, backbone, head = small.trained("mctp")
    prompts = ([1, 2, 3], [9, 7, 5, 3, 1])
    alone = []
    for prompt in prompts:
        decoder = SingleDecoder(backbone, head, Open(30), verify=verify)
        decoder.feed(prompt)
        alone.append(_say(decoder))
    decoders = [SingleDecoder(backbone, head, Open(30), verify=verify) for _ in prompts]
    for decoder, prompt in zip(decoders, prompts, strict=True):
        decoder.feed(prompt)
    found: list[list[int]] = [[], []]
    running = [iter(decoder) for decoder in decoders]
    while any(len(line) < 30 for line in found):
        for line, steps in zip(found, running, strict=True):
            line += next(steps).tokens if len(line) < 30 else ()
        small.greedy(model, torch.tensor([[1, 2]]), 2)
    assert found == alone


@pytest.mark.parametrize("verify", ["exact", "none", "typical:0.3"])
def test_turns_embeddings_and_crops(verify: str) -> None:
    """What was said, heard and fed before is context: as if all had been one prompt."""
    model, backbone, head = small.trained("mctp")
    decoder = SingleDecoder(backbone, head, Open(9), verify=verify, costs=Costs(0.01, 0))
    decoder.feed([1, 2, 3])
    first = _say(decoder)
    assert decoder.batch.lengths[0] == 12
    decoder.batch.crop([3 + 5])  # only five of the nine were heard
    decoder.guide(Open(8))
    decoder.feed(backbone.embed(torch.tensor([4, 4])).detach())
    decoder.feed([5])
    context = [1, 2, 3, *first[:5], 4, 4, 5]
    assert decoder.batch.lengths[0] == len(context)
    again = SingleDecoder(backbone, head, Open(8), verify=verify, costs=Costs(0.01, 0))
    again.feed(context)
    found = _say(decoder)
    assert found == _say(again)
    if verify == "exact":
        assert found == small.greedy(model, torch.tensor([context]), 8)[0]


def test_cancel_and_go_on() -> None:
    model, backbone, head = small.trained("mctp")
    want = small.greedy(model, torch.tensor([[1, 2, 3]]), 24)[0]
    decoder = SingleDecoder(backbone, head, Open(24), verify="exact", costs=Costs(0.01, 0))
    decoder.feed([1, 2, 3])
    found: list[int] = []
    for step in decoder:
        found += step.tokens
        decoder.batch.cancel()
    assert 0 < len(found) < 24 and decoder.batch.lengths[0] == 3 + len(found)
    decoder.feed([])
    for step in decoder:  # the caller may also just stop listening
        found += step.tokens
        break
    assert found + _say(decoder) == want


def test_prompts_that_cannot_be() -> None:
    _, backbone, head = small.trained("mctp")
    decoder = SingleDecoder(backbone, head, Open(4))
    with pytest.raises(ModelError, match="feed a prompt"):
        _say(decoder)
    for prompt in ([1, 99], [-1], torch.zeros(2, 5), torch.zeros(32)):
        with pytest.raises(ModelError) as error:
            decoder.feed(prompt)
        assert "\n" not in str(error.value)
    assert decoder.batch.lengths[0] == 0
    assert _say(SingleDecoder(backbone, head, Open(0))) == []


# --- adaptation -----------------------------------------------------------------------------------


def _settled(rate: float, confidence: float, costs: Costs) -> float:
    """Drafts per main pass once it has seen what is accepted."""
    length, made, generator = DraftLength(costs), 0, torch.Generator().manual_seed(0)
    for turn in range(400):
        run: list[float] = []
        if length.begin(10):
            run.append(confidence)
            while len(run) < 10 and length.more(confidence):
                run.append(confidence)
        stood = 0
        while stood < len(run) and float(torch.rand((), generator=generator)) < rate:
            stood += 1
        if run:
            length.end(run, stood)
        made += len(run) * (turn >= 200)
    return made / 200


def test_more_is_drafted_where_more_is_accepted_and_where_it_is_cheap() -> None:
    usual = Costs(0.1, 0.03)
    lengths = [_settled(rate, 0.7, usual) for rate in (0.0, 0.5, 0.8, 0.97)]
    assert lengths == sorted(lengths) and lengths[0] < 0.5 and lengths[3] > 6
    assert _settled(0.8, 0.7, Costs(0.02, 0.01)) > lengths[2] > _settled(0.8, 0.7, Costs(0.4, 0.1))
    # What drafts think of themselves does not matter once it was measured.
    assert abs(_settled(0.8, 0.3, usual) - lengths[2]) < 1.5


def test_a_looser_rule_expects_more_of_drafts_that_were_not_tried() -> None:
    runs = []
    for power in (1.0, 0.1):
        length, made = DraftLength(Costs(0.1, 0.03), power=power), 1
        assert length.begin(10)
        while made < 10 and length.more(0.4):
            made += 1
        runs.append(made)
        for _ in range(200):  # what was measured counts, whatever the rule
            length.end([0.4], 0)
        assert length.expected(0.4) < 0.1 and not length.begin(10)
    assert runs[0] < runs[1]


def test_costs_follow_the_clock() -> None:
    costs = Costs(live=True)
    for _ in range(80):
        costs.time(1, 0.010, 0, 0.0)
        costs.time(6, 0.015, 5, 0.010)
    assert costs.draft == pytest.approx(0.2, rel=0.1) and costs.wide == pytest.approx(0.1, rel=0.1)
    still = Costs()
    still.time(1, 0.010, 5, 0.5)
    assert (still.draft, still.wide) == (0.1, 0.03)


def test_what_is_drafted_depends_on_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for seconds in ((0.0, 1.0, 0.001), (0.0, 0.001, 1.0)):  # of passes and of drafts, by turns
        clock = accumulate(cycle(seconds))
        for name in ("thread_time", "process_time", "perf_counter", "monotonic", "time"):
            monkeypatch.setattr(f"time.{name}", partial(next, clock))
        _, backbone, head = small.trained("mctp")
        decoder = SingleDecoder(backbone, head, Open(60), mode="fast")
        decoder.feed([1, 2, 3])
        runs.append([(step.tokens, step.drafted) for step in decoder])
    assert runs[0] == runs[1] and len(runs[0]) < 60


def test_drafting_stops_where_nothing_is_accepted() -> None:
    _, backbone, head = small.trained("mctp")
    decoder = SingleDecoder(backbone, head, Open(120), verify="exact", costs=Costs(0.3, 0.1))
    decoder.feed([1, 2, 3])
    output = head.output
    head.output = lambda k, states, rows: output(k, states, rows).neg()  # the unlikeliest
    try:
        _say(decoder)
    finally:
        del head.output
    assert decoder.stats.draft_passes < 60 and decoder.stats.acceptance < 0.2
