"""Helpers that several tests share: tower checks."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


QWEN_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
}


MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


GRIDS = torch.tensor([[2, 6, 10], [1, 4, 8]])


def _spread(model):
    """Weights large enough that attention is not flat."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0, 0.25)
    return model.eval()


def onevision(layer=-1, aspect="anyres_max_9"):
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 20,
        "patch_size": 4,
        "vision_use_head": False,
    }
    config = LlavaOnevisionConfig(
        vision_config=vision,
        text_config={"model_type": "qwen2", **TEXT},
        image_grid_pinpoints=[[20, 40], [40, 20], [40, 40], [20, 60]],
        vision_feature_layer=layer,
        vision_aspect_ratio=aspect,
        image_token_id=60,
        video_token_id=61,
    )
    return _spread(LlavaOnevisionForConditionalGeneration(config))


def qwen(name):
    if name == "qwen2_5_vl":
        vision = {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [2]}
        text = {**TEXT, "rope_parameters": MROPE}
        config = Qwen2_5_VLConfig(vision_config=vision, text_config=text)
        return _spread(Qwen2_5_VLForConditionalGeneration(config))
    vision = {**QWEN_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    text = {**TEXT, "head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
    config = Qwen3VLConfig(vision_config=vision, text_config=text)
    return _spread(Qwen3VLForConditionalGeneration(config))


def pixels(grids, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 4 * 4, generator=generator)


class _Replace(nn.Module):
    """Stands in for a projector and lets known values travel the model's feature path."""

    def __init__(self, values, width):
        super().__init__()
        self.values, self.width = values, width

    def forward(self, _):
        return torch.nn.functional.pad(self.values, (0, self.width - self.values.shape[-1]))


def _travel(model, owner, name, values, call):
    """What the model's features are when the projector gives `values`; newlines are 777."""
    stock = getattr(owner, name)
    setattr(owner, name, _Replace(values, 32))
    try:
        with torch.no_grad():
            if hasattr(model.model, "image_newline"):
                model.model.image_newline.fill_(777.0)
            features = call().pooler_output
    finally:
        setattr(owner, name, stock)
    rows = [item[item[:, 0] != 777.0] for item in features]
    return [item[:, : values.shape[-1]] for item in rows]


def _qwen_by_hand(model, pixel_values, grid):
    """Attention received and keys of the last block in tower order, in plain loops."""
    tower, seen = model.model.visual, {}
    block = tower.blocks[-1]
    hook = block.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(kwargs, x=args[0]), with_kwargs=True
    )
    with torch.no_grad():
        tower(pixel_values, grid_thw=grid)
        hook.remove()
        q, k, _ = block.attn.qkv(block.norm1(seen["x"])).unflatten(-1, (3, 4, 8)).unbind(1)
        q, k = apply_rotary_pos_emb_vision(q, k, *seen["position_embeddings"])
    frames = [int(h * w) for t, h, w in grid for _ in range(t)]
    assert seen["cu_seqlens"].diff().tolist() == frames
    attn, start = torch.zeros(len(q), 1), 0
    for size in frames:
        part = slice(start, start + size)
        for head in range(4):
            weights = (q[part, head] @ k[part, head].T * 8**-0.5).softmax(-1)
            attn[part, 0] += weights.mean(0) / 4
        start += size
    return attn, k.mean(1)
