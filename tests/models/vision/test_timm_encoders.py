"""ViTs of timm, and vision models of transformers alone, under `attach` and a frame cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import timm
import torch
from encoder_oracle import FAMILIES, SMALL, build, images, naive, naive_blocks, part
from merge_checks import _steps
from timm.models.beit import Beit
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
)

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.frontends.changes import changes
from mmfast.models.families.adapter import tower_of
from mmfast.models.vision.frames.cache import FrameCache
from mmfast.models.vision.merge_pass import MergePass

close = partial(torch.testing.assert_close, atol=5e-5, rtol=1e-4)
every = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.rest_is_slow(3)
@every
@pytest.mark.parametrize(("budget", "left"), [("0.5", 32), ("0.3", 19), ("20", 20)])
def test_equals_plain_loops(name: str, budget: str, left: int) -> None:
    model, pixels = build(name), images()
    stock = model(pixels)
    with attach(model, f"tome@vit:{budget}") as trace:
        features, logits = model.forward_features(pixels), model(pixels)
    outputs, groups = naive(model, pixels, left)
    close(features, model.norm(outputs[-1]))
    close(logits, model.forward_head(model.norm(outputs[-1])))
    assert (logits - stock).abs().max() > 1e-4
    assert [(row.tokens_in, row.tokens_out) for row in trace.rows] == [(64, left)] * 4
    for found, want in zip(trace.reductions, groups * 2, strict=True):
        found[2].check()
        owner = found[2].owner
        got = [(owner == slot).nonzero()[:, 0].tolist() for slot in range(left)]
        assert sorted(got) == sorted(want)


@every
def test_prefix_tokens_are_in_every_block_and_count_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pixels = build(name), images()
    prefix, lengths = model.num_prefix_tokens, []
    assert prefix == {"deit_distilled": 2, "dinov2_reg4": 5, "eva_mixed": 3, "dinov3": 5}.get(
        name, prefix
    )
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    with attach(model, "tome@vit:0.5"):
        right = model.forward_features(pixels)
    assert lengths == [prefix + n for n in _steps(64, 32, 4)]
    if prefix:
        _merge_prefix_too(monkeypatch)
        with attach(model, "tome@vit:0.5"):
            wrong = model.forward_features(pixels)
        assert (wrong - right).abs().max() > 1e-3


def _merge_prefix_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault: sizes of protected tokens are those of the first merged ones."""
    stock = MergePass.bias

    def shifted(work: MergePass, *args: Any) -> Tensor | None:
        bias = stock(work, *args)
        return None if bias is None else bias.roll(-work.plan.prefix, -1)

    monkeypatch.setattr(MergePass, "bias", shifted)


def test_average_pooling_is_over_all_patches() -> None:
    """A merged token weighs by the patches it holds, in averages and in attention pooling."""
    for name in ("vit_avg", "vit_qk_norm", "siglip", "eva_post"):
        model, pixels = build(name), images(1)
        with attach(model, "tome@vit:0.4") as trace:
            features, logits = model.forward_features(pixels), model(pixels)
        found, prefix = trace.reductions[0][2], model.num_prefix_tokens
        merged, sizes = features[0, prefix:][found.keep], found.sizes().float()
        assert sizes.max() > 1
        if name == "eva_post":  # its head attends to the class token, too
            merged = torch.cat([features[0, :prefix], merged])
            sizes = torch.cat([torch.ones(prefix), sizes])
        if model.attn_pool is None:
            mean = (merged * sizes[:, None]).sum(0) / 64
            pooled = mean if model.global_pool == "avg" else (mean + merged.amax(0)) / 2
        else:
            pooled = model.attn_pool(merged[None], attn_mask=sizes.log().view(1, 1, 1, -1))[0]
        close(logits[0], model.head(model.fc_norm(pooled)))


@every
def test_share_one_changes_no_bit_and_nothing_stays(name: str) -> None:
    model, pixels = build(name), images()
    before = {n: [*module.__dict__] for n, module in model.named_modules()}
    stock = model(pixels)
    with attach(model, "tome@vit:1.0") as trace:
        assert torch.equal(model(pixels), stock)
    assert not trace.rows
    with pytest.raises(ZeroDivisionError), attach(model, "saint@vit:0.5", encoder="fast"):
        assert not torch.equal(model(pixels), stock)
        raise ZeroDivisionError
    assert torch.equal(model(pixels), stock)
    assert {n: [*module.__dict__] for n, module in model.named_modules()} == before


@every
def test_a_batch_equals_one_by_one(name: str) -> None:
    model, pixels = build(name), images(3)
    for spec in ("tome@vit:0.5", "saint@vit:0.5", "tome@vit:0.3?until=0.5&reuse=2"):
        with attach(model, spec):
            together = model(pixels)
            alone = torch.cat([model(one[None]) for one in pixels])
        close(together, alone)


@every
def test_budgets_are_exact(name: str) -> None:
    model, pixels = build(name), images()
    for spec, left in (("saint@vit:0.5", 32), ("tome@vit:7", 7), ("saint@vit:1", 1)):
        with attach(model, spec) as trace:
            assert bool(model(pixels).isfinite().all())
        assert [found.m for _, _, found in trace.reductions] == [left] * 2


@pytest.mark.parametrize("name", ["dinov2_reg4", "eva_mixed"])
def test_images_of_any_size(name: str) -> None:
    model, pixels = build(name), images(2, (48, 80))
    with attach(model, "tome@vit:0.5") as trace:
        features = model.forward_features(pixels)
        wide = trace.heatmap(0, 1)
        model(images(1, (32, 40)))
    outputs, _ = naive(model, pixels, 30)
    close(features, model.norm(outputs[-1]))
    assert wide.shape == (6, 10) and wide.min() < 1 == wide.max()
    assert [(row.tokens_in, row.tokens_out) for row in trace.rows] == [(60, 30)] * 2 + [(20, 10)]


@every
def test_intermediates_have_all_patches(name: str) -> None:
    model, pixels = build(name), images()
    outputs, _ = naive(model, pixels, 32)
    prefix = model.num_prefix_tokens
    with attach(model, "tome@vit:0.5") as trace:
        last, found = model.forward_intermediates(pixels, output_fmt="NLC")
        maps = model.forward_intermediates(
            pixels, indices=[1], intermediates_only=True, stop_early=True
        )
    close(last, model.norm(outputs[-1]))
    for got, want in zip(found, outputs, strict=True):
        close(got, want[:, prefix:])
    close(maps[0].flatten(2).transpose(1, 2), outputs[1][:, prefix:])
    assert [row.tokens_out for row in trace.rows] == [32, 32, 48, 48]


def test_a_feature_extractor_is_its_encoder() -> None:
    tiny = {name: SMALL[name] for name in ("embed_dim", "depth", "num_heads")}
    wanted = {"features_only": True, "out_indices": (0, 2), "img_size": 64}
    torch.manual_seed(0)
    getter = timm.create_model("vit_tiny_patch16_224", pretrained=False, **tiny, **wanted).eval()
    stock = getter(images())
    with attach(getter, "tome@vit:0.5") as trace:
        maps = getter(images())
    assert [each.shape for each in maps] == [(2, 32, 4, 4)] * 2
    assert [row.tokens_out for row in trace.rows] == [8, 8]
    assert not torch.equal(maps[1], stock[1])
    assert all(map(torch.equal, getter(images()), stock))


def test_the_wrapper_of_transformers_is_its_encoder() -> None:
    shape = {name: SMALL[name] for name in ("embed_dim", "depth", "num_heads", "img_size")}
    torch.manual_seed(0)
    config = TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=shape, num_labels=3)
    model = TimmWrapperForImageClassification(config).eval()
    stock = model(images()).logits
    with attach(model, "tome@vit:0.5") as trace:
        merged = model(images()).logits
    assert [row.tokens_out for row in trace.rows] == [8, 8]
    assert not torch.equal(merged, stock)
    assert torch.equal(model(images()).logits, stock)


def test_gradients_reach_every_weight() -> None:
    with torch.enable_grad():
        model = build("eva02").train()
        with attach(model, "tome@vit:0.5"):
            model(images()).square().mean().backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in model.parameters() if p.grad is not None)
    assert model.patch_embed.proj.weight.grad is not None


@every
def test_a_fast_encoder_rounds_alone(name: str) -> None:
    model, pixels = build(name), images()
    stock = model(pixels)
    with attach(model, encoder="fast"):
        close(model(pixels), stock)
    with attach(model, "tome@vit:0.5"):
        merged = model(pixels)
    with attach(model, "tome@vit:0.5", encoder="fast"):
        close(model(pixels), merged)


def test_a_compiled_encoder_runs_its_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def compiled(forward: Any) -> Any:
        seen.append(forward.__qualname__)
        return forward

    monkeypatch.setattr("mmfast.models.vision.acceleration._compile", compiled)
    monkeypatch.setattr("mmfast.models.vision.acceleration.check_encoder", lambda *_: None)
    for name, kind in (("vit", "Block.forward"), ("eva02", "EvaBlock.forward")):
        model, pixels = build(name), images()
        stock = model(pixels)
        with attach(model, encoder="compile"):
            close(model(pixels), stock)
        assert seen[-4:] == [kind] * 4


CASES: list[tuple[dict[str, Any], str]] = [
    ({"reduce": "tome:0.5"}, r"'tome@pre:0.5' cannot run in VisionTransformer.*site.*is vit"),
    ({"reduce": "fastv@llm1:0.5"}, r"the only site of an encoder is vit"),
    ({"reduce": "pixelprune@pixel:0.5"}, r"the only site of an encoder is vit"),
    ({"reduce": "tome@vit:0.5+saint@vit:0.5"}, r"second stage of site 'vit'"),
    ({"reduce": "saint@vit"}, r"needs a budget"),
    ({"reduce": "tome@vit:0.5?reuse=0"}, r"choose 1 or more"),
    ({"reduce": None, "cache": "snapkv:64"}, r"caches nothing; leave it out"),
    ({"reduce": "tome@vit:0.5", "encoder": "compile"}, r"use encoder='fast' beside it"),
    ({"reduce": "tome@vit:0.5", "encoder": "fsat"}, r"fsat"),
]


@pytest.mark.parametrize(("options", "match"), CASES)
def test_refusals(options: dict[str, Any], match: str) -> None:
    model = build("vit")
    with pytest.raises(SpecError, match=match) as error, attach(model, **options):
        pass
    assert "\n" not in str(error.value)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_models_and_calls_that_cannot_merge_say_so() -> None:
    parallel = VisionTransformer(**SMALL, block_fn=ParallelScalingBlock)
    with pytest.raises(ModelError, match="ParallelScalingBlock"), attach(parallel, "tome@vit:0.5"):
        pass
    beit = Beit(**SMALL)
    for options in ({"reduce": "tome@vit:0.5"}, {"encoder": "fast"}):
        refused = pytest.raises(ModelError, match=r"Beit of timm is no plain ViT")
        with refused, attach(beit, **options):
            pass
    model = build("vit")
    mask = torch.ones(65, 65, dtype=torch.bool)
    with attach(model, "tome@vit:0.5"):
        with pytest.raises(ModelError, match="no attn_mask"):
            model(images(), attn_mask=mask)
        with torch.enable_grad(), pytest.raises(ModelError, match="set_grad_checkpointing"):
            model.set_grad_checkpointing(True)
            model(images())
        model.set_grad_checkpointing(False)
        with pytest.raises(ModelError, match="attached already"):
            attach(model, "tome@vit:0.5").__enter__()
        assert model(images()).isfinite().all()
    dropping = VisionTransformer(**SMALL, patch_drop_rate=0.5).train()
    with attach(dropping, "tome@vit:0.5"), pytest.raises(ModelError, match="needs all patches"):
        dropping(images())
    with attach(model, "tome@vit:65"), pytest.raises(SpecError, match="more than the 64"):
        model(images())


# A frame cache


def moving(count: int) -> list[Tensor]:
    """Frames `[1, 3, 64, 64]` in which one block moves over a still background."""
    ground = images(1)
    frames = []
    for t in range(count):
        frame = ground.clone()
        frame[..., 8 * t : 8 * t + 16, 16:32] += 2.0
        frames.append(frame)
    return frames


@every
def test_a_cache_that_computes_all_is_the_stock_model(name: str) -> None:
    model, frames = build(name), moving(3)
    whole = FrameCache(model, 1.0)
    state = whole.start()
    for frame in frames:
        with whole.using(state):
            assert torch.equal(model(frame), model(frame))
    cache = FrameCache(model, threshold=0.0, cut=None)
    state = cache.start()
    with cache.using(state):
        first = model.forward_features(frames[0])
    assert torch.equal(first, model.forward_features(frames[0]))
    with cache.using(state):  # an equal frame is the reference, bit for bit
        assert torch.equal(model.forward_features(frames[0]), first)
    assert state.stats()["whole"] == 1
    assert not any("forward" in module.__dict__ for module in model.modules())


@every
def test_a_cache_equals_hooks_on_the_stock_model(name: str) -> None:
    """Stale patches keep keys and values of when they were computed, and their outputs."""
    model, frames = build(name), moving(4)
    if getattr(model.blocks[0].attn, "q_bias", None) is not None:
        pytest.skip("its projection is no module that a hook can see")
    cache = FrameCache(model, threshold=0.05, cut=None, every=None)
    state, slow = cache.start(), SlowCache(model)
    for frame in frames:
        with cache.using(state):
            got = model.forward_features(frame)
        close(got, slow.encode(frame))
    assert state.whole == 1
    assert state.computed < 0.7 * state.patches


class SlowCache:
    """Every patch computed, and what is stale overwritten as it leaves projection and block."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.known: Tensor | None = None
        self.fresh: Tensor | None = None
        self.old: dict[str, Tensor] = {}

    def encode(self, pixels: Tensor) -> Tensor:
        hooks = [self.model.blocks[0].register_forward_pre_hook(self._choose)]
        for index, block in enumerate(self.model.blocks):
            for name in ("qkv", "k_proj", "v_proj"):
                if getattr(block.attn, name, None) is not None:
                    keep = partial(self._keep, f"{index}.{name}")
                    hooks.append(getattr(block.attn, name).register_forward_hook(keep))
            hooks.append(block.register_forward_hook(partial(self._keep, f"{index}")))
        features: Tensor = self.model.forward_features(pixels)
        for hook in hooks:
            hook.remove()
        return features

    def _choose(self, _: Any, args: tuple[Tensor]) -> None:
        x, prefix = args[0][0], self.model.num_prefix_tokens
        if self.known is None:
            self.known = x
            return
        fresh = torch.ones(len(x), dtype=torch.bool)
        fresh[prefix:] = changes(x[prefix:], self.known[prefix:]) > 0.05
        fresh[:prefix] = bool(fresh[prefix:].any())
        self.known = torch.where(fresh[:, None], x, self.known)
        self.fresh = fresh

    def _keep(self, name: str, _: Any, args: Any, output: Tensor) -> Tensor:
        rows = output[0].clone()
        if self.fresh is not None:
            columns = slice(rows.shape[-1] // 3 if name.endswith("qkv") else 0, None)
            rows[~self.fresh, columns] = self.old[name][~self.fresh, columns]
        self.old[name] = rows
        return rows[None]


def test_streams_of_a_cache_are_images_of_a_batch() -> None:
    model, frames = build("dinov2_reg4"), moving(3)
    cache = FrameCache(model)
    alone, pair = cache.start(), [cache.start(), cache.start()]
    for frame in frames:
        with cache.using(alone):
            want = model(frame)
        with cache.using(pair):
            got = model(torch.cat([frame, frame]))
        close(got, want.expand(2, -1))
    assert pair[0].stats() == pair[1].stats() == alone.stats()
    with cache.using(alone):  # intermediates, of which every block is one
        maps = model.forward_intermediates(frames[2] + 0.1, intermediates_only=True)
    assert len(maps) == 4
    refused = pytest.raises(ModelError, match="frame cache does not work")
    with attach(model, "tome@vit:0.5"):
        with cache.using(alone), refused:
            model(frames[0])
        assert model(frames[0]).isfinite().all()
    plain = VisionTransformer(**SMALL)
    for block in plain.blocks:
        block.attn.fused_attn = False
    with pytest.raises(ModelError, match="fused attention"):
        FrameCache(plain)


# Vision models of transformers

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
}
ALONE: dict[str, Any] = {
    "siglip": lambda: SiglipVisionModel(SiglipVisionConfig(**SIZES)),
    "clip": lambda: CLIPVisionModel(CLIPVisionConfig(**SIZES)),
    "dinov2": lambda: Dinov2Model(Dinov2Config(**SIZES)),
    "dinov2_registers": lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**SIZES)),
}


@pytest.mark.parametrize("name", ALONE)
def test_vision_models_of_transformers(name: str) -> None:
    torch.manual_seed(0)
    model = ALONE[name]().eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    pixels, tower = images(), tower_of(model)
    starts: list[Tensor] = []
    hook = tower.blocks[0].register_forward_pre_hook(lambda _, args: starts.append(args[0]))
    stock = model(pixels)
    hook.remove()
    prefix = {"siglip": 0, "clip": 1, "dinov2": 1, "dinov2_registers": 5}[name]
    with attach(model, "tome@vit:0.5") as trace:
        states = model(pixels, output_hidden_states=True).hidden_states
        merged = model(pixels)
    outputs, _ = naive_blocks(tower.blocks, starts[0], prefix, 32)
    for got, want in zip(states[1:], outputs, strict=True):
        close(got, want)
    norm = {"siglip": "post_layernorm", "clip": ""}.get(name, "layernorm")
    final = outputs[-1] if not norm else part(tower.module, norm)(outputs[-1])
    close(merged.last_hidden_state, final)
    assert [row.tokens_out for row in trace.rows] == [32] * 4
    with attach(model, "tome@vit:1.0"):
        assert torch.equal(model(pixels).pooler_output, stock.pooler_output)
    with attach(model, encoder="fast"):
        close(model(pixels).pooler_output, stock.pooler_output)
    cache = FrameCache(model, 0.25, cut=None)
    state = cache.start()
    for more in (0.0, 0.1):
        with cache.using(state):
            model(images(1) + more)
    assert state.computed == state.patches - 48
    assert torch.equal(model(pixels).pooler_output, stock.pooler_output)


@pytest.mark.parametrize("record", ["export", "strict", "trace"])
def test_a_choice_of_an_encoder_alone_is_not_recorded(record: str) -> None:
    model, pixels = ALONE["siglip"]().eval(), images()
    words = "SiglipVisionModel would keep the choice of tokens"
    with pytest.raises(ModelError, match=words), attach(model, "tome@vit:0.5"):
        if record == "trace":
            torch.jit.trace(model, (pixels,), check_trace=False)
        else:
            torch.export.export(model, (pixels,), strict=record == "strict")
