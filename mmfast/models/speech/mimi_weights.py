"""Mimi's weights as Kyutai's own package writes them, under the names of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from mmfast.core.errors import ModelError

_NAMES = (
    ("encoder.model.", "encoder.layers."),
    ("decoder.model.", "decoder.layers."),
    ("_transformer.transformer.", "_transformer."),
    ("downsample.conv.conv.conv.", "downsample.conv."),
    ("upsample.convtr.convtr.convtr.", "upsample.conv."),
    (".convtr.convtr.", ".conv."),
    (".conv.conv.", ".conv."),
    (".self_attn.out_projs.0.", ".self_attn.o_proj."),
    (".norm1.", ".input_layernorm."),
    (".norm2.", ".post_attention_layernorm."),
    (".linear1.", ".mlp.fc1."),
    (".linear2.", ".mlp.fc2."),
    (".layer_scale_1.", ".self_attn_layer_scale."),
    (".layer_scale_2.", ".mlp_layer_scale."),
    ("quantizer.rvq_first.", "quantizer.semantic_residual_vector_quantizer."),
    ("quantizer.rvq_rest.", "quantizer.acoustic_residual_vector_quantizer."),
    (".vq.layers.", ".layers."),
    ("._codebook.embedding_sum", ".codebook.embed_sum"),
    ("._codebook._initialized", ".codebook.initialized"),
    ("._codebook.", ".codebook."),
)
_FUSED = ".self_attn.in_projs.0.weight"


def kyutai_names(state: Mapping[str, Tensor], head: int) -> dict[str, Tensor]:
    """Rename weights; queries, keys and values part, and pairs in heads of `head` become halves."""
    found: dict[str, Tensor] = {}
    for name, weight in state.items():
        new = name
        for old, stock in _NAMES:
            new = new.replace(old, stock)
        if not new.endswith(_FUSED):
            found[new] = weight
            continue
        start = new.removesuffix(_FUSED)
        for part, rows in zip("qkv", weight.chunk(3), strict=True):
            turned = rows if part == "v" else halves(rows, head)
            found[f"{start}.self_attn.{part}_proj.weight"] = turned.contiguous()
    return found


def halves(weight: Tensor, each: int) -> Tensor:
    """Channels of heads of width `each`: from pairs side by side to a half and the other half."""
    heads = weight.view(-1, each // 2, 2, *weight.shape[1:])
    return heads.transpose(1, 2).reshape(weight.shape)


def load_mimi(file: Path, **changes: Any) -> Any:
    """Load a `MimiModel` from a file of Kyutai's names, else ModelError.

    `changes` are settings in which it differs from the published one.
    """
    from transformers import MimiConfig, MimiModel

    config = MimiConfig(**changes)
    state = kyutai_names(load_file(file), config.head_dim)
    model, notes = MimiModel.from_pretrained(
        None, config=config, state_dict=state, output_loading_info=True
    )
    wrong = [*notes["missing_keys"], *notes["unexpected_keys"], *notes["mismatched_keys"]]
    if wrong:
        raise ModelError(f"{str(file)!r} does not fit Mimi: {', '.join(map(str, wrong[:3]))}")
    return model.eval()
