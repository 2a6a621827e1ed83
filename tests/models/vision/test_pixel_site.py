"""Patches dropped before the tower: features by hand, what the LLM gets, provenance, errors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import model_oracle as oracle
import oracles
import pytest
import torch
from pixel_checks import STACK, flat_image, flat_video
from tiny_models import Tiny, generate, tiny
from token_factory import item, make
from torch import Tensor

from mmfast import Tokens
from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import get
from mmfast.core.tokens import follow
from mmfast.core.trace import Trace
from mmfast.models.families.adapter import adapter_for
from mmfast.models.reduction.tower_signals import tower_signals

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker")
UNIT = 8  # pixels per merge unit of the tiny models


def picture(family: str) -> tuple[Tiny, dict[str, Any]]:
    this = tiny(family)
    return this, this.inputs(["{image} what?"], images=[flat_image()])


def encode(this: Tiny, inputs: dict[str, Any], kind: str = "image") -> Any:
    with torch.no_grad():
        return oracle.encode(this, inputs, kind)


def by_hand(this: Tiny, inputs: dict[str, Any], kept: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Features and DeepStack planes of some units, in loops over attention segments."""
    tower, seen, merge = this.model.base_model.visual, {}, this.shape.merge**2
    hooks = [
        block.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: seen.update({i: (args[0], kwargs)}), with_kwargs=True
        )
        for i, block in enumerate(tower.blocks)
    ]
    encode(this, inputs)
    for hook in hooks:
        hook.remove()
    units = len(seen[0][0]) // merge
    order = list(range(units))  # the tower's order of units
    if hasattr(tower, "window_size"):
        from transformers.vision_utils import get_vision_window_index

        grid = inputs["image_grid_thw"]
        windows = (this.shape.merge, tower.window_size, tower.patch_size)
        order = get_vision_window_index(grid, *windows)[0].tolist()
    mine = [merge * at + i for at, unit in enumerate(order) if unit in kept for i in range(merge)]
    x, planes = seen[0][0][mine], []
    for index, block in enumerate(tower.blocks):
        kwargs = seen[index][1]
        ends = kwargs["cu_seqlens"].tolist()
        segment = [sum(end <= patch for end in ends) for patch in mine]
        tables = [table[mine] for table in kwargs["position_embeddings"]]
        y = torch.zeros_like(x)
        for number in set(segment):
            part = [i for i, s in enumerate(segment) if s == number]
            bounds = torch.tensor([0, len(part)], dtype=torch.int32)
            embeddings = tuple(table[part] for table in tables)
            hidden = block.norm1(x[part])
            y[part] = block.attn(hidden, cu_seqlens=bounds, position_embeddings=embeddings)
        x = x + y
        x = x + block.mlp(block.norm2(x))
        if index in getattr(tower, "deepstack_visual_indexes", ()):
            planes.append(tower.deepstack_merger_list[len(planes)](x))
    back = torch.tensor([unit for unit in order if unit in kept]).argsort()
    return tower.merger(x)[back], planes


# Relatives with the same tower.
KIN = ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe_thinker", "exaone4_5")


@pytest.mark.parametrize("family", [*FAMILIES, *KIN])
def test_features_equal_a_run_of_the_tower_on_the_kept_patches(family: str) -> None:
    this, inputs = picture(family)
    with attach(this.model, "pixelprune") as trace:
        output = encode(this, inputs)
        with torch.no_grad():
            this.model(**inputs)
    (site, number, reduction) = trace.reductions[0]
    kept = reduction.keep.tolist()
    flat = [7 * row + column for row in (1, 2, 3) for column in (2, 3, 4, 5)]
    gone = set(range(35)) - set(kept)
    assert (site, number) == ("pixel", 0) and gone <= set(flat) and len(gone) >= 6
    with torch.no_grad():
        want, planes = by_hand(this, inputs, kept)
    (features,) = output.pooler_output
    torch.testing.assert_close(features[kept], want, atol=1e-5, rtol=1e-5)
    assert not features[sorted(gone)].any()
    stock = encode(this, inputs)
    assert (stock.pooler_output[0][kept] - features[kept]).abs().max() > 1e-3
    for got, plane in zip(getattr(output, "deepstack_features", ()) or (), planes, strict=True):
        rows = got if isinstance(got, Tensor) else got[0]
        torch.testing.assert_close(rows[kept], plane, atol=1e-5, rtol=1e-5)
    assert [(row.stage, row.tokens_in, row.tokens_out) for row in trace.rows] == [
        ("pixel", 35, len(kept))
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_alike_is_bit_identical(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(["{image} what?"], images=this.images(1))
    stock = generate(this, inputs, 4)
    for spec in ("pixelprune", "pixelprune:1.0", "pixelprune:35"):
        with attach(this.model, spec):
            other = generate(this, inputs, 4)
        assert torch.equal(other.sequences, stock.sequences)
        assert all(map(torch.equal, other.logits, stock.logits))
    assert "forward" not in this.model.base_model.visual.__dict__


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["pixelprune", "pixelprune:0.4+divprune:0.5", STACK])
def test_the_llm_gets_exactly_the_kept_tokens(family: str, spec: str) -> None:
    this = tiny(family)
    inputs = this.inputs(["{video} and {image}?"], images=[flat_image(9)], videos=[flat_video()])
    with attach(this.model, spec) as trace, torch.no_grad():
        logits = this.model(**inputs).logits[0]
        found = [("pre" if s == "pixel" else s, n, r) for s, n, r in trace.reductions]
        rows = [(row.stage, row.tokens_in, row.tokens_out) for row in trace.rows]
        prompt = oracle.embed(this, inputs)  # the dropped features are zeros here too
    keep = oracle.kept_places(prompt, found)
    want = oracle.masked(this, prompt, found)[keep]
    torch.testing.assert_close(logits, want, atol=2e-4, rtol=2e-4)
    if spec == STACK:
        assert [stage for stage, _, _ in rows] == ["pixel", "pre", "pre", "llm3"]
        assert all(one[2] == two[1] for one, two in pairwise(rows))
        assert rows[0][1] == 4 * 35 + 35 > rows[0][2]
    else:
        torch.testing.assert_close(logits, oracle.removed(this, prompt, keep), atol=1e-5, rtol=0)


def test_provenance_reaches_back_to_the_pixel_grid() -> None:
    this = tiny("qwen2_5_vl")
    inputs = this.inputs(["{video}?"], videos=[flat_video()])
    with attach(this.model, STACK) as trace, torch.no_grad():
        this.model(**inputs)
    chain = [reduction for _, _, reduction in trace.reductions]
    assert len(chain) == 4 and chain[0].n == 140
    whole = chain[0]
    for reduction in chain[1:]:
        whole = whole.then(reduction)
    whole.check()
    assert whole.n == 140 and whole.m == chain[-1].m == trace.rows[-1].tokens_out
    assert set(whole.keep.tolist()) <= set(chain[0].keep.tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_and_batches_decide_as_one_pass(family: str) -> None:
    this = tiny(family)
    prompts = ["{image} what?", "well, {image} is it?"]
    inputs = this.inputs(prompts, images=[flat_image(1), flat_image(2)])
    spec = "pixelprune+divprune:0.5"
    with attach(this.model, spec) as trace:
        whole = generate(this, inputs, 5)
    with attach(this.model, spec):
        chunked = generate(this, inputs, 5, prefill_chunk_size=11)
    assert torch.equal(whole.sequences, chunked.sequences)
    for row in range(2):
        single = this.inputs([prompts[row]], images=[flat_image(row + 1)])
        with attach(this.model, spec) as alone:
            one = generate(this, single, 5)
        assert torch.equal(one.sequences[0, -5:], whole.sequences[row, -5:])
        mine = [r for _, number, r in trace.reductions if number == row]
        for got, (_, _, want) in zip(mine, alone.reductions, strict=True):
            assert torch.equal(got.keep, want.keep)


def test_signals_of_the_tower_follow_the_kept_tokens() -> None:
    for family in FAMILIES:
        this, inputs = picture(family)
        watch = tower_signals(this.model, adapter_for(this.model), ("attn",))
        spec = "pixelprune+visionzip:0.5"
        with attach(this.model, spec) as trace, watch as signals, torch.no_grad():
            this.model(**inputs)
            attn = signals.signal("attn", 0)
        first, second = (reduction for _, _, reduction in trace.reductions)
        assert torch.equal(attn.nonzero()[:, 0], first.keep)
        assert abs(float(attn.sum()) - 1 / 4) < 1e-5  # a mean over the four patches of a unit
        best = attn[first.keep].topk(3).indices.tolist()
        assert set(best) <= set(second.keep.tolist())


def test_errors_name_the_way_out() -> None:
    this = tiny("llava_onevision")
    with (
        pytest.raises(ModelError, match=r"qwen2_5_vl.*site 'pre'"),
        attach(this.model, "pixelprune"),
    ):
        pass
    this, inputs = picture("qwen3_vl")
    output = encode(this, inputs)
    inputs = {k: v for k, v in inputs.items() if k != "pixel_values"}
    inside = pytest.raises(ModelError, match="encode the media inside attach")
    with inside, attach(this.model, "pixelprune"), torch.no_grad():
        this.model(**inputs, mm_encoder_outputs={"image": output})
    both = pytest.raises(SpecError, match=r"'pixelprune@pixel' and 'tome@vit:0.5' cannot share")
    with both, attach(this.model, "pixelprune+tome@vit:0.5"):
        pass
    _, inputs = picture("qwen3_vl")
    budget = pytest.raises(SpecError, match="100")
    with budget, attach(this.model, "pixelprune:100"), torch.no_grad():
        this.model(**inputs)
    assert "forward" not in this.model.base_model.visual.__dict__
    assert not [k for k in this.model.base_model.visual.__dict__ if k.startswith("_mmfast")]


def evs(tokens: Tokens, budget: int | None) -> Reduction:
    return get("evs").fn(tokens, budget)


@pytest.mark.parametrize("kind", ["random", "video", "frozen"])
def test_evs_measures_change_at_the_same_place(kind: str) -> None:
    full = make(kind, (4, 3, 5), with_grid=True)
    holes = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:37].sort().values
    left = follow(full, Reduction.prune(holes, 60))
    left = Tokens(left.x, signals={"place": left.signals["place"]})
    for budget in (1, 3, 9, 20, 36, None):
        assert evs(left, budget).keep.tolist() == oracles.evs(item(left), budget).keep
    raster = Tokens(full.x, signals={"place": full.signals["place"]})
    for budget in (5, 15, 40, None):
        assert torch.equal(evs(raster, budget).keep, evs(full, budget).keep)


def test_evs_takes_a_token_without_predecessor_for_new() -> None:
    x = torch.ones(5, 2)
    place = torch.tensor([[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 2], [2, 0, 2]])
    assert evs(Tokens(x, signals={"place": place}), 3).keep.tolist() == [0, 1, 3]
    assert evs(Tokens(x, signals={"place": place}), None).keep.tolist() == [0, 1, 3]


def test_trace_of_a_session_without_media_is_empty() -> None:
    this = tiny("qwen2_vl")
    inputs = this.inputs(["no picture"])
    with attach(this.model, "pixelprune") as trace, torch.no_grad(), pytest.warns(UserWarning):
        this.model(**inputs)
    assert isinstance(trace, Trace) and not trace.rows
