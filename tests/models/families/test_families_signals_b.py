"""Signals of the towers of Qwen2-VL, the Omni thinker, Idefics3 and SmolVLM, and their folds.

Attention is computed by hand, or by the tower's eager code; the way from patches and audio frames
to tokens is the stock one, with known values in place of the tower's output.
"""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import Tiny, build
from torch import Tensor, nn
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from mmfast.models.families.adapter import adapter_for
from mmfast.models.families.prompt_ids import prompt_ids
from mmfast.models.reduction.tower_signals import tower_signals

PACKED = [
    ("qwen2_vl", "image"),
    ("qwen2_vl", "video"),
    ("qwen2_5_omni_thinker", "image"),
    ("qwen2_5_omni_thinker", "video"),
]
ALL = [*PACKED, ("qwen2_5_omni_thinker", "audio"), ("idefics3", "image"), ("smolvlm", "video")]


def prompt(this: Tiny, kind: str) -> dict[str, Any]:
    """Two items of unlike size in one prompt."""
    if kind == "image":
        images = [this.images(1, i, size)[0] for i, size in enumerate([(33, 50), (10, 50)])]
        return this.inputs(["{image} or {image}?"], images=images)
    if kind == "audio":
        sounds = [this.sounds(1, i, seconds)[0] for i, seconds in enumerate((0.53, 0.9))]
        return this.inputs(["{audio} or {audio}?"], sounds=sounds)
    videos = [this.videos(1, i, frames)[0] for i, frames in enumerate((4, 2))]
    return this.inputs(["{video} or {video}?"], videos=videos)


def encode(this: Tiny, inputs: dict[str, Any], kind: str) -> Any:
    """Clips of SmolVLM go the way of images."""
    return oracle.encode(this, inputs, "image" if this.family == "smolvlm" else kind)


def read(this: Tiny, inputs: dict[str, Any], kind: str) -> list[dict[str, Tensor]]:
    adapter = adapter_for(this.model)
    with prompt_ids(inputs["input_ids"]), tower_signals(this.model, adapter, {"attn", "keys"}) as c:
        encode(this, inputs, kind)
    kind = "image" if this.family == "smolvlm" else kind
    both = [
        {"attn": c.signal("attn", (kind, i))[:, None], "keys": c.signal("keys", (kind, i))}
        for i in range(2)
    ]
    assert c.count(kind) == 2
    return both


def heads(rows: Tensor) -> Tensor:
    """`[S, C]` to `[2 heads, S, C / 2]`."""
    return rows.unflatten(-1, (2, -1)).transpose(0, 1)


def received(q: Tensor, k: Tensor, ends: Tensor) -> dict[str, Tensor]:
    """Attention received and keys, `[S, d]`, of queries and keys `[heads, S, d]`."""
    attn, start = torch.zeros(q.shape[1], 1), 0
    for stop in ends.tolist()[1:]:
        for head in range(len(q)):
            logits = q[head, start:stop] @ k[head, start:stop].T / q.shape[-1] ** 0.5
            attn[start:stop, 0] += logits.softmax(-1).mean(0) / len(q)
        start = stop
    return {"attn": attn, "keys": k.mean(0)}


def seen(this: Tiny, block: nn.Module, inputs: dict[str, Any], kind: str) -> dict[str, Any]:
    """What a block of the tower gets."""
    got: dict[str, Any] = {}

    def look(_: Any, args: Any, kwargs: Any) -> None:
        got.update(kwargs, x=args[0] if args else kwargs["hidden_states"])

    handle = block.register_forward_pre_hook(look, with_kwargs=True)
    encode(this, inputs, kind)
    handle.remove()
    return got


class Gives(nn.Module):
    """Stands for a part of the model and gives known rows, widened to what comes next."""

    def __init__(self, rows: Tensor, width: int) -> None:
        super().__init__()
        self.rows = nn.functional.pad(rows, (0, width - rows.shape[-1]))

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.rows


@pytest.mark.parametrize(("family", "kind"), PACKED)
def test_patches_of_packed_towers(family: str, kind: str) -> None:
    this = build(family)
    inputs = prompt(this, kind)
    got, visual = read(this, inputs, kind), this.model.base_model.visual
    block = visual.blocks[-1]
    state = seen(this, block, inputs, kind)
    x = block.norm1(state["x"])
    if hasattr(block.attn, "qkv"):
        q, k, _ = block.attn.qkv(x).chunk(3, -1)
    else:
        q, k = block.attn.q(x), block.attn.k(x)
    split = (rows.unflatten(-1, (2, -1)) for rows in (q, k))
    q, k = apply_rotary_pos_emb_vision(*split, *state["position_embeddings"])
    want = received(q.transpose(0, 1), k.transpose(0, 1), state["cu_seqlens"])
    for name, values in want.items():
        units = values.reshape(-1, 4, values.shape[-1]).mean(1)
        visual.merger = Gives(units, 32)  # behind it the model brings windows back in order
        items = encode(this, inputs, kind).pooler_output
        for mine, rows in zip(got, items, strict=True):
            expected = rows[:, : values.shape[-1]]
            torch.testing.assert_close(mine[name], expected, atol=1e-6, rtol=1e-5)


def test_frames_of_the_audio_encoder() -> None:
    this = build("qwen2_5_omni_thinker")
    inputs = prompt(this, "audio")
    got, encoder = read(this, inputs, "audio"), this.model.base_model.audio_tower
    layer = encoder.layers[-1]
    state = seen(this, layer, inputs, "audio")
    x = layer.self_attn_layer_norm(state["x"])
    q, k = heads(layer.self_attn.q_proj(x)), heads(layer.self_attn.k_proj(x))
    assert len(state["cu_seqlens"]) > 4  # several chunks in both
    encoder.ln_post = encoder.proj = nn.Identity()  # what comes behind the averaging
    for name, values in received(q, k, state["cu_seqlens"]).items():
        encoder.layers[-1] = Gives(values, 16)
        layer_output = encoder.layers[-1].forward
        encoder.layers[-1].forward = lambda *_, f=layer_output, **__: (f(),)
        rows = this.facts.items(this, encode(this, inputs, "audio"), "audio", inputs)
        for mine, expected in zip(got, rows, strict=True):
            assert len(mine[name]) == len(expected)
            expected = expected[:, : values.shape[-1]]
            torch.testing.assert_close(mine[name], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("family", "kind"), [("idefics3", "image"), ("smolvlm", "video")])
def test_patches_of_tiles(family: str, kind: str) -> None:
    this = build(family)
    inputs = prompt(this, kind)
    got, base = read(this, inputs, kind), this.model.model
    tiles = inputs["pixel_values"].flatten(0, 1)
    tiles = tiles[(tiles != 0).flatten(1).any(1)]
    block, keys = base.vision_model.encoder.layers[-1], []
    handle = block.self_attn.k_proj.register_forward_hook(lambda m, a, out: keys.append(out))
    base.vision_model.set_attn_implementation("eager")
    output = base.vision_model(tiles, output_attentions=True)
    handle.remove()
    patches = {
        "attn": output.attentions[-1].mean((1, 2))[..., None],
        "keys": keys[0].unflatten(-1, (2, -1)).mean(2),
    }
    for name, values in patches.items():
        shuffled = base.connector.pixel_shuffle(values, 2)
        rows = shuffled.unflatten(-1, (4, -1)).mean(2).flatten(0, 1)
        lengths = [len(mine[name]) for mine in got]
        assert lengths[0] > lengths[1]
        for mine, expected in zip(got, rows.split(lengths), strict=True):
            torch.testing.assert_close(mine[name], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("family", "kind"), ALL)
def test_fold_names_the_token_that_a_patch_moves(family: str, kind: str) -> None:
    """With the tower's attention cut, a patch moves the features of its own token alone."""
    this = build(family)
    inputs, base, adapter = prompt(this, kind), this.model.base_model, adapter_for(this.model)
    tower = adapter.tower_of(base, kind)
    for name, module in tower.module.named_modules():
        if name.endswith((".out_proj", ".attn.proj")):
            nn.init.zeros_(module.weight)
    call = {k: inputs[k] for k in (*this.facts.calls[kind], "input_ids") if k in inputs}
    shape = seen(this, tower.blocks[-1], inputs, kind)["x"].shape
    count = shape[:-1].numel()
    before = torch.cat(_items(this, inputs, kind))
    for patch in range(1, count, max(1, count // 6)):

        def push(_: Any, args: Any, kwargs: Any, patch: int = patch) -> Any:
            rows = (args[0] if args else kwargs["hidden_states"]).contiguous().clone()
            rows.view(-1, rows.shape[-1])[patch, ::2] += 3.0
            if args:
                return (rows, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": rows}

        handle = tower.blocks[-1].register_forward_pre_hook(push, with_kwargs=True)
        moved = (torch.cat(_items(this, inputs, kind)) - before).abs().amax(-1) > 1e-6
        handle.remove()
        values = torch.zeros(count, 1)
        values[patch] = 1.0
        folded = torch.cat(adapter.fold(base, kind, values, call))[:, 0]
        assert torch.equal(folded > 1e-6, moved)
        assert int(moved.sum()) <= 1  # an odd last frame of a sound is dropped


def _items(this: Tiny, inputs: dict[str, Any], kind: str) -> list[Tensor]:
    return this.facts.items(this, encode(this, inputs, kind), kind, inputs)
