"""Merging in the blocks of VGGT that attend to all frames, beside plain loops."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from encoder_oracle import build
from oracle_base import Item
from oracles import litevggt
from oracles_compose import rescaled
from torch import Tensor, nn

from mmfast.attach import attach
from mmfast.bench.suites.scene import SceneAggregator, _rotated
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.spec import parse, run
from mmfast.core.tokens import Tokens
from mmfast.models.vision import scene
from mmfast.models.vision.frames.cache import FrameCache

FRAMES, ROWS, COLUMNS, FRONT, PATCH = 3, 4, 3, 3, 6
EACH, N = ROWS * COLUMNS, FRAMES * ROWS * COLUMNS
close = partial(torch.testing.assert_close, atol=2e-5, rtol=1e-4)


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def small(depth: int = 4) -> SceneAggregator:
    torch.manual_seed(0)
    model = SceneAggregator(dim=16, depth=depth, heads=2, patch=PATCH, registers=FRONT - 1)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def scenes(count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, FRAMES, 3, ROWS * PATCH, COLUMNS * PATCH, generator=generator)


def _drawn(images: Tensor, patches: Tensor) -> list[float]:
    """Geometry of one scene `[S, 3, H, W]` by loops over frames, tokens and pixels."""
    score: list[float] = []
    for image, rows in zip(images.double().numpy(), patches.double().numpy(), strict=True):
        grey = 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]
        wide = np.pad(grey, 1, mode="edge")
        slope = np.zeros_like(grey)
        for y in range(grey.shape[0]):
            for x in range(grey.shape[1]):
                near = wide[y : y + 3, x : x + 3]
                across = (near[:, 2] - near[:, 0]) @ (1, 2, 1) / 8
                down = (near[2] - near[0]) @ (1, 2, 1) / 8
                slope[y, x] = math.hypot(across, down)
        cells = slope.reshape(ROWS, PATCH, COLUMNS, PATCH).mean((1, 3)).flatten().tolist()
        unit = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
        still = unit.reshape(ROWS, COLUMNS, -1)
        spread = [
            float(still[max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2].reshape(-1, 16).var(0).sum())
            for y in range(ROWS)
            for x in range(COLUMNS)
        ]
        maps = zip(rescaled(cells), rescaled(spread), strict=True)
        score += [0.7 * a + 0.3 * b for a, b in maps]
    return score


def _attended(attn: Any, x: Tensor, pos: Tensor, groups: list[list[int]]) -> Tensor:
    """Attention over means of groups of tokens `[n, C]`, copied to all that are in them."""
    q, k, v = attn.qkv(x).unflatten(-1, (3, 2, -1)).permute(1, 2, 0, 3)[:, :, None].unbind(0)
    q, k = _rotated(attn.q_norm(q)[:, 0][None], pos), _rotated(attn.k_norm(k)[:, 0][None], pos)
    out = torch.zeros(len(x), 2, 8)
    for head in range(2):
        means = [
            torch.stack([rows[group].mean(0) for group in groups])
            for rows in (q[0, head], k[0, head], v[head, 0])
        ]
        weights = (means[0] @ means[1].T / math.sqrt(8)).softmax(-1)
        for group, value in zip(groups, weights @ means[2], strict=True):
            out[group, head] = value
    done: Tensor = attn.proj(out.flatten(1))
    return done


def naive(model: SceneAggregator, images: Tensor, budget: int, reuse: int, **knobs: Any) -> Tensor:
    """The last output of one scene, with merging by the oracle in the first `blocks` blocks."""
    blocks = knobs.pop("blocks", 99)
    embedded: Tensor = model.patch_embed(images)
    patches = embedded.flatten(0, 1)
    special = torch.cat([model.camera_token, model.register_token], 2)[0, [0, 1, 1]]
    x = torch.cat([special, embedded], 1)  # [S, P, C]
    score = _drawn(images, patches.unflatten(0, (FRAMES, EACH)))
    place = torch.tensor([[0, 0]] * FRONT + [[y + 1, z + 1] for y in range(4) for z in range(3)])
    where = [f * (FRONT + EACH) + FRONT + i for f in range(FRAMES) for i in range(EACH)]
    rest = sorted(set(range(FRAMES * (FRONT + EACH))) - set(where))
    groups: list[list[int]] = []
    for index, alone in enumerate(model.frame_blocks):
        together: Any = model.global_blocks[index]
        one = alone(x, pos=place[None])
        flat, pos = one.flatten(0, 1), place.repeat(FRAMES, 1)[None]
        normed = together.norm1(flat)
        if index % reuse == 0:
            item = Item(normed[where].double().numpy(), grid=(FRAMES, ROWS, COLUMNS))
            found = litevggt(item, budget, score=score, **knobs)
            groups = [[where[i] for i in members] for members in found.groups.values()]
            groups += [[i] for i in rest]
        each = groups if index < blocks else [[i] for i in range(len(flat))]
        flat = flat + _attended(together.attn, normed, pos, each)
        x = (flat + together.mlp(together.norm2(flat))).unflatten(0, (FRAMES, -1))
    return torch.cat([one, x], -1)


CASES = [
    ("18", 18, {"reuse": 1}),
    ("0.4?reuse=2", 14, {"reuse": 2}),
    ("22?first=true&reuse=3", 22, {"reuse": 3, "first": True}),
    ("12?salient=0&until=0.5", 12, {"reuse": 1, "salient": 0.0, "blocks": 2}),
]


@pytest.mark.parametrize(("written", "budget", "knobs"), CASES)
def test_equals_merging_by_plain_loops(written: str, budget: int, knobs: dict[str, Any]) -> None:
    model, images = small(), scenes()
    stock = model(images)[0][-1]
    with attach(model, f"litevggt@vit:{written}") as trace:
        found = model(images)[0][-1]
    for item in range(2):
        close(found[item], naive(model, images[item], budget, **knobs))
    assert (found - stock).abs().max() > 1e-3
    assert [(row.stage, row.tokens_in, row.tokens_out) for row in trace.rows] == [
        ("vit", N, budget)
    ] * 2
    for _, _, reduction in trace.reductions:
        reduction.check()
        assert (reduction.n, reduction.m) == (N, budget)


def test_share_one_changes_no_bit_and_nothing_stays() -> None:
    model, images = small(), scenes()
    before = {n: [*m.__dict__] for n, m in model.named_modules()}
    hooks = len(model.patch_embed._forward_hooks)
    stock = model(images)[0]
    with attach(model, "litevggt@vit:1.0") as trace:
        assert all(map(torch.equal, model(images)[0], stock))
    assert not trace.rows
    with pytest.raises(ZeroDivisionError), attach(model, "litevggt@vit:0.5"):
        assert not torch.equal(model(images)[0][-1], stock[-1])
        raise ZeroDivisionError
    assert all(map(torch.equal, model(images)[0], stock))
    assert {n: [*m.__dict__] for n, m in model.named_modules()} == before
    assert len(model.patch_embed._forward_hooks) == hooks


@pytest.mark.parametrize("cut", [None, ZeroDivisionError])
def test_a_block_outside_a_pass_reads_every_token(cut: type[Exception] | None) -> None:
    """The scene of a pass that is over, or was cut short, says nothing of what comes behind it."""
    model, images = small(), scenes(1)
    block: Any = model.global_blocks[0]
    rows = torch.randn(1, FRAMES * (FRONT + EACH), 16)
    pos = torch.zeros(1, rows.shape[1], 2, dtype=torch.int64)
    stock = block(rows, pos=pos)

    def fail(*_: Any) -> None:
        if cut is not None:
            raise cut

    with attach(model, "litevggt@vit:0.4"), model.global_blocks[-1].register_forward_hook(fail):
        with nullcontext() if cut is None else pytest.raises(cut):
            model(images)
        assert torch.equal(block(rows, pos=pos), stock)


@pytest.mark.parametrize(("knobs", "plans"), [("", 4), ("?reuse=2", 2), ("?reuse=3", 2)])
def test_one_plan_serves_several_blocks(
    knobs: str, plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Reduction] = []
    used: list[Reduction] = []
    stock, merged = scene._with_front, scene._on_merged

    def plan(*args: Any) -> Reduction:
        made.append(stock(*args))
        return made[-1]

    def attend_by(reduction: Reduction, *args: Any, **kwargs: Any) -> Tensor:
        used.append(reduction)
        return merged(reduction, *args, **kwargs)

    monkeypatch.setattr(scene, "_with_front", plan)
    monkeypatch.setattr(scene, "_on_merged", attend_by)
    model = small()
    with attach(model, f"litevggt@vit:0.5{knobs}"):
        model(scenes())
    assert (len(made), len(used)) == (plans, 4)
    assert {*map(id, used)} == {*map(id, made)}
    place = torch.arange(FRAMES * (FRONT + EACH)).view(FRAMES, -1)[:, :FRONT].flatten()
    for each in made:  # camera and register tokens are alone, and nothing joins them
        assert torch.equal(each.keep.gather(1, each.owner)[:, place], place.expand(2, -1))
        assert bool((each.sizes().gather(1, each.owner)[:, place] == 1).all())
        assert each.m == 18 + FRAMES * FRONT


def test_a_batch_equals_one_by_one() -> None:
    model, images = small(), scenes(3)
    for spec in ("litevggt@vit:0.5?reuse=2", "litevggt@vit:20?first=true", "tome@vit:0.5"):
        with attach(model, spec):
            together = model(images)[0][-1]
            alone = torch.cat([model(one[None])[0][-1] for one in images])
        close(together, alone)


class _Named(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        return {"x_norm_patchtokens": self.inner(pixels)}


class _WithHeads(nn.Module):
    """As VGGT itself: an aggregator whose patches come from a DINOv2, and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.aggregator: Any = small()
        self.aggregator.patch_embed = _Named(self.aggregator.patch_embed)

    def forward(self, images: Tensor) -> Tensor:
        embed = self.aggregator.patch_embed
        unpack = embed.register_forward_hook(lambda *seen: seen[2]["x_norm_patchtokens"])
        outputs: Tensor = self.aggregator(images=images)[0][-1].mean(-1)
        unpack.remove()
        return outputs


def test_a_whole_model_is_attached_by_its_aggregator() -> None:
    model, images = _WithHeads(), scenes(1)
    plain = model(images)
    with attach(model, "litevggt@vit:0.5") as trace:
        merged = model(images)
    assert trace.calls == 1 and trace.rows[0].tokens_out == 18
    assert torch.equal(merged, small_with("litevggt@vit:0.5", images))
    assert torch.equal(model(images), plain) and not torch.equal(merged, plain)


def small_with(spec: str, images: Tensor) -> Tensor:
    model = small()
    with attach(model, spec):
        outputs: Tensor = model(images)[0][-1].mean(-1)
    return outputs


def test_gradients_pass_and_training_with_checkpoints_is_refused() -> None:
    model = small(2)
    images = scenes(1).requires_grad_()
    with torch.enable_grad(), attach(model, "litevggt@vit:0.5"):
        model(images)[0][-1].square().mean().backward()
        assert images.grad is not None and images.grad.abs().max() > 0
        with pytest.raises(ModelError, match="computes blocks again in training; call eval"):
            model.train()(images)


@pytest.mark.parametrize(
    ("spec", "encoder", "error", "words"),
    [
        ("litevggt@vit:0.5?reuse=0", None, SpecError, "reuse=0 .* choose 1 or more"),
        ("litevggt:0.5", None, SpecError, "the only site of an encoder is vit"),
        ("litevggt@vit:1000", None, SpecError, "1000"),
        ("litevggt@vit:13?first=true&salient=0.9", None, SpecError, "do not fit 13 of 36"),
        (None, "fast", ModelError, "encoder='fast' is not known to work in SceneAggregator"),
    ],
)
def test_what_cannot_act_is_refused(
    spec: str | None, encoder: str | None, error: type[Exception], words: str
) -> None:
    model = small(2)
    with pytest.raises(error, match=words), attach(model, spec, encoder=encoder):
        model(scenes(1))


def test_other_models_and_attention_of_other_kinds_are_refused() -> None:
    with pytest.raises(SpecError, match="as in VGGT, which VisionTransformer does not"):
        attach(build("vit"), "litevggt@vit:0.5")
    with pytest.raises(SpecError, match="knob reuse=2 of 'litevggt' is for site 'vit'"):
        run(parse("litevggt:4?reuse=2")[0], Tokens(torch.randn(9, 4)))
    with pytest.raises(ModelError, match=r"SceneAggregator.* has no blocks that a frame cache"):
        FrameCache(small(1))
    model: Any = small(1)
    model.global_blocks[0].attn.fused_attn = False
    with pytest.raises(ModelError, match="build them with fused_attn=True"):
        attach(model, "litevggt@vit:0.5")
