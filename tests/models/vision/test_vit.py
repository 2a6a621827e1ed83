"""Merging inside the tower against plain loops, one frame and one token at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from merge_checks import (
    _naive_block,
    _naive_siglip,
    _spread_back,
    _steps,
    stage,
)
from tiny_models import FAMILIES, build
from torch import nn
from tower_checks import GRIDS, onevision, pixels, qwen
from transformers.modeling_utils import AttentionInterface

from mmfast.attach import attach
from mmfast.core.errors import SpecError
from mmfast.core.spec import parse
from mmfast.core.trace import Trace
from mmfast.models.families.adapter import adapter_for, tower_of
from mmfast.models.reduction.tower_signals import tower_signals
from mmfast.models.vision import merge as merging
from mmfast.models.vision.acceleration import fused_attention
from mmfast.models.vision.merge import vit_stage
from mmfast.models.vision.merge_pass import MergePlan, _share_out, plan_pass

# The naive version. A frame is a list of windows, a window a list of tokens, a token a dict.


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("layer", "share", "left"), [(-1, 0.52, 13), (-2, 0.4, 10), (-1, 0.96, 24)]
)
def test_siglip_equals_plain_loops(layer, share, left, implementation):
    model = onevision(layer)
    model.model.vision_tower.set_attn_implementation(implementation)
    video, trace = torch.randn(2, 2, 3, 20, 20), Trace()
    states = []
    hook = model.model.multi_modal_projector.register_forward_pre_hook(
        lambda _, args: states.append(args[0])
    )
    signals = tower_signals(model, adapter_for(model), ("attn",))
    with stage(model, f"tome@vit:{share}", trace), signals as collector, torch.no_grad():
        merged = model.model.get_video_features(video).pooler_output
    hook.remove()
    with torch.no_grad():
        want, attn = _naive_siglip(model, video.flatten(0, 1), left, 4 + layer)
        attn = model.model.apply_pooling(attn[..., None]).reshape(2, -1)
        stock = model.model.get_video_features(video).pooler_output
    torch.testing.assert_close(states[0], want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(collector.signal("attn", 0), attn[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(collector.signal("attn", 1), attn[1], atol=1e-6, rtol=1e-5)
    assert merged.shape == stock.shape
    assert (merged - stock).abs().max() > 1e-3
    assert [(row.stage, row.tokens_in, row.tokens_out) for row in trace.rows] == [
        ("vit", 50, 2 * left)
    ] * 2
    assert all(row.ms > 0 for row in trace.rows)


def _naive_qwen(model, values, grid, plan):
    """Hidden states `[S, D]` in the tower's order, per frame and window, unpacked."""
    tower, seen, done = model.model.visual, {}, []
    hooks = [
        block.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: seen.update({i: (args[0], kwargs)}), with_kwargs=True
        )
        for i, block in enumerate(tower.blocks)
    ]
    tower(values, grid_thw=grid)
    for hook in hooks:
        hook.remove()
    x, first = seen[0]
    full = getattr(tower, "fullatt_block_indexes", range(len(tower.blocks)))
    frame_ends = seen[len(tower.blocks) - 1][1]["cu_seqlens"].tolist()
    assert first["cu_seqlens"].diff().tolist() == list(plan.start)  # windows, where there are any
    place, segment, deep = 0, 0, []
    for begin, end in pairwise(frame_ends):
        windows, chosen = [], []
        while place < end:
            size = plan.start[segment]
            rows = range(place, place + size)
            windows.append([{"x": x[p], "size": 1, "patches": [p], "place": p} for p in rows])
            chosen.append(segment)
            place, segment = place + size, segment + 1
        taps = []
        for i, block in enumerate(tower.blocks):
            project = lambda y, a=block.attn: a.qkv(y)[0].unflatten(0, (3, 4, 8)).unbind(0)
            targets = [plan.after(i)[s] for s in chosen]
            windows = _naive_block(
                block,
                (block.norm1, block.norm2),
                project,
                block.attn.proj,
                windows,
                targets,
                i in full,
                first["position_embeddings"],
            )
            taps.append(_spread_back(windows, len(x), 32)[begin:end])
        deep.append(taps)
        done.append(_spread_back(windows, len(x), 32)[begin:end])
    return torch.cat(done), [torch.cat(rows) for rows in zip(*deep, strict=True)]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    ("budget", "implementation"), [("0.6", "sdpa"), ("0.5", "together"), ("40", "eager")]
)
def test_qwen_equals_an_unpacked_version(name, budget, implementation, monkeypatch):
    if implementation == "together":  # as a GPU attends
        implementation = "sdpa"
        monkeypatch.setattr(merging, "_together", fused_attention)
    grid = torch.tensor([[2, 6, 10], [1, 6, 8]])
    if budget == "40":
        grid = torch.tensor([[1, 6, 10], [1, 6, 8]])
    model, values = qwen(name), pixels(grid)
    model.model.visual.set_attn_implementation(implementation)
    spec = parse(f"tome@vit:{budget}")[0]
    plan = plan_pass(tower_of(model), adapter_for(model), "image", {"image_grid_thw": grid}, spec)
    merger, states = model.model.visual.merger, []
    hook = merger.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with vit_stage(model, adapter_for(model), spec, Trace()), torch.no_grad():
        output = model.model.get_image_features(values, grid)
    hook.remove()
    with torch.no_grad():
        want, taps = _naive_qwen(model, values, grid, plan)
        torch.testing.assert_close(states[0], want, atol=1e-5, rtol=1e-5)
        if name == "qwen3_vl":
            for layer, merge in enumerate(model.model.visual.deepstack_merger_list):
                got = torch.cat(output.deepstack_features[layer])
                torch.testing.assert_close(got, merge(taps[layer]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_qwen_merges_stay_inside_their_window_and_frame(name):
    model, trace = qwen(name), Trace()
    with stage(model, "tome@vit:0.5", trace), torch.no_grad():
        model.model.get_video_features(pixels(GRIDS), GRIDS)
    side = 4 if name == "qwen2_5_vl" else 99  # window of 16 pixels, patches of 4
    for (_, item, found), row in zip(trace.reductions, trace.rows, strict=True):
        found.check()
        t, h, w = GRIDS[item].tolist()
        assert (row.tokens_in, row.tokens_out) == (found.n, found.m) == (t * h * w, t * h * w // 2)
        place = torch.arange(found.n)
        frame, y, x = place // (h * w), place // w % h, place % w
        scope = (frame * 100 + y // side) * 100 + x // side
        assert torch.equal(scope[found.keep][found.owner], scope)
        per_frame = (found.keep // (h * w)).bincount()
        assert per_frame.tolist() == [h * w // 2] * t


def test_trace_reduction_is_what_the_features_show():
    """Patches of one token end up with equal features, those of two tokens do not."""
    for name in ("qwen2_5_vl", "qwen3_vl"):
        model, trace, states = qwen(name), Trace(), []
        hook = model.model.visual.merger.register_forward_pre_hook(
            lambda _, args, states=states: states.append(args[0])
        )
        with stage(model, "tome@vit:0.5", trace), torch.no_grad():
            model.model.get_image_features(pixels(GRIDS[:1]), GRIDS[:1])
        hook.remove()
        call = {"image_grid_thw": GRIDS[:1]}
        plan = plan_pass(
            tower_of(model), adapter_for(model), "image", call, parse("tome@vit:0.5")[0]
        )
        found = trace.reductions[0][2]
        raster = torch.empty_like(states[0])
        raster[plan.raster] = states[0]
        torch.testing.assert_close(raster, raster[found.keep][found.owner])
        assert len(raster.unique(dim=0)) == found.m == 60


@pytest.mark.parametrize("name", ["llava_onevision", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("budget", ["1.0", "0.999"])
def test_full_budget_is_bit_identical(name, budget):
    model, trace = (onevision() if name == "llava_onevision" else qwen(name)), Trace()
    base = model.model
    args = (torch.randn(1, 2, 3, 20, 20),) if name == "llava_onevision" else (pixels(GRIDS), GRIDS)
    with torch.no_grad():
        stock = base.get_video_features(*args)
        with stage(model, f"tome@vit:{budget}", trace):
            same = base.get_video_features(*args)
    assert all(map(torch.equal, stock.pooler_output, same.pooler_output))
    assert not trace.rows


@pytest.mark.parametrize("budget", ["0.5", "0.2", "0.08", "26"])
def test_siglip_counts_are_exact(budget):
    model, trace = onevision(), Trace()
    lengths = []
    for block in model.model.vision_tower.encoder.layers:
        block.mlp.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    with stage(model, f"tome@vit:{budget}", trace), torch.no_grad():
        model.model.get_video_features(torch.randn(1, 2, 3, 20, 20))
    left = 13 if budget == "26" else round(float(budget) * 25)
    assert lengths == _steps(25, left, 3)
    (_, item, found) = trace.reductions[0]
    found.check()
    assert (item, found.n, found.m) == (0, 50, 2 * left)
    assert (found.keep < 25).sum() == left
    assert (found.owner[:25] < left).all() and (found.owner[25:] >= left).all()


def test_siglip_image_tiles():
    model, trace = onevision(), Trace()
    sizes = torch.tensor([[33, 21], [20, 58]])
    with torch.no_grad():
        pixel_values = torch.randn(2, 5, 3, 20, 20)
        stock = model.model.get_image_features(pixel_values, sizes).pooler_output
        with stage(model, "tome@vit:0.6", trace):
            merged = model.model.get_image_features(pixel_values, sizes).pooler_output
    assert [m.shape for m in merged] == [s.shape for s in stock]
    assert [row.tokens_out * 25 for row in trace.rows] == [row.tokens_in * 15 for row in trace.rows]
    with pytest.raises(SpecError, match="a multiple of 4 and 5"), stage(model, "tome@vit:20"):
        model.model.get_image_features(pixel_values, sizes)


def test_signals_of_a_merged_tower_cover_all_patches():
    for model, args in (
        (onevision(), (torch.randn(2, 2, 3, 20, 20),)),
        (qwen("qwen2_5_vl"), (pixels(GRIDS), GRIDS)),
    ):
        adapter = adapter_for(model)
        with tower_signals(model, adapter, ("attn", "keys")) as alone, torch.no_grad():
            model.model.get_video_features(*args)
        both = stage(model, "tome@vit:0.6"), tower_signals(model, adapter, ("attn", "keys"))
        with both[0], both[1] as signals, torch.no_grad():
            model.model.get_video_features(*args)
        for item in range(2):
            assert signals.signal("attn", item).shape == alone.signal("attn", item).shape
            assert signals.signal("keys", item).shape == alone.signal("keys", item).shape
            ratio = signals.signal("attn", item).sum() / alone.signal("attn", item).sum()
            assert 0.8 < ratio < 1.25  # attention is shared out, not copied


def test_everything_is_restored_after_an_exception():
    model = onevision()
    before = {name: AttentionInterface()[name] for name in AttentionInterface()}
    keys = [set(module.__dict__) for module in model.modules()]
    boom = pytest.raises(RuntimeError, match="boom")
    with boom, stage(model, "tome@vit:0.5"):
        model.model.get_video_features(torch.randn(1, 1, 3, 20, 20))
        raise RuntimeError("boom")
    model_keys = [set(module.__dict__) for module in model.modules()]
    installed = {"_output_capturing_hooks_installed"}  # by the model itself, at its first call
    assert all(
        now - installed == old - installed for now, old in zip(model_keys, keys, strict=True)
    )
    assert {name: AttentionInterface()[name] for name in AttentionInterface()} == before


@pytest.mark.parametrize("name", ["llava_onevision", "qwen2_5_vl"])
def test_flash_counts_sizes_in_extra_channels(name):
    def fake(module, q, k, v, attention_mask, scaling=None, cu_seq_lens_q=None, **_):
        assert attention_mask is None
        v = nn.functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
        lengths = [q.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
        parts = zip(*(t.split(lengths, 2) for t in (q, k, v)), strict=True)
        attend = nn.functional.scaled_dot_product_attention
        out = torch.cat([attend(*part, scale=scaling) for part in parts], dim=2)
        return out[..., :8].transpose(1, 2).contiguous(), None

    model = onevision() if name == "llava_onevision" else qwen(name)
    video = (torch.randn(1, 2, 3, 20, 20),) if name == "llava_onevision" else (pixels(GRIDS), GRIDS)
    encode = lambda: model.model.get_video_features(*video).pooler_output
    with stage(model, "tome@vit:0.5"), torch.no_grad():
        want = encode()
    tower = tower_of(model).module
    AttentionInterface.register("flash_fake", fake)
    try:
        tower.config._attn_implementation = "flash_fake"
        with stage(model, "tome@vit:0.5"), torch.no_grad():
            got = encode()
    finally:
        del AttentionInterface._global_mapping["flash_fake"]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_budgets_that_do_not_fit_are_refused():
    model = qwen("qwen2_5_vl")
    few = pytest.raises(SpecError, match="keep at least one each; choose 6 or more of 60")
    with few, stage(model, "tome@vit:0.01"):
        model.model.get_video_features(pixels(GRIDS), GRIDS)
    with pytest.raises(SpecError, match="more than the 32 tokens"), stage(model, "tome@vit:33"):
        model.model.get_video_features(pixels(GRIDS), GRIDS)
    clip = onevision()
    clip.config.vision_feature_layer = [-1, -2]
    with pytest.raises(SpecError, match="several layers"), attach(clip, "tome@vit:0.5"):
        pass
    twice = pytest.raises(SpecError, match="second stage")
    with twice, attach(model, "tome@vit:0.5+tome@vit:0.4"):
        pass


def test_shares_and_schedule_are_exact():
    spec = parse("tome@vit:0.5")[0]
    for parts in ([64, 64, 32, 16], [1, 1, 1], [5, 1, 1, 9], [16] * 7):
        for budget in range(len(parts), sum(parts) + 1):
            shares = _share_out(budget, parts, spec)
            assert sum(shares) == budget
            assert all(1 <= s <= n for s, n in zip(shares, parts, strict=True))
    plan = MergePlan((729,), (200,), (729,), 27)
    counts = [729, *(plan.after(i)[0] for i in range(27))]
    steps = [a - b for a, b in pairwise(counts)]
    assert counts[-1] == 200
    assert max(steps) - min(steps) <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_with_a_merged_tower_and_a_later_stage(family):
    """The tower's stage stands beside the other sites of `attach`, and leaves nothing behind."""
    tiny = build(family)
    inputs = tiny.inputs(["look {video} now"], videos=tiny.videos(1))
    kwargs = {"max_new_tokens": 3, "do_sample": False, "suppress_tokens": tiny.blocked()}
    stock = tiny.model.generate(**inputs, **kwargs)
    with attach(tiny.model, "tome@vit:0.5+visionzip:0.5") as trace:
        merged = tiny.model.generate(**inputs, **kwargs)
    assert merged.shape == stock.shape
    rows = {row.stage: row for row in trace.rows}
    assert rows["vit"].tokens_out * 2 == rows["vit"].tokens_in
    assert {site for site, _, _ in trace.reductions} >= {"vit", "pre"}
    assert torch.equal(tiny.model.generate(**inputs, **kwargs), stock)
