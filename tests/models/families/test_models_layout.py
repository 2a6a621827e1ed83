"""Layouts and folds of the adapters against what the stock models really produce."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import FAMILIES, Tiny, build, generate, tiny
from torch import Tensor, nn

from mmfast.attach import attach
from mmfast.core import registry
from mmfast.core.errors import ModelError
from mmfast.models import families
from mmfast.models.families import adapter as adapters
from mmfast.models.families.adapter import adapter_for

# (height, width) of images: square, wide, tall, larger than all tiles together, tiny.
SIZES = [(24, 24), (30, 70), (90, 25), (150, 140), (9, 11)]


def call_of(this: Tiny, inputs: dict[str, Any], kind: str) -> dict[str, Any]:
    return {k: inputs[k] for k in this.facts.calls[kind] if k in inputs}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", SIZES)
def test_image_layout_equals_the_features(family: str, size: tuple[int, int]) -> None:
    this = tiny(family)
    inputs = this.inputs(["{image}"], images=this.images(1, size=size))
    check(this, inputs, "image")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("patch", [3, 4])
def test_layouts_of_several_media(family: str, patch: int) -> None:
    this = tiny(family, patch=patch, height=33, width_px=47, frames=6)
    images = [this.images(1, i, size)[0] for i, size in enumerate(SIZES[:3])]
    inputs = this.inputs(["{image} {image}", "{image}"], images=images)
    check(this, inputs, "image")
    check(this, this.inputs(["{video} {video}"], videos=this.videos(2)), "video")


def check(this: Tiny, inputs: dict[str, Any], kind: str) -> None:
    """Lengths, separators and grids; the same again from the tensors alone."""
    base, adapter = this.model.model, adapter_for(this.model)
    layouts = adapter.layout(base, kind, call_of(this, inputs, kind))
    features = list(oracle.encode(this, inputs, kind).pooler_output)
    assert [each.length for each in layouts] == [len(f) for f in features]
    ids = inputs["input_ids"]
    token = ids == getattr(base.config, f"{kind}_token_id")
    assert int(token.sum()) == sum(each.length for each in layouts)
    positions: Any = [None] * len(layouts)
    if adapter.mrope:
        names = ("image_grid_thw", "video_grid_thw", "mm_token_type_ids", "attention_mask")
        given = {k: inputs[k] for k in names if k in inputs}
        columns = base.get_rope_index(ids, **given)[0][:, token]
        positions = columns.split([each.length for each in layouts], dim=1)
    for layout, rows, where in zip(layouts, features, positions, strict=True):
        if this.family == "llava_onevision":
            newline = (rows == base.image_newline).all(-1).nonzero()[:, 0]
            assert layout.separators == tuple(newline.tolist())
        if layout.grid is not None:
            t, h, w = layout.grid
            assert t * h * w == layout.length - len(layout.separators) == len(layout.content())
        found = adapter.recover(base, kind, rows, where)
        assert found == replace(layout, tiles=None)  # the cut into tiles leaves no trace
        assert torch.equal(found.place(), layout.place())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["image", "video"])
def test_fold_brings_every_patch_to_its_token(family: str, kind: str) -> None:
    """A change of one patch's embedding moves only the token that `fold` names.

    The tower's attention is cut, so features depend on their own patches alone.
    """
    this = build(family, height=40, width_px=48)
    base, adapter, inputs = this.model.model, adapter_for(this.model), None
    inputs = this.inputs([f"{{{kind}}}"], **{f"{kind}s": getattr(this, f"{kind}s")(1)})
    tower = base.get_encoder("image")
    for name, module in tower.named_modules():
        if name.endswith((".out_proj", ".attn.proj")):
            nn.init.zeros_(module.weight)
    patches: list[Tensor] = []
    embed = next(m for n, m in tower.named_modules() if n.split(".")[-1].startswith("patch_embed"))
    handle = embed.register_forward_hook(lambda m, a, out: patches.append(out.shape))
    before = oracle.encode(this, inputs, kind).pooler_output
    handle.remove()
    (shape,) = patches
    count = shape[0] * shape[2] * shape[3] if len(shape) == 4 else shape[0]
    layout = adapter.layout(base, kind, call_of(this, inputs, kind))[0]
    content = layout.content()
    for patch in range(0, count, max(1, count // 7)):

        def change(module: nn.Module, args: Any, out: Tensor, patch: int = patch) -> Tensor:
            rows = out.flatten(2).transpose(1, 2) if out.ndim == 4 else out[None]
            flat = rows.reshape(-1, rows.shape[-1]).clone()
            flat[patch, ::2] += 3.0
            rows = flat.view(rows.shape)
            return rows.transpose(1, 2).reshape(out.shape) if out.ndim == 4 else rows[0]

        handle = embed.register_forward_hook(change)
        after = oracle.encode(this, inputs, kind).pooler_output
        handle.remove()
        moved = (after[0] - before[0]).abs().amax(-1)[content] > 1e-6
        values = torch.zeros(count, 1)
        values[_tower_order(this, inputs, kind, patch)] = 1.0
        folded = adapter.fold(base, kind, values, call_of(this, inputs, kind))[0]
        assert torch.equal(folded[:, 0] > 1e-6, moved)


def _tower_order(this: Tiny, inputs: dict[str, Any], kind: str, patch: int) -> int:
    """Where the tower's blocks see a patch: Qwen2.5-VL permutes merge units into windows."""
    if this.family != "qwen2_5_vl":
        return patch
    from transformers.vision_utils import get_vision_window_index

    vision = this.model.config.vision_config
    size = vision.spatial_merge_size**2
    window, _ = get_vision_window_index(
        inputs[f"{kind}_grid_thw"], vision.spatial_merge_size, vision.window_size, vision.patch_size
    )
    return int((window == patch // size).nonzero()) * size + patch % size


@pytest.mark.parametrize("family", FAMILIES)
def test_separators_are_never_dropped(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(["{image}"], images=this.images(1, size=(60, 40)))
    prompt = oracle.embed(this, inputs)
    with attach(this.model, "random:1") as trace:
        logits = this.model(**inputs).logits[0]
    keep = oracle.kept_places(prompt, trace.reductions)
    content = sum(len(item) for item in prompt.items)
    assert len(logits) == len(keep) == len(prompt.embeds) - content + len(prompt.items)
    assert torch.equal(logits, oracle.removed(this, prompt, keep))


def test_an_unknown_family_is_told_how_to_write_an_adapter() -> None:
    class Other(nn.Module):
        config = type("Config", (), {"model_type": "other_vl"})

    with pytest.raises(ModelError, match=r"Other .*other_vl.*add_adapter") as error:
        adapter_for(Other())
    assert "\n" not in str(error.value)
    with pytest.raises(ModelError, match="not a model"), attach("not a model", "random:0.5"):
        pass


FAMILY = """
from mmfast.models.families.adapter import Adapter, Layout, add_adapter

def layout(base, kind, call):
    frames = call["pixel_values_videos"].shape[1]
    return [Layout(frames * 9 + 1, (frames, 3, 3), (frames * 9,))]

add_adapter(Adapter("my_vl", layout, lambda *_: []))
"""


def test_a_family_is_one_file_that_is_found_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing else is touched: here LLaVA-OneVision under another name."""
    (tmp_path / "my_vl.py").write_text(FAMILY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "_LOADED", registry._LOADED - {families.__name__})
    monkeypatch.setattr(adapters, "_ADAPTERS", dict(adapters._ADAPTERS))
    monkeypatch.setitem(sys.modules, f"{families.__name__}.my_vl", None)  # gone afterwards
    del sys.modules[f"{families.__name__}.my_vl"]
    this = build("llava_onevision")
    this.model.config.model_type = this.model.model.config.model_type = "my_vl"
    inputs = this.inputs(["{video}?"], videos=this.videos(1))
    with attach(this.model, "random:0.5+fastv@llm2:0.5") as trace:
        generate(this, inputs, 2)
    assert [(row.tokens_in, row.tokens_out) for row in trace.rows] == [(36, 18), (18, 9)]
    assert "my_vl" in adapters.families("video")
