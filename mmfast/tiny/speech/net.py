"""The backbone while it is trained: the weights of a `LlamaForCausalLM` in fewer, larger matrices.

Queries, keys and values are one product and so are gate and up, RoPE is applied to both at once,
and logits are made where something is owed, of the rows that can be owed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD = 32  # width of an attention head
THETA = 10000.0
EPS = 1e-5


@dataclass(frozen=True)
class BackboneShape:
    """Size of the backbone."""

    rows: int
    width: int = 160
    layers: int = 14
    inner: int = 448


class DecoderLayer(nn.Module):
    """A decoder layer."""

    def __init__(self, shape: BackboneShape) -> None:
        super().__init__()
        width = shape.width
        self.qkv = nn.Parameter(torch.randn(3, width, width) / width**0.5)
        self.out = nn.Parameter(torch.zeros(width, width))
        self.gate_up = nn.Parameter(torch.randn(2, shape.inner, width) / width**0.5)
        self.down = nn.Parameter(torch.zeros(width, shape.inner))
        self.before = nn.Parameter(torch.ones(width))
        self.behind = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """States `[B, L, D]` to states."""
        batch, length, width = x.shape
        seen = F.rms_norm(x, (width,), self.before, EPS)
        qkv = F.linear(seen, self.qkv.flatten(0, 1)).view(batch, length, 3, -1, HEAD)
        qk = qkv[:, :, :2].permute(2, 0, 3, 1, 4)  # [2, B, H, L, 32]
        low, high = qk.chunk(2, -1)
        q, k = qk * cos + torch.cat([-high, low], -1) * sin
        value = qkv[:, :, 2].transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, value, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(batch, length, width), self.out)
        seen = F.rms_norm(x, (width,), self.behind, EPS)
        gate, up = F.linear(seen, self.gate_up.flatten(0, 1)).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Net(nn.Module):
    """Embeddings, layers, norm and output rows."""

    def __init__(self, shape: BackboneShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.randn(shape.rows, shape.width) * 0.5)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        self.head = nn.Parameter(torch.randn(shape.rows, shape.width) * 0.02)

    def forward(self, x: Tensor, middle: int = 0) -> tuple[Tensor, Tensor]:
        """Embeddings `[B, L, D]` to normed last states, and those behind layer `middle`."""
        cos, sin = rotations(x.shape[1], x.device)
        kept = x
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin)
            if i == middle:
                kept = x
        return F.rms_norm(x, (x.shape[-1],), self.norm, EPS), kept


def rotations(length: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE `[L, 32]`."""
    speeds = THETA ** -(torch.arange(0, HEAD, 2, device=device) / HEAD)
    turned = torch.arange(length, device=device)[:, None] * speeds
    both = torch.cat([turned, turned], -1)
    return both.cos(), both.sin()


NAMES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "before": ("input_layernorm",),
    "behind": ("post_attention_layernorm",),
}


def to_llama(net: Net) -> dict[str, Tensor]:
    """The weights under the names that `LlamaForCausalLM` gives them."""
    found = {
        "model.embed_tokens.weight": net.embed,
        "model.norm.weight": net.norm,
        "lm_head.weight": net.head,
    }
    for i, layer in enumerate(net.layers):
        for mine, theirs in NAMES.items():
            value = getattr(layer, mine)
            parts = value.unbind(0) if len(theirs) > 1 else (value,)
            for name, part in zip(theirs, parts, strict=True):
                found[f"model.layers.{i}.{name}.weight"] = part
    return {name: value.detach().clone() for name, value in found.items()}


def from_llama(weights: dict[str, Tensor], shape: BackboneShape) -> Net:
    """The other way round."""
    net = Net(shape)
    state = {
        "embed": weights["model.embed_tokens.weight"],
        "norm": weights["model.norm.weight"],
        "head": weights["lm_head.weight"],
    }
    for i in range(shape.layers):
        for mine, theirs in NAMES.items():
            parts = [weights[f"model.layers.{i}.{name}.weight"] for name in theirs]
            state[f"layers.{i}.{mine}"] = torch.stack(parts) if len(parts) > 1 else parts[0]
    net.load_state_dict({name: value.float() for name, value in state.items()})
    return net


def llama_config(shape: BackboneShape, pad: int, end: int, longest: int = 4096) -> Any:
    """The configuration of the stock class."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.rows,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.width // HEAD,
        num_key_value_heads=shape.width // HEAD,
        max_position_embeddings=longest,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=pad,
        eos_token_id=end,
    )
