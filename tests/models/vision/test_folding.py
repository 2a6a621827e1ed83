"""Tower blocks without attention (RIFormer): folding, attaching and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_checks import features, ragged
from encoder_oracle import build as build_timm
from encoder_oracle import images
from tiny_models import ALL_FAMILIES, build, facts, tiny
from torch.utils.flop_counter import FlopCounterMode

from mmfast import ModelError, SpecError
from mmfast.attach import attach
from mmfast.compressors.base import save
from mmfast.core.spec import parse
from mmfast.core.trace import Trace
from mmfast.models.cost import tower_flops
from mmfast.models.families.adapter import tower_of
from mmfast.models.families.tower import attention_of
from mmfast.models.reduction.check import check
from mmfast.models.vision.folding import (
    AffineMixer,
    EncoderPlan,
    file_of,
    fold,
    folded_tower,
    plan_encoder,
    read,
    without_attention,
)

QUICK = ("internvl", "llava_onevision", "qwen2_5_vl")
TOWERS = [
    pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
    for family in ALL_FAMILIES
    if family != "fast_vlm"  # whose tower is of convolutions alone
]


def learned(model: Any, blocks: list[int], seed: int = 0) -> Any:
    """A model whose affine maps are far from where they begin, and one other weight, too."""
    made = without_attention(model, blocks)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for number in blocks:
            mixer = attention_of(tower_of(made).blocks[number])
            for each in mixer.parameters():
                each.add_(0.4 * torch.randn(each.shape, generator=generator))
        next(tower_of(made).blocks[0].mlp.parameters()).mul_(1.2)
    return made


def written(model: Any, folder: Path) -> Path:
    """The file of a learned model's folded weights."""
    weights = fold(model)
    path = file_of(folder, len(weights.blocks))
    save(weights, path)
    return path


@pytest.mark.parametrize("family", TOWERS)
@torch.no_grad()
def test_folded_blocks_give_what_affine_maps_gave(family: str, tmp_path: Path) -> None:
    """In every family, with layer norms and root mean square norms, class tokens and windows."""
    this = tiny(family)
    kind = facts(family).kinds[0]
    call = ragged(this, kind)
    last = len(tower_of(this.model).blocks) - 1
    student = learned(this.model, [0, last])
    stock = features(this, kind, call)
    path = written(student, tmp_path)
    expected = features(student, kind, call)
    with attach(this.model, encoder=f"riformer:2?path={path}") as trace:
        found = features(this, kind, call)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(stock, expected, atol=1e-3)
    assert torch.equal(features(this, kind, call), stock)
    (note,) = trace.notes
    assert note.startswith("riformer: no attention in blocks 0, ")
    assert note.endswith("which learn nothing meanwhile")


def by_hand(weights: dict[str, np.ndarray], gone: list[int], x: np.ndarray, heads: int) -> Any:
    """Blocks of SigLIP over patches `[P, D]`, row by row in float64, by the folded weights."""

    def norm(row: np.ndarray, name: str) -> np.ndarray:
        spread = math.sqrt(float(((row - row.mean()) ** 2).mean()) + 1e-6)
        return (row - row.mean()) / spread * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(row: np.ndarray, name: str) -> np.ndarray:
        return weights[f"{name}.weight"] @ row + weights[f"{name}.bias"]

    for n in range(1 + max(int(name.split(".")[0]) for name in weights)):
        normed = [norm(row, f"{n}.layer_norm1") for row in x]
        if n not in gone:
            q, k, v = (
                [linear(row, f"{n}.self_attn.{part}_proj").reshape(heads, -1) for row in normed]
                for part in "qkv"
            )
            mixed = []
            for row in range(len(x)):
                out = []
                for head in range(heads):
                    size = math.sqrt(len(q[row][head]))
                    power = np.exp(np.stack(k)[:, head] @ q[row][head] / size)
                    out.append(power / power.sum() @ np.stack(v)[:, head])
                mixed.append(linear(np.concatenate(out), f"{n}.self_attn.out_proj"))
            normed = mixed
        x = np.stack([row + more for row, more in zip(x, normed, strict=True)])
        inner = [linear(norm(row, f"{n}.layer_norm2"), f"{n}.mlp.fc1") for row in x]
        act = [
            0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) for h in inner
        ]
        x = np.stack([row + linear(h, f"{n}.mlp.fc2") for row, h in zip(x, act, strict=True)])
    return x


@torch.no_grad()
def test_the_tower_equals_plain_loops_and_a_wrong_fold_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this = tiny("llava_onevision")
    tower = tower_of(this.model)
    student = learned(this.model, [1])
    pixels = ragged(this, "image")["pixel_values"].flatten(0, 1)[:1]
    seen: list[torch.Tensor] = []

    def states(path: Path) -> torch.Tensor:
        hooks = [tower.blocks[0].register_forward_pre_hook(lambda _, a, **k: seen.append(a[0]))]
        hooks += [tower.blocks[-1].register_forward_hook(lambda *a: seen.append(a[-1]))]
        with folded_tower(this.model, f"riformer:1?path={path}", Trace()):
            tower.module(pixels)
        for hook in hooks:
            hook.remove()
        return seen[-1][0].double()

    path = written(student, tmp_path)
    found = states(path)
    weights = {name: each.double().numpy() for name, each in read(path).named().items()}
    assert not any(name.startswith("1.self_attn") for name in weights)
    heads = attention_of(tower.blocks[0]).num_heads
    expected = torch.from_numpy(by_hand(weights, [1], seen[0][0].double().numpy(), heads))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    # The same map written out on the student, channel by channel, is what was folded.
    mixer = attention_of(tower_of(student).blocks[1])
    row = torch.randn(len(mixer.scale))
    by_channel = [
        float(mixer.scale[c]) * float(row[c]) + float(mixer.shift[c]) - float(row[c])
        for c in range(len(row))
    ]
    torch.testing.assert_close(mixer(row)[0], torch.tensor(by_channel))

    def forgetful(self: AffineMixer, norm: Any) -> dict[str, torch.Tensor]:
        """The map without the input that it takes away."""
        return {"weight": norm.weight * self.scale, "bias": norm.bias * self.scale + self.shift}

    monkeypatch.setattr(AffineMixer, "fold", forgetful)
    wrong = states(written(student, tmp_path / "wrong"))
    assert (wrong - expected).abs().max() > 1e-2


@torch.no_grad()
def test_untrained_it_is_the_tower_without_that_attention() -> None:
    this = tiny("llava_onevision")
    call = ragged(this, "video")
    student = without_attention(this.model, [0, 1])
    dropped = build("llava_onevision")
    for block in list(tower_of(dropped.model).blocks)[:2]:
        attention_of(block).out_proj.weight.zero_()
        attention_of(block).out_proj.bias.zero_()
    found = features(student, "video", call)
    torch.testing.assert_close(found, features(dropped, "video", call), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
def test_a_ragged_batch_is_its_items_one_by_one(family: str, tmp_path: Path) -> None:
    this = tiny(family)
    pictures = [
        np.full((h, w, 3), 40 * n, np.uint8) for n, (h, w) in enumerate([(28, 56), (60, 30)])
    ]
    path = written(learned(this.model, [1]), tmp_path)
    each = [this.processor.image_processor(p, return_tensors="pt") for p in pictures]
    with attach(this.model, encoder=f"riformer:1?path={path}"):
        together = this.processor.image_processor(pictures, return_tensors="pt")
        found = this.model.model.get_image_features(**together).pooler_output
        for number, one in enumerate(each):
            alone = this.model.model.get_image_features(**one).pooler_output[0]
            torch.testing.assert_close(found[number], alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_an_encoder_alone_of_timm(tmp_path: Path) -> None:
    model, pixels = build_timm("vit"), images()
    student = learned(model, [0, 2])
    path = written(student, tmp_path)
    stock = model(pixels)
    with attach(model, encoder=f"riformer:2?path={path}"):
        torch.testing.assert_close(model(pixels), student(pixels), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(model(pixels), stock, atol=1e-3)
    assert torch.equal(model(pixels), stock)


@torch.no_grad()
def test_parameters_come_back_as_they_were_where_the_model_moved(tmp_path: Path) -> None:
    this = build("llava_onevision")
    before = dict(this.model.named_parameters())
    path = written(learned(this.model, [0]), tmp_path)
    with folded_tower(this.model, f"riformer:1?path={path}", Trace()):
        names = {name for name, each in this.model.named_parameters() if each is not before[name]}
        assert names and all(".layers." in name and "language" not in name for name in names)
        this.model.double()
    after = dict(this.model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert {each.dtype for each in after.values()} == {torch.float64}
    assert not any("forward" in m.__dict__ for m in this.model.modules())


@torch.no_grad()
def test_what_is_saved_and_loaded_meanwhile_is_the_stock_tower(tmp_path: Path) -> None:
    this = build("llava_onevision")
    path = written(learned(this.model, [1]), tmp_path)
    own = dict(this.model.named_parameters())
    stock = {name: value.clone() for name, value in this.model.state_dict().items()}
    other = {name: value + 1 for name, value in stock.items()}
    with folded_tower(this.model, f"riformer:1?path={path}", Trace()):
        now = dict(this.model.named_parameters())
        folded = {name: each.clone() for name, each in now.items() if each is not own[name]}
        meanwhile = {name: each.clone() for name, each in this.model.state_dict().items()}
        this.model.save_pretrained(tmp_path)
        this.model.load_state_dict(other)
        assert folded and all(torch.equal(now[name], each) for name, each in folded.items())
    reread = type(this.model).from_pretrained(tmp_path).state_dict()
    for name, value in stock.items():
        assert torch.equal(meanwhile[name], value) and torch.equal(reread[name], value), name
        assert torch.equal(this.model.state_dict()[name], other[name]), name
    assert not any(m._state_dict_hooks for m in this.model.modules())


def test_beside_fast_and_beside_reducers(tmp_path: Path) -> None:
    this = tiny("llava_onevision")
    call, path = ragged(this, "video"), written(learned(this.model, [0]), tmp_path)
    with attach(this.model, encoder=f"riformer:1?path={path}"):
        expected = features(this, "video", call)
    with attach(this.model, "divprune:0.5", encoder=f"riformer:1?path={path}+fast"):
        torch.testing.assert_close(features(this, "video", call), expected, rtol=1e-4, atol=1e-4)
    last = len(tower_of(this.model).blocks) - 1
    assert check(parse("visionzip:0.5"), this.model, encoder=f"riformer:1?path={path}")
    path = written(learned(this.model, [last]), tmp_path / "last")
    with pytest.raises(SpecError, match=f"block {last} of the vision tower"):
        attach(this.model, "visionzip:0.5", encoder=f"riformer:1?path={path}")
    with pytest.raises(SpecError, match="keys of every block"):
        attach(this.model, "tome@vit:0.5", encoder=f"riformer:1?path={path}")


@torch.no_grad()
def test_flops_are_those_that_torch_counts(tmp_path: Path) -> None:
    this = tiny("llava_onevision", attention="eager")  # torch counts no fused kernel of a CPU
    path, tower = written(learned(this.model, [1]), tmp_path), tower_of(this.model)
    pixels = ragged(this, "image")["pixel_values"].flatten(0, 1)[:1]
    side = this.model.config.vision_config.image_size // this.model.config.vision_config.patch_size
    counted = []
    for encoder in (None, f"riformer:1?path={path}"):
        here = folded_tower(this.model, encoder, Trace())
        with here, FlopCounterMode(display=False) as counter:
            tower.module(pixels)
        counted.append(counter.get_total_flops())
    whole = [side * side] * len(tower.blocks)
    costs = [tower_flops(this.model, (1, side, side), whole, whole, gone) for gone in ((), (1,))]
    assert counted[0] - counted[1] == costs[0] - costs[1] > 0


def test_specs_are_read() -> None:
    assert plan_encoder(None) == EncoderPlan()
    assert plan_encoder("fast") == EncoderPlan("fast")
    assert plan_encoder("riformer:2") == EncoderPlan(None, 2)
    assert plan_encoder("riformer:3?path=a+b/c") == EncoderPlan(None, 3, "a+b/c")
    assert plan_encoder("riformer:3?path=a/c+fast") == EncoderPlan("fast", 3, "a/c")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("riformer", "does not name its blocks"),
        ("riformer:x", "does not name its blocks"),
        ("riformer:0", "folds no block"),
        ("riformer:1+compile", "does not notice other weights"),
        ("riformer:1+graph", "does not notice other weights"),
        ("rifomer:1", "did you mean 'riformer:N'"),
        ("fats", "did you mean 'fast'"),
    ],
)
def test_wrong_specs_are_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        attach(tiny("llava_onevision").model, encoder=text)
    assert "\n" not in str(caught.value)


def test_wrong_weights_are_refused(tmp_path: Path) -> None:
    this, other = tiny("llava_onevision"), tiny("qwen2_5_vl")
    with pytest.raises(ModelError, match=r"python -m mmfast\.tiny\.video\.folding --blocks 1 2"):
        attach(this.model, encoder="riformer:2")
    with pytest.raises(ModelError, match=r"'riformer:99' folds more than the 2 blocks .*1 to 2$"):
        attach(this.model, encoder="riformer:99")
    with pytest.raises(ModelError, match="no file 'gone'"):
        attach(this.model, encoder="riformer:2?path=gone")
    path = written(learned(this.model, [0]), tmp_path)
    with pytest.raises(ModelError, match="write 'riformer:1'"):
        attach(this.model, encoder=f"riformer:2?path={path}")
    with pytest.raises(ModelError, match="another tower"):
        attach(other.model, encoder=f"riformer:1?path={path}")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no weights")
    with pytest.raises(ModelError, match="cannot be read"):
        attach(this.model, encoder=f"riformer:1?path={broken}")
    with pytest.raises(ModelError, match="not among those"):
        without_attention(this.model, [7])
    with pytest.raises(ModelError, match="no blocks of attention"):
        without_attention(tiny("fast_vlm").model, [0])


def test_nothing_is_set_aside_without_a_plan() -> None:
    trace = Trace()
    with folded_tower(tiny("llava_onevision").model, "fast", trace):
        assert not trace.notes
