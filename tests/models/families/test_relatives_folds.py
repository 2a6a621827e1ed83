"""Patches of the tower and tokens of the language model: a change of one reaches the other.

The oracle is the stock model: what its last used block gives out is changed at one patch, and the
token whose features change is where `fold` has to put that patch.
"""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import RELATIVES, Tiny, facts, tiny
from torch import Tensor
from torch.nn import functional as F

from mmfast.attach import attach
from mmfast.core.errors import ModelError
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


@pytest.mark.rest_is_slow(3)
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
        content = torch.cat(
            [
                plan.content() + sum(each.length for each in layouts[:index])
                for index, plan in enumerate(layouts)
            ]
        )
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


@pytest.mark.parametrize(
    ("family", "kind"), [("gemma4", "image"), ("gemma4", "video"), ("mistral3", "image")]
)
def test_rasters_are_as_wide_as_their_pictures(family: str, kind: str) -> None:
    """Folded coordinates of patches are the places of their tokens."""
    this = tiny(family)
    inputs = this.inputs([f"{{{kind}}}"], **this.media(kind, 1))
    call = {name: inputs[name] for name in this.facts.calls[kind] if name in inputs}
    (layout,) = adapter_for(this.model).layout(this.model.model, kind, call)
    if family == "gemma4":
        marks = call[f"{kind}_position_ids"].flatten(0, -2)
        merge = 3
    else:
        rows, columns = (call["image_sizes"][0] // this.shape.patch).tolist()
        marks = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        merge = this.shape.merge
    (folded,) = adapter_for(this.model).fold(this.model.model, kind, marks.float(), call)
    places = layout.place()
    assert places is not None and layout.grid is not None and layout.grid[1] < layout.grid[2]
    assert torch.equal(folded.flip(1) // merge, places[:, 1:].float())


SHAPES = [(24, 24), (30, 90), (90, 30), (60, 60)]


@pytest.mark.parametrize("family", ["minicpmv4_6", "ovis2"])
@pytest.mark.parametrize("size", SHAPES)
def test_places_are_those_of_the_cut_that_the_processor_made(
    family: str, size: tuple[int, int]
) -> None:
    this = tiny(family)
    rows, columns = this.processor.image_processor(this.images(1, size=size))["grids"][0]
    inputs = this.inputs(["a {image} b {image}?"], images=this.images(2, size=size))
    call = {name: inputs[name] for name in (*this.facts.calls["image"], "input_ids")}
    first, second = adapter_for(this.model).layout(this.model.model, "image", call)
    assert first == second
    side = 3 if family == "ovis2" else None
    if rows * columns <= 1:
        assert first.tiles is None and first.grid is not None
        return
    tiles = torch.tensor(first.tiles)
    assert tiles.unique_consecutive().tolist() == list(range(rows * columns + 1))
    places = first.place()
    assert places is not None
    h, w = (places[tiles == 1].amax(0) + 1)[1:].tolist()
    assert side is None or (h, w) == (side, side)
    expected = [
        [0, y + h * (number // columns), x + w * (number % columns)]
        for number in range(rows * columns)
        for y in range(h)
        for x in range(w)
    ]
    assert places[tiles > 0].tolist() == expected


@pytest.mark.parametrize("family", ["aya_vision", "cohere2_vision"])
def test_the_overview_comes_last(family: str) -> None:
    this = tiny(family)
    sizes = [(60, 60), (24, 24), (24, 100)]
    images = [this.images(1, index, size)[0] for index, size in enumerate(sizes)]
    inputs = this.inputs(["{image}{image} a", "b {image}"], images=images)
    calls = (*this.facts.calls["image"], "input_ids")
    call = {name: inputs[name] for name in calls}
    whole, square, wide = adapter_for(this.model).layout(this.model.model, "image", call)
    assert whole.tiles == tuple(n for n in (1, 2, 3, 4, 0) for _ in range(9))
    assert square.grid == (1, 3, 3) and square.tiles is None
    assert wide.tiles is not None and wide.tiles[-9:] == (0,) * 9 and wide.place() is None


def test_paligemma_2_sees_images_past_its_window() -> None:
    """Of Gemma 2, whose soft cap of attention scaled dot products do not know."""
    this = tiny("paligemma2", "eager")
    inputs = this.inputs(["on {image} what?"], **this.media("image", 1))
    whole = oracle.embed(this, inputs)
    for spec in ("divprune:0.6", "divprune:0.6+fastv@llm2:0.5", "tome:0.6"):
        with attach(this.model, spec) as trace:
            logits = this.model(**inputs).logits[0]
        keep = oracle.kept_places(whole, trace.reductions)
        expected = oracle.masked(this, whole, trace.reductions)[keep]
        assert len(keep) > this.model.config.text_config.sliding_window
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_small_gemma_4_refuses_cuts_behind_keys_that_are_read_again() -> None:
    this = tiny("gemma4_e")
    for stages in ({"reduce": "fastv@llm3:0.5"}, {"cache": "quant:8"}):
        with pytest.raises(ModelError, match="read") as error, attach(this.model, **stages):
            pass
        assert "\n" not in str(error.value)
