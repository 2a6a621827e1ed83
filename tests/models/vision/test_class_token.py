"""Merging inside towers of language models whose frames begin with a class token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from encoder_oracle import naive_blocks
from tiny_models import Tiny, build
from torch import Tensor

from mmfast.attach import attach
from mmfast.models.families.adapter import adapter_for, tower_of
from mmfast.models.reduction.tower_signals import tower_signals
from mmfast.models.vision.merge_pass import MergePass

FAMILIES = ["llava", "llava_next", "internvl"]
SHARE, LEFT = 0.5, 18  # of 36 patches
DEPTH = 5


def lively(family: str, **knobs: Any) -> Tiny:
    """A tower in which every part of a block counts."""
    this = build(family, depth=DEPTH, **knobs)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in tower_of(this.model).module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return this


def encoded(this: Tiny, spec: str | None) -> tuple[Tensor, Tensor, Any, Tensor]:
    """Input and output of the used blocks, the trace, and the features."""
    tower, seen = tower_of(this.model), {}
    last = tower.last_used({})
    blocks = [tower.blocks[0], tower.blocks[last]]
    hooks = [
        blocks[0].register_forward_pre_hook(lambda _, args: seen.update(start=args[0])),
        blocks[1].register_forward_hook(lambda _, args, out: seen.update(end=out)),
    ]
    images = this.images(1, 0, (24, 24)) + this.images(1, 1, (24, 60))
    inputs = this.inputs(["{image} and {image}"], images=images)
    call = {name: inputs[name] for name in this.facts.calls["image"] if name in inputs}
    with torch.no_grad():
        if spec is None:
            out, trace = this.model.base_model.get_image_features(**call, return_dict=True), None
        else:
            with attach(this.model, spec) as trace:
                out = this.model.base_model.get_image_features(**call, return_dict=True)
    for hook in hooks:
        hook.remove()
    end = seen["end"][0] if isinstance(seen["end"], tuple) else seen["end"]
    rows = out.pooler_output
    rows = rows.flatten(0, 1) if isinstance(rows, Tensor) else torch.cat(list(rows))
    return seen["start"], end, trace, rows


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_plain_loops(family: str) -> None:
    this = lively(family)
    start, end, trace, features = encoded(this, f"tome@vit:{SHARE}")
    used = tower_of(this.model).last_used({}) + 1
    assert used == (DEPTH if family == "internvl" else DEPTH - 1)  # feature layer -2
    with torch.no_grad():
        want, _ = naive_blocks(tower_of(this.model).blocks[:used], start, 1, LEFT)
    torch.testing.assert_close(end, want[-1], atol=2e-5, rtol=1e-4)
    for row, (site, _, found) in zip(trace.rows, trace.reductions, strict=True):
        found.check()
        assert site == "vit" and row.tokens_in == found.n == 2 * found.m == 2 * row.tokens_out
        assert found.n % 36 == 0  # the class token is not counted, so it cannot be merged
    stock = encoded(this, None)
    assert features.shape == stock[3].shape
    assert (features - stock[3]).abs().max() > 1e-3
    assert (end[:, 0] - stock[1][:, 0]).abs().max() > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_class_token_among_the_patches_would_show(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    this = lively(family)
    right = encoded(this, "tome@vit:0.5")[1]
    prepare = MergePass.__init__

    def unprotected(work: MergePass, plan: Any, spec: Any) -> None:
        rows = tuple(n + 1 for n in plan.start)
        items = tuple(n + n // 36 for n in plan.items)
        kept = tuple(n + 1 for n in plan.final)
        changed = type(plan)(rows, kept, items, plan.blocks)
        prepare(work, changed, spec)

    monkeypatch.setattr(MergePass, "__init__", unprotected)
    monkeypatch.setattr("mmfast.models.vision.merge._MergeStage._draw", lambda *_: None)
    wrong = encoded(this, "tome@vit:0.5")[1]
    assert wrong.shape == right.shape
    assert (wrong - right).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_share_one_changes_no_bit_and_nothing_stays(family: str) -> None:
    this = lively(family)
    stock = encoded(this, None)[3]
    inputs = this.inputs(["{image}"], images=this.images(1))
    with torch.no_grad():
        logits = this.model(**inputs).logits
        with attach(this.model, "tome@vit:1.0"):
            assert torch.equal(this.model(**inputs).logits, logits)
    encoded(this, "saint@vit:0.4")
    assert torch.equal(encoded(this, None)[3], stock)
    assert not any("forward" in module.__dict__ for module in this.model.modules())


def test_signals_of_a_merged_tower_count_its_class_token() -> None:
    """The class token's row is shared out among the patches of a token, and sums to its rest."""
    this = lively("llava")
    inputs = this.inputs(["{image}"], images=this.images(1))
    call = {"pixel_values": inputs["pixel_values"]}
    needs = ("attn", "keys")
    with (
        attach(this.model, "tome@vit:0.5") as trace,
        tower_signals(this.model, adapter_for(this.model), needs) as signals,
        torch.no_grad(),
    ):
        this.model.base_model.get_image_features(**call)
    found = trace.reductions[0][2]
    attn, keys = signals.signal("attn", 0), signals.signal("keys", 0)
    assert attn.shape == (36,) and len(keys) == 36
    assert 0 < float(attn.sum()) < 1  # the class token has the rest
    # The last used block reads before it merges: what is left of it are parts of these groups.
    assert len(attn.unique()) >= found.m
