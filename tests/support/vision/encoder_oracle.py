"""Merging inside a ViT by plain loops, one image and one token at a time.

Attention, rotation, merging and the sums of a block are written out; of the model only its layers
of weights are used, row by row.
"""

from __future__ import annotations

from typing import Any

import torch
from merge_checks import _merge, _steps
from timm.layers import LayerScale
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import Tensor, nn

SMALL: dict[str, Any] = {
    "img_size": 64,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 4,
    "num_heads": 4,
    "num_classes": 7,
}
_EVA: dict[str, Any] = {**SMALL, "use_rot_pos_emb": True, "swiglu_mlp": True, "scale_mlp": True}
FAMILIES: dict[str, Any] = {
    "vit": lambda: VisionTransformer(**SMALL),
    "vit_avg": lambda: VisionTransformer(**SMALL, class_token=False, global_pool="avg"),
    "vit_qk_norm": lambda: VisionTransformer(**SMALL, qk_norm=True, global_pool="avgmax"),
    "vit_res_post": lambda: VisionTransformer(**SMALL, block_fn=ResPostBlock, init_values=0.7),
    "deit_distilled": lambda: VisionTransformerDistilled(**SMALL),
    "siglip": lambda: VisionTransformer(**SMALL, class_token=False, global_pool="map"),
    "dinov2_reg4": lambda: VisionTransformer(
        **SMALL, reg_tokens=4, no_embed_class=True, init_values=0.5, dynamic_img_size=True
    ),
    "eva": lambda: Eva(**SMALL, init_values=0.6, qkv_fused=True),
    "eva02": lambda: Eva(**_EVA, qkv_fused=False, scale_attn_inner=True),
    "eva_mixed": lambda: Eva(
        **_EVA, rope_type="mixed", num_reg_tokens=2, attn_type="rope", dynamic_img_size=True
    ),
    "dinov3": lambda: Eva(
        **SMALL,
        use_rot_pos_emb=True,
        rope_type="dinov3",
        rope_rotate_half=True,
        use_abs_pos_emb=False,
        num_reg_tokens=4,
        init_values=0.5,
        qkv_bias=False,
    ),
    "eva_post": lambda: Eva(**_EVA, use_post_norm=True, rope_rotate_half=True, global_pool="map"),
}


def build(name: str, seed: int = 0) -> Any:
    """A model whose attention is not flat, so that a wrong merge shows."""
    torch.manual_seed(seed)
    model = FAMILIES[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def images(count: int = 2, size: tuple[int, int] = (64, 64), seed: int = 0) -> Tensor:
    """Pictures with flat parts and edges, so that some patches are alike."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 4, 4, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=size, mode="nearest")
    return smooth + 0.3 * torch.randn(count, 3, *size, generator=generator)


def embedded(model: Any, pixels: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Input of the first block `[B, P + N, D]`, and the rotary table of each block."""
    found: list[Tensor] = []
    tables: list[Tensor | None] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        found.append(args[0])
        tables.append(kwargs.get("rope"))

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in model.blocks]
    model.forward_features(pixels)
    for hook in hooks:
        hook.remove()
    return found[0], tables


def part(owner: Any, *names: str) -> Any:
    """The first of these attributes that there is."""
    return next(getattr(owner, name) for name in names if hasattr(owner, name))


def heads_of(attn: Any) -> int:
    """Number of heads."""
    return int(part(attn, "num_heads", "num_attention_heads"))


def _project(attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[n, H, d]` of rows `[n, D]`."""
    if getattr(attn, "qkv", None) is None:
        q, k, v = attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)
    else:
        q, k, v = (x @ attn.qkv.weight.T).chunk(3, dim=-1)
        if attn.qkv.bias is not None:
            more = attn.qkv.bias.chunk(3)
            q, k, v = q + more[0], k + more[1], v + more[2]
        elif getattr(attn, "q_bias", None) is not None:
            q, v = q + attn.q_bias, v + attn.v_bias
    q, k, v = (rows.unflatten(-1, (heads_of(attn), -1)) for rows in (q, k, v))
    return (attn.q_norm(q), attn.k_norm(k), v) if hasattr(attn, "q_norm") else (q, k, v)


def _rotated(x: Tensor, row: Tensor, half: bool) -> Tensor:
    """Turn `[H, d]` by sines and cosines `[2 d]`, or `[H, 2 d]`."""
    sin, cos = row.chunk(2, -1)
    if half:
        first, second = x.chunk(2, -1)
        swapped = torch.cat([-second, first], -1)
    else:
        swapped = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + swapped * sin


def _scaled(block: Any, number: int, step: Tensor) -> Tensor:
    scale = getattr(block, f"ls{number}", None)
    if isinstance(scale, LayerScale):
        return step * scale.gamma
    if hasattr(block, f"layer_scale{number}"):
        return step * getattr(block, f"layer_scale{number}").lambda1
    gamma = getattr(block, f"gamma_{number}", getattr(block, f"lambda_{number}", None))
    return step if gamma is None else step * gamma


def _half(block: Any, number: int, x: Tensor, run: Any) -> Tensor:
    behind = "layernorm_before" if number == 1 else "layernorm_after"
    norm = part(block, f"norm{number}", f"layer_norm{number}", behind)
    if type(block).__name__ in ("ResPostBlock", "EvaBlockPostNorm"):
        return x + norm(run(x))
    return x + _scaled(block, number, run(norm(x)))


def _attention(block: Any, tokens: list[dict[str, Any]], rope: Tensor | None) -> Any:
    """A function of rows `[n, D]`; leaves the key of each token in it."""
    attn = part(block, "attn", "self_attn", "attention")

    def run(x: Tensor) -> Tensor:
        q, k, v = (rows.clone() for rows in _project(attn, x))
        for i, token in enumerate(tokens):
            if rope is not None and token["place"] is not None:
                row, half = rope[..., token["place"], :], attn.rotate_half
                q[i], k[i] = _rotated(q[i], row, half), _rotated(k[i], row, half)
            token["key"] = k[i].mean(0)
        sizes = torch.tensor([float(token["size"]) for token in tokens])
        out = []
        for h in range(heads_of(attn)):
            weights = sizes * (q[:, h] @ k[:, h].T * q.shape[-1] ** -0.5).exp()
            out.append(weights / weights.sum(1, keepdim=True) @ v[:, h])
        rows = torch.cat(out, -1)
        rows = attn.norm(rows) if hasattr(attn, "norm") else rows
        return part(attn, "proj", "out_proj", "projection_layer", "o_proj")(rows)

    return run


def _rows(tokens: list[dict[str, Any]]) -> Tensor:
    return torch.stack([token["x"] for token in tokens])


def _put(tokens: list[dict[str, Any]], rows: Tensor) -> None:
    for token, row in zip(tokens, rows, strict=True):
        token["x"] = row


def naive(model: Any, pixels: Tensor, left: int) -> tuple[list[Tensor], list[list[list[int]]]]:
    """Outputs of all blocks `[B, P + N, D]` at full length, and the patches of each token left."""
    start, tables = embedded(model, pixels)
    return naive_blocks(model.blocks, start, model.num_prefix_tokens, left, tables)


def naive_blocks(
    blocks: Any, start: Tensor, prefix: int, left: int, tables: list[Tensor | None] | None = None
) -> tuple[list[Tensor], list[list[list[int]]]]:
    """The same of blocks, from the input of the first one."""
    found, groups = [], []
    tables = [None] * len(blocks) if tables is None else tables
    for x in start:
        first = [{"x": row, "size": 1, "place": None} for row in x[:prefix]]
        tokens = [
            {"x": row, "size": 1, "place": p, "patches": [p], "share": {}}
            for p, row in enumerate(x[prefix:])
        ]
        outputs, steps = [], _steps(len(tokens), left, len(blocks))
        for block, rope, target in zip(blocks, tables, steps, strict=True):
            both = first + tokens
            _put(both, _half(block, 1, _rows(both), _attention(block, both, rope)))
            tokens = _merge(tokens, target) if target < len(tokens) else tokens
            both = first + tokens
            _put(both, _half(block, 2, _rows(both), block.mlp))
            full = x.clone()
            full[:prefix] = _rows(first) if first else full[:0]
            for token in tokens:
                full[[prefix + p for p in token["patches"]]] = token["x"]
            outputs.append(full)
        found.append(outputs)
        groups.append([sorted(token["patches"]) for token in tokens])
    return [torch.stack(each) for each in zip(*found, strict=True)], groups
