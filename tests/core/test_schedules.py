"""Schedules without a model: parsing, layers, and how many tokens each cut leaves."""

from __future__ import annotations

import pytest
import torch
from token_factory import make

import mmfast
from mmfast.core.spec import expand, parse, stage_layers, wanted

DEPTHS = (0.25, 0.5, 0.75)


@pytest.mark.parametrize(
    ("layers", "at"),
    [(28, [7, 14, 21]), (32, [8, 16, 24]), (4, [1, 2, 3]), (3, [1, 2]), (2, [1]), (5, [1, 2, 4])],
)
def test_layers_of_a_schedule(layers: int, at: list[int]) -> None:
    assert stage_layers(DEPTHS, layers) == at
    cuts = expand(parse("evs:0.5+pyramiddrop:0.1+fastv@llm1:0.5"), layers)
    assert [cut.layer for cut in cuts[1:-1]] == at
    assert [str(cut) for cut in cuts[1:-1]] == [f"pyramiddrop@llm{k}:0.1" for k in at]
    assert (str(cuts[0]), str(cuts[-1])) == ("evs@pre:0.5", "fastv@llm1:0.5")


def test_a_schedule_avoids_layers_it_cannot_read() -> None:
    # Convolutions and attention by turns: only some layers stand behind an attention.
    assert stage_layers(DEPTHS, 16, [3, 6, 9, 11, 13, 15]) == [3, 9, 11]
    assert stage_layers(DEPTHS, 16, [3]) == [3]


def test_a_schedule_needs_two_layers() -> None:
    with pytest.raises(mmfast.SpecError, match=r"pyramiddrop@llm:0\.1.*has 1.*at least 2"):
        expand(parse("pyramiddrop:0.1"), 1)


def test_spec_strings_of_schedules() -> None:
    for text in ("pyramiddrop:0.1", "pyramiddrop@llm:0.1"):
        (spec,) = parse(text)
        assert (spec.site, spec.layer, spec.where, spec.staged) == ("llm", None, "llm", True)
        assert str(spec) == "pyramiddrop@llm:0.1"
    (spec,) = parse("pyramiddrop@llm8:0.5")
    assert (spec.layer, spec.staged, str(spec)) == (8, False, "pyramiddrop@llm8:0.5")
    with pytest.raises(mmfast.SpecError, match="'fastv' cannot run at site 'llm'"):
        parse("fastv@llm:0.5")
    with pytest.raises(mmfast.SpecError, match="choices: llm<K>, llm "):
        parse("pyramiddrop@vit:0.5")


def lefts(text: str, n: int, layers: int = 32) -> list[int]:
    """Tokens after each cut."""
    entered: dict[int, int] = {}
    found: list[int] = []
    for cut in expand(parse(text), layers):
        left = wanted(cut, found[-1] if found else n, entered)
        assert left is not None
        found.append(left)
    return found


def test_cuts_are_geometric_and_end_at_the_budget() -> None:
    assert lefts("pyramiddrop:0.125", 576) == [288, 144, 72]
    assert lefts("pyramiddrop:8", 512) == [128, 32, 8]
    assert lefts("pyramiddrop:1.0", 576) == [576] * 3
    for n in range(1, 300):
        for budget in ("0.1", "0.35", "0.9", "1"):
            cuts = lefts(f"pyramiddrop:{budget}", n)
            last = 1 if budget == "1" else max(1, round(float(budget) * n))
            assert cuts[-1] == last
            assert [n, *cuts] == sorted([n, *cuts], reverse=True)


def test_other_cuts_in_between() -> None:
    # What another method removes in between is not given back, and the end is the same.
    assert lefts("fastv@llm1:0.5+pyramiddrop:0.125", 576) == [288, 144, 72, 36]
    entered: dict[int, int] = {}
    first, second, third = expand(parse("pyramiddrop:0.125"), 32)
    assert wanted(first, 576, entered) == 288
    assert wanted(second, 100, entered) == 100
    assert wanted(third, 60, entered) == 60
    one, two = (expand(parse("pyramiddrop:0.5+pyramiddrop:0.5"), 32)[i] for i in (0, 3))
    entered = {}
    wanted(one, 100, entered)
    wanted(two, 79, entered)
    assert entered == {0: 100, 1: 79}


def test_too_large_a_budget_is_an_error() -> None:
    with pytest.raises(mmfast.SpecError, match="more than the 10 tokens"):
        lefts("pyramiddrop:11", 10)


def test_on_plain_tokens_a_schedule_is_one_cut() -> None:
    tokens = make("random", (1, 10, 10))
    whole = mmfast.reduce(tokens, "pyramiddrop:0.1")
    assert isinstance(whole, mmfast.Reduction)
    attn = tokens.need("attn")
    assert whole.keep.tolist() == sorted(attn.topk(10).indices.tolist())
    assert torch.equal(whole.keep, mmfast.reduce(tokens, "pyramiddrop@llm3:10").keep)


@pytest.mark.parametrize("text", ["fastkv:5?kernel=4", "fastkv:5?kernel=0", "slimfer:5?block=0"])
def test_senseless_knobs(text: str) -> None:
    with pytest.raises(mmfast.SpecError, match="choose"):
        mmfast.reduce(make("random", (1, 4, 5)), text)
