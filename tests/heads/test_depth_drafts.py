"""Codes drafted at once and checked by one pass are what the depth transformer alone would say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from codebook_models import KINDS, depth_core
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.decoding import codebooks
from mmfast.decoding.codebooks import (
    BlockPlan,
    CodeChoice,
    FrameCount,
    FrameDecoder,
    FrameDrafts,
    copy_frame,
    draft_and_check,
    measure_share,
    one_by_one,
    parallel,
)
from mmfast.decoding.sampling import Sampling, draw
from mmfast.heads.code_base import CodeMlp

GREEDY = CodeChoice()


def _drafts(right: Tensor, wrong: float) -> FrameDrafts:
    noise = torch.rand(right.shape) < wrong
    return FrameDrafts(torch.where(noise, torch.randint_like(right, 32), right))


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_identical_for_a_thousand_frames(kind: str, share: float) -> None:
    core = depth_core(kind)
    hidden, first = torch.randn(1000, 24), torch.randint(40, (1000,))
    right = one_by_one(core, hidden, first, GREEDY)
    for wrong in (0.0, 0.2, 1.0):
        drafts, plan = _drafts(right, wrong), BlockPlan(8, share)
        together = draft_and_check(core, hidden, first, drafts, GREEDY, plan)
        assert torch.equal(together, right)
        for row in range(20):  # on their own they take other ways to the same codes
            one = slice(row, row + 1)
            alone = FrameDrafts(drafts.codes[one])
            assert torch.equal(
                draft_and_check(core, hidden[one], first[one], alone, GREEDY, plan), right[one]
            )


def test_right_drafts_cost_one_pass_and_a_wrong_one_costs_another() -> None:
    core = depth_core("csm")
    hidden, first = torch.randn(1, 24), torch.tensor([3])
    right = one_by_one(core, hidden, first, GREEDY, alone := FrameCount(8))
    assert alone.rounds == 8 and alone.tokens == 8
    draft_and_check(core, hidden, first, FrameDrafts(right), GREEDY, None, count := FrameCount(8))
    assert (count.rounds, count.tokens, count.frames) == (1, 8, 1)
    assert count.accepted.tolist() == count.drafted.tolist() == [1] * 8
    wrong = right.clone()
    wrong[0, 7] = (wrong[0, 7] + 1) % 32
    draft_and_check(core, hidden, first, FrameDrafts(wrong), GREEDY, None, count := FrameCount(8))
    assert count.rounds == 1  # the pass that refuses the last code says it too
    assert count.accepted.tolist() == [1] * 7 + [0]
    wrong = right.clone()
    wrong[0, 2] = (wrong[0, 2] + 1) % 32
    draft_and_check(core, hidden, first, FrameDrafts(wrong), GREEDY, None, count := FrameCount(8))
    assert count.rounds >= 2 and count.drafted.tolist()[:4] == [1, 1, 1, 0]
    assert count.to_dict()["acceptance"][:3] == [1.0, 1.0, 0.0]  # type: ignore[index]


def _exact(core: Any, hidden: Tensor, first: Tensor, choice: CodeChoice) -> Tensor:
    every = torch.tensor(list(itertools.product(range(core.size), repeat=core.codes)))
    tokens = torch.cat([first.expand(len(every), 1), every[:, :-1]], dim=1)
    with torch.no_grad():
        probs = choice.probs(core.whole(hidden.expand(len(every), -1), tokens))
    return probs.gather(-1, every[..., None])[..., 0].prod(1)


def _distance(codes: Tensor, size: int, exact: Tensor) -> float:
    weights = size ** torch.arange(codes.shape[1] - 1, -1, -1)
    found = torch.bincount((codes * weights).sum(1), minlength=len(exact)) / len(codes)
    return float((found - exact).abs().sum() / 2)


def _sampled(kind: str, share: float, certain: bool, sampling: Sampling) -> tuple[float, float]:
    core = depth_core(kind, codes=3, size=4, hidden=8, first=5, dim=16, layers=1, ffn=16)
    core.heads.weight.data *= 3 if kind == "csm" else 0.4  # neither flat nor certain
    n, choice = 20_000, CodeChoice(sampling)
    hidden, first = torch.randn(1, 8), torch.tensor([2])
    exact = _exact(core, hidden, first, choice)
    many, fronts = hidden.expand(n, -1), first.expand(n)
    odds = torch.randn(3, 4).mul(1.5).softmax(-1).expand(n, 3, 4)
    drafts = (
        FrameDrafts(torch.randint(4, (n, 3))) if certain else FrameDrafts(choice.draw(odds), odds)
    )
    said = draft_and_check(core, many, fronts, drafts, choice, BlockPlan(3, share))
    noise = _distance(one_by_one(core, many, fronts, choice), 4, exact)
    return _distance(said, 4, exact), noise


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_has_the_same_distribution(kind: str, share: float, certain: bool) -> None:
    top_k = 3 if kind == "csm" else 0
    distance, noise = _sampled(kind, share, certain, Sampling(temperature=0.9, top_k=top_k, seed=3))
    assert noise < 0.025 and distance < 0.025, (distance, noise)


def _keep_all(drafts: Tensor, _p: Tensor, _q: Tensor, counts: Tensor, *_: Tensor) -> Any:
    return counts, drafts[:, 0]


def _draw_from_p(drafts: Tensor, p: Tensor, q: Tensor, counts: Tensor, u: Tensor, v: Tensor) -> Any:
    at = drafts[..., None]
    stand = u * q.gather(-1, at)[..., 0] < p[:, :-1].gather(-1, at)[..., 0]
    lead = stand.long().cumprod(1).sum(1)
    return lead, draw(p.gather(1, lead[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0], v)


def _blind_to_q(
    drafts: Tensor, p: Tensor, q: Tensor, counts: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    stand = u < p[:, :-1].gather(-1, drafts[..., None])[..., 0]
    lead = stand.long().cumprod(1).sum(1)
    here = lead.clamp(max=drafts.shape[1] - 1)[:, None, None].expand(-1, 1, p.shape[-1])
    return lead, draw((p.gather(1, here) - q.gather(1, here)).clamp(min=0)[:, 0], v)


@pytest.mark.parametrize("rule", [_keep_all, _draw_from_p, _blind_to_q])
def test_a_wrong_rule_shows(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codebooks, "accept_sampled", rule)
    distance, _ = _sampled("moshi", 0.0, False, Sampling(temperature=0.9, seed=3))
    assert distance > 0.1


def test_a_wrong_cache_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    core = depth_core("moshi")
    hidden, first = torch.randn(200, 24), torch.randint(40, (200,))
    right = one_by_one(core, hidden, first, GREEDY)
    run = core.run

    def forgetful(frame: Any, tokens: Tensor, at: int) -> Tensor:
        for layer in frame.layers:
            layer.read(0, 0, at).zero_()
        return run(frame, tokens, at)

    monkeypatch.setattr(core, "run", forgetful)
    drafts = _drafts(right, 0.3)
    assert not torch.equal(draft_and_check(core, hidden, first, drafts, GREEDY), right)


def test_the_plan_takes_what_pays() -> None:
    plan = BlockPlan(8, share=0.0)
    assert [plan.length(at, 1, False) for at in (0, 3, 7)] == [8, 5, 1]
    plan = BlockPlan(8, share=0.2)
    for _ in range(100):
        plan.learn(False, 0, [1] * 8, [1] * 8)
        plan.learn(True, 0, [1] * 8, [0] * 8)
    assert plan.length(0, 1, False) == 8 and plan.length(0, 1, True) == 1
    for _ in range(100):
        plan.learn(False, 3, [1], [0])
    assert plan.length(0, 1, False) == 4  # the code that is refused is settled too
    assert plan.length(0, 500, False) <= 4


def test_the_share_of_a_code_is_measured() -> None:
    few, many = (lambda n=n: sum(range(n)) for n in (5_000, 40_000))
    assert measure_share(few, many, 8) > measure_share(many, many, 8)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_k=8)])
def test_drafters_of_any_kind_plug_in(sampling: Sampling) -> None:
    core = depth_core("csm")
    mlp = CodeMlp(24, 8, 32, 40, dim=16).eval()
    hidden, first = torch.randn(50, 24), torch.randint(40, (50,))
    before, right = torch.randint(32, (50, 8)), one_by_one(core, hidden, first, GREEDY)
    for drafter in (copy_frame, parallel(mlp.guess)):
        decoder = FrameDecoder(core, drafter)
        codes = decoder.frame(hidden, first, before, CodeChoice(sampling))
        assert codes.shape == (50, 8) and decoder.count.frames == 50
        if sampling.greedy:
            assert torch.equal(codes, right)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_temperature_per_codebook(
    kind: str, fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code by code and drafted; a pass that takes all codes for the first is noticed."""
    heats = (0.4, 1.0, 2.5)
    core = depth_core(kind, codes=3, size=4, hidden=8, first=5, dim=16, layers=1, ffn=16)
    n, hidden, first = 20_000, torch.randn(1, 8), torch.tensor([2])
    every = torch.tensor(list(itertools.product(range(4), repeat=3)))
    tokens = torch.cat([first.expand(len(every), 1), every[:, :-1]], dim=1)
    with torch.no_grad():
        logits = core.whole(hidden.expand(len(every), -1), tokens)
    probs = torch.stack([(logits[:, i] / heat).softmax(-1) for i, heat in enumerate(heats)], 1)
    exact = probs.gather(-1, every[..., None])[..., 0].prod(1)
    choice = CodeChoice(Sampling(temperature=heats, seed=3))
    if fault:
        right = CodeChoice.probs
        forgetful = lambda self, logits, check=True, at=0: right(self, logits, check, 0)
        monkeypatch.setattr(CodeChoice, "probs", forgetful)
    many, fronts = hidden.expand(n, -1), first.expand(n)
    drafts = FrameDrafts(torch.randint(4, (n, 3)))
    said = (
        one_by_one(core, many, fronts, choice),
        draft_and_check(core, many, fronts, drafts, choice),
    )
    assert all((_distance(codes, 4, exact) < 0.025) is not fault for codes in said)


def test_codes_of_a_frame_have_no_history() -> None:
    with pytest.raises(SpecError, match=r"penalty 1\.5"):
        CodeChoice(Sampling(temperature=1.0, penalty=1.5))
    with pytest.raises(SpecError, match="processors"):
        CodeChoice(Sampling(processors=lambda ids, scores: scores))
    with pytest.raises(SpecError, match="of 2 codebooks"):
        CodeChoice(Sampling(temperature=(0.5, 1.0))).probs(torch.zeros(1, 3, 4))
