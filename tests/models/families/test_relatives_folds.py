"""Patches of the tower and tokens of the language model: a change of one reaches the other.

The oracle is the stock model: what its last used block gives out is changed at one patch, and the
token whose features change is where `fold` has to put that patch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import RELATIVES, Tiny, facts, tiny
from torch import Tensor
from torch.nn import functional as F

from mmfast.models.families.adapter import adapter_for, tower_of
from mmfast.models.families.prompt_ids import prompt_ids
from mmfast.models.families.tower import argument
from mmfast.models.patching import override

CASES = [(family, kind) for family in RELATIVES for kind in facts(family).kinds]


def _features(this: Tiny, call: dict[str, Any], kind: str, patch: int | None) -> tuple[Tensor, int]:
    """Features `[n, D]` of a call whose last used block is changed at a patch, and its patches."""
    tower, count = tower_of(this.model), 0

    def changed(stock: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        output = stock(*args, **kwargs)
        rows = (output[0] if isinstance(output, tuple) else output).clone()
        shown = rows[:, tower.prefix :]
        count = shown[..., 0].numel()
        if patch is not None:
            shown[patch // shown.shape[1], patch % shown.shape[1]] += torch.arange(rows.shape[-1])
        return (rows, *output[1:]) if isinstance(output, tuple) else rows

    with override(tower.blocks[tower.last_used(call)], "forward", changed):
        output = getattr(this.model.model, f"get_{kind}_features")(**call, return_dict=True)
    rows = [each.reshape(-1, each.shape[-1]) for each in output.pooler_output]
    return torch.cat(rows), count


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_fold_follows_the_features(family: str, kind: str) -> None:
    this = tiny(family)
    if tower_of(this.model).packed or not len(tower_of(this.model).blocks):
        pytest.skip("another test has packed towers, and nothing is read from those without blocks")
    inputs = this.inputs([f"{{{kind}}}{{{kind}}} same?"], **this.media(kind, 2))
    call = {name: inputs[name] for name in this.facts.calls[kind] if name in inputs}
    adapter, base = adapter_for(this.model), this.model.model
    named = argument(base, call, "vision_feature_select_strategy") == "default"
    prefix = 0 if named else tower_of(this.model).prefix
    with prompt_ids(inputs["input_ids"]):
        layouts = adapter.layout(base, kind, call)
        stock, patches = _features(this, call, kind, None)
        content = torch.cat([
            plan.content() + sum(each.length for each in layouts[:index])
            for index, plan in enumerate(layouts)
        ])
        assert sum(plan.length for plan in layouts) == len(stock)
        for patch in torch.linspace(0, patches - 1, 13).long().tolist():
            changed, _ = _features(this, call, kind, patch)
            moved = (changed != stock).any(-1)[content]
            marks = torch.zeros(patches, 1)
            marks[patch] = 1.0
            if prefix:  # a class token that the model drops later
                tiles = marks.view(len(call["pixel_values"]), -1, 1)
                marks = F.pad(tiles, (0, 0, prefix, 0)).flatten(0, 1)
            folded = torch.cat(adapter.fold(base, kind, marks, call))[:, 0]
            assert torch.equal(folded > 0, moved), patch
