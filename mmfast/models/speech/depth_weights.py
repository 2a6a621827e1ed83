"""The depth transformers of Moshi and CSM as `heads.depth_core`, on their own weights.

The stock classes run one codebook per call of a nested `generate`; the same weights (shared, not
copied) in one lean module run any stretch of codebooks in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.heads.depth import DepthCore, DepthLayer, DepthShape


def moshi_depth(depth: Any) -> DepthCore:
    """`MoshiDepthDecoder` (arXiv 2410.00037): the hidden state is added at every codebook."""
    config = depth.config
    core = _empty(
        config,
        hidden=config.input_size,
        codes=config.num_codebooks,
        size=config.audio_vocab_size,
        first=config.vocab_size + 1,
        ffn=config.ffn_dim // 2,
    )
    _share(core.project, depth.input_projections.weight)
    _share(core.heads, depth.lm_heads.weight)
    del core.embed  # every place has a table of its own
    tables = [depth.text_embed_tokens.weight, *(e.weight for e in depth.embed_tokens)]
    core.tables = [table.detach() for table in tables]
    for mine, theirs in _pairs(core, depth.layers):
        _attention(mine, theirs, lambda part: getattr(part, "linear", part).weight)
        wide = theirs.mlp.fc1.weight
        half = wide.shape[-2] // 2
        _share(mine.gate, wide[..., :half, :])
        _share(mine.up, wide[..., half:, :])
        _share(mine.down, theirs.mlp.fc2.weight)
    return core.to(wide.device)


def csm_depth(depth: Any) -> DepthCore:
    """`CsmDepthDecoderForCausalLM`: the hidden state is a place in front of the first code."""
    config = depth.config
    model = depth.model
    core = _empty(
        config,
        hidden=config.backbone_hidden_size,
        codes=config.num_codebooks - 1,
        size=config.vocab_size,
        first=config.vocab_size,
        ffn=config.intermediate_size,
        per_step=False,
        prepend=True,
        final_norm=True,
    )
    _share(core.project, model.inputs_embeds_projector.weight)
    core.embed_in = core.project
    _share(core.heads, depth.codebooks_head.weight.transpose(1, 2))
    _share(core.embed, model.embed_tokens.weight)  # rows of all codebooks, one after the other
    _share(core.norm, model.norm.weight)
    for mine, theirs in _pairs(core, model.layers):
        _attention(mine, theirs, lambda part: part.weight)
        _share(mine.gate, theirs.mlp.gate_proj.weight)
        _share(mine.up, theirs.mlp.up_proj.weight)
        _share(mine.down, theirs.mlp.down_proj.weight)
    core = core.to(model.norm.weight.device)
    places = torch.arange(core.shape.places, device=core.causal.device)[None]
    cos, sin = model.rotary_emb(model.norm.weight, places)  # with whatever scaling it has
    core.cos, core.sin = cos[0], sin[0]
    return core


def _empty(config: Any, **own: Any) -> DepthCore:
    shape = DepthShape(
        dim=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        **own,
    )
    with torch.device("meta"):
        core = DepthCore(shape)
    core.set_places(config.head_dim)
    return core.eval()


def _pairs(core: DepthCore, layers: Any) -> Iterator[tuple[DepthLayer, Any]]:
    for mine, theirs in zip(core.layers, layers, strict=True):
        assert isinstance(mine, DepthLayer)
        yield mine, theirs


def _attention(mine: DepthLayer, theirs: Any, weight: Callable[[Any], Tensor]) -> None:
    _share(mine.norm_in, theirs.input_layernorm.weight)
    _share(mine.norm_out, theirs.post_attention_layernorm.weight)
    attention = theirs.self_attn
    for part, name in ((mine.q, "q"), (mine.k, "k"), (mine.v, "v"), (mine.o, "o")):
        _share(part, weight(getattr(attention, f"{name}_proj")))


def _share(module: nn.Module | None, weight: Tensor) -> None:
    assert module is not None
    del module.weight
    module.weight = weight.detach()  # a view of the stock weight, not a parameter of its own
