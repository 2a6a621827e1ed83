"""Tower signals of every family with a tower of its own kind, against eager attention weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import Tiny, build, tiny
from torch import Tensor

from mmfast.attach import attach
from mmfast.core.errors import ModelError
from mmfast.models.families.adapter import adapter_for, tower_of
from mmfast.models.families.prompt_ids import prompt_ids
from mmfast.models.families.tower import attention_of
from mmfast.models.reduction.tower_signals import tower_signals

DEPTH = 6  # the middle block is neither the first nor the last
NAMES = ("attn", "attn_visual", "attn_middle", "attn_first", "keys")


def eager(this: Tiny, pixels: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Attention weights `[T, h, S, S]` and keys `[T, S, d]` (mean over heads) of every block."""
    tower, keys, weights = tower_of(this.model), [], []
    handles = [
        hook
        for block in tower.blocks
        for hook in (
            attention_of(block).k_proj.register_forward_hook(lambda m, a, out: keys.append(out)),
            attention_of(block).register_forward_hook(lambda m, a, out: weights.append(out[1])),
        )
    ]
    tower.module.set_attn_implementation("eager")
    tower.module(pixels)
    tower.module.set_attn_implementation("sdpa")
    for handle in handles:
        handle.remove()
    heads = weights[0].shape[1]
    return weights, [each.unflatten(-1, (heads, -1)).mean(-2) for each in keys]


def by_hand(this: Tiny, pixels: Tensor, last: int, middle: int) -> dict[str, Tensor]:
    """Signals of every patch `[T, P, d]` of a tower with a class token."""
    weights, keys = eager(this, pixels)
    means = [each.mean(1) for each in weights]  # [T, S, S]
    return {
        "attn": means[last][:, 0, 1:, None],
        "attn_visual": means[last].mean(1)[:, 1:, None],
        "attn_middle": means[middle].mean(1)[:, 1:, None],
        "attn_first": means[0][:, 0, 1:, None],
        "keys": keys[last][:, 1:],
    }


def collected(this: Tiny, inputs: dict[str, Any]) -> Any:
    base, adapter = this.model.base_model, adapter_for(this.model)
    call = {k: inputs[k] for k in this.facts.calls["image"] if k in inputs}
    with tower_signals(this.model, adapter, NAMES) as signals, prompt_ids(inputs["input_ids"]):
        base.get_image_features(**call)
    return signals


def compare(signals: Any, item: int, want: dict[str, Tensor]) -> None:
    for name in NAMES:
        got = signals.signal(name, ("image", item))
        expected = want[name] if name == "keys" else want[name][:, 0]
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: n + m)


def test_llava_reads_the_class_row_of_the_block_before_the_last() -> None:
    this = build("llava", depth=DEPTH)
    inputs = this.inputs(["{image}{image}"], images=this.images(2))
    signals = collected(this, inputs)
    want = by_hand(this, inputs["pixel_values"], last=DEPTH - 2, middle=round(3 / 8 * 5) - 1)
    for item in range(2):
        compare(signals, item, {name: values[item] for name, values in want.items()})
    assert signals.count("image") == 2


def test_llava_next_takes_the_way_of_its_features() -> None:
    this = build("llava_next", depth=DEPTH)
    base, sizes = this.model.model, [(24, 60), (60, 33), (24, 24)]
    images = [this.images(1, i, size)[0] for i, size in enumerate(sizes)]
    inputs = this.inputs(["{image}{image}{image}"], images=images)
    signals = collected(this, inputs)
    counts = adapter_for(this.model).tile_counts(base, inputs)
    assert len(set(counts)) > 1
    pixels = torch.cat([p[:n] for p, n in zip(inputs["pixel_values"], counts, strict=True)])
    patches = by_hand(this, pixels, last=DEPTH - 2, middle=1)
    base.image_newline.fill_(777.0)
    for name, values in patches.items():
        wide = values.expand(-1, -1, 32) if values.shape[-1] == 1 else values
        tiles = torch.nn.functional.pad(wide, (0, 32 - wide.shape[-1])).split(counts)
        packed, _ = base.pack_image_features(
            list(tiles), inputs["image_sizes"], "default", base.image_newline
        )
        for item, rows in enumerate(packed):
            rows = rows[rows[:, 0] != 777.0]
            got = signals.signal(name, ("image", item))
            want = rows[:, : values.shape[-1]] if name == "keys" else rows[:, 0]
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("merge", [1, 2])
def test_internvl_averages_the_patches_of_a_token(merge: int) -> None:
    this = build("internvl", depth=DEPTH, merge=merge)
    images = [this.images(1, 0, (24, 70))[0], this.images(1, 1, (24, 24))[0]]
    inputs = this.inputs(["{image} and {video}, {image}"], images=images, videos=this.videos(1))
    signals = collected(this, inputs)
    tiles = [len(inputs["pixel_values"]) - 5, 4, 1]
    assert tiles[0] > 2
    patches = by_hand(this, inputs["pixel_values"], last=DEPTH - 1, middle=round(3 / 8 * 6) - 1)
    want: dict[str, Tensor] = {}
    for name, values in patches.items():  # loops: row, column, and the patches of a token
        side = 6 // merge
        cells = values.unflatten(1, (6, 6))
        tokens = [
            cells[:, y * merge : (y + 1) * merge, x * merge : (x + 1) * merge].mean((1, 2))
            for y in range(side)
            for x in range(side)
        ]
        want[name] = torch.stack(tokens, 1)
    start = 0
    for item, count in enumerate(tiles):
        part = {name: rows[start : start + count].flatten(0, 1) for name, rows in want.items()}
        compare(signals, item, part)
        start += count


@pytest.mark.parametrize("spec", ["visionzip:0.5", "tome@vit:0.5", "hired:0.5"])
def test_a_tower_without_blocks_says_so(spec: str) -> None:
    this = tiny("fast_vlm")
    inputs = this.inputs(["{image}"], images=this.images(1))
    stock = this.model(**inputs).logits
    no_blocks = pytest.raises(ModelError, match=r"'fast_vlm' has no blocks.*divprune")
    with no_blocks as error, attach(this.model, spec):
        this.model(**inputs)
    assert "\n" not in str(error.value)
    assert torch.equal(this.model(**inputs).logits, stock)
    with attach(this.model, spec.split(":")[0] + ":1.0"):  # the identity asks for nothing
        assert torch.equal(this.model(**inputs).logits, stock)
