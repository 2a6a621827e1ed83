"""Specs of draft and verify, and drafts that need no model, beside slow and obvious versions."""

from __future__ import annotations

import random

import pytest
import torch

from mmfast.core.errors import SpecError
from mmfast.decoding.speculation import DecodePlan, PromptIndex, Recycler, plan_decode
from mmfast.models.decoder.speculation import tree_mask


def test_specs_are_read() -> None:
    assert plan_decode(None) is None and plan_decode(" ") is None
    plan = plan_decode("self:0.1?score=snapkv&most=4&least=0.5&adapt=false")
    assert plan is not None and plan.views and not plan.runs_model
    assert (plan.kind, plan.budget, plan.score, plan.most) == ("self", 0.1, "snapkv", 4)
    assert (plan.least, plan.adapt, str(plan)) == (0.5, False, plan.text)
    assert plan_decode(plan) is plan
    number = plan_decode("self:64")
    assert number is not None and number.budget == 64 and isinstance(number.budget, int)
    # The reducer takes all that follows, knobs of its own among it.
    shorter = plan_decode("self?most=3&reduce=evs:0.5+fastvid:0.1?tau=0.8&beta=0.6")
    assert shorter is not None and shorter.most == 3 and shorter.reduce.endswith("beta=0.6")


def test_a_draft_model_has_a_folder_and_may_see_less() -> None:
    plan = plan_decode("draft:/models/small?media=false&most=5")
    assert plan == DecodePlan(
        "draft:/models/small?media=false&most=5",
        "draft",
        model="/models/small",
        media=False,
        most=5,
    )
    assert plan.runs_model and not plan.views
    less = plan_decode("draft:small?reduce=divprune:0.1")
    assert less is not None and (less.model, less.reduce) == ("small", "divprune:0.1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sel:0.1", "did you mean 'self'"),
        ("self", "give a share"),
        ("self:0", "keeps nothing"),
        ("self:1.5", "no share"),
        ("self:abc", "no number"),
        ("self:0.1?reduce=divprune:0.1", "one of them"),
        ("self?reduce=", "is empty"),
        ("self?reduce=divprun:0.1", "did you mean 'divprune'"),
        ("self:0.1?score=snapk", "did you mean 'snapkv'"),
        ("draft", "names no model"),
        ("recycle:3", "takes no value"),
        ("recycle?most=0", "choose 1 to 64"),
        ("recycle?most=x", "is no int"),
        ("recycle?ngram=2", "unknown knob"),
        ("lookup?least=2", "no probability"),
        ("lookup?adapt=maybe", "is no bool"),
        (0.1, "decode is a float"),
    ],
)
def test_wrong_specs_name_the_value_and_the_fix(text: object, words: str) -> None:
    with pytest.raises(SpecError, match=words) as found:
        plan_decode(text)  # type: ignore[arg-type]
    assert "\n" not in str(found.value)


def test_lookup_is_the_last_place_of_the_longest_run() -> None:
    draws = random.Random(0)
    for _ in range(200):
        ngram, most = draws.randint(1, 4), draws.randint(1, 5)
        ids = [draws.randint(0, 3) for _ in range(draws.randint(1, 30))]
        index = PromptIndex(ngram)
        cut = draws.randint(0, len(ids))
        index.push(ids[:cut])
        index.push(ids[cut:])
        want: list[int] = []
        for n in range(min(ngram, len(ids)), 0, -1):
            ends = [e for e in range(n, len(ids)) if ids[e - n : e] == ids[-n:]]
            if ends:
                want = ids[ends[-1] : ends[-1] + most]
                break
        assert index.find(most) == want


def test_a_recycler_remembers_what_was_likely_last() -> None:
    known = Recycler(width=2)
    known.warm([1, 2, 1, 3, 4])
    assert known.chain(1, 3) == [3, 4]  # the latest pair first, and nothing behind 4
    known.learn([1, 4], [[2, 9, 8], [1, 7, 7]])
    assert known.chain(1, 4) == [2, 1, 2, 1]
    known.warm([1, 5])  # what was verified counts more than a prompt
    assert known.chain(1, 1) == [2] and len(known) == 4
    assert known.chain(77, 4) == []


def test_trees_hold_likely_branches_and_no_parent_behind_its_child() -> None:
    known = Recycler(width=3)
    known.learn(range(50), [[(5 * t + r + 1) % 50 for r in range(3)] for t in range(50)])
    tokens, parents = known.tree(7, nodes=20, depth=4)
    assert len(tokens) == len(parents) == 20
    assert all(parent < place for place, parent in enumerate(parents))
    line, here = [], -1  # the likeliest branch is the chain
    while here in parents:
        here = parents.index(here)
        line.append(tokens[here])
    assert len(line) >= 3 and line == known.chain(7, len(line))
    assert known.tree(99, 20, 4) == ([], [])


def test_a_node_of_a_tree_sees_its_ancestors() -> None:
    parents = [-1, -1, 0, 2, 1]
    seen, depths = tree_mask(parents)
    for node in range(len(parents) + 1):
        line, here = {node}, node
        while here:
            here = parents[here - 1] + 1
            line.add(here)
        assert set(seen[node].nonzero()[:, 0].tolist()) == line
        assert int(depths[node]) == len(line) - 1
    assert seen.dtype == torch.bool
