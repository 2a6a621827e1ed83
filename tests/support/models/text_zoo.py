"""Tiny random language models of text: dense, experts, windows, convolutions, recurrences."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor

WORDS = 96
WINDOW = 12  # shorter than the prompts: a mask that ignored it would be seen
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MIXED = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {
    "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
_DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


def _plain(name: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(hf, f"{name}Config")(**{**SIZES, **more})
        return hf.AutoModelForCausalLM.from_config(config)

    return make


def _gpt2() -> Any:
    sizes = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def _opt() -> Any:
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    more = {"ffn_dim": 48, "num_attention_heads": 4, "word_embed_proj_dim": 32}
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    return hf.OPTForCausalLM(hf.OPTConfig(**sizes, **more, **ends, max_position_embeddings=256))


def _older(name: str, **more: Any) -> Callable[[], Any]:
    sizes = {"vocab_size": WORDS, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return lambda: hf.AutoModelForCausalLM.from_config(
        getattr(hf, f"{name}Config")(**sizes, **ends, **more)
    )


DENSE: dict[str, Callable[[], Any]] = {
    "llama": _plain("Llama"),
    "qwen2": _plain("Qwen2"),
    "qwen3": _plain("Qwen3", head_dim=8),
    "mistral": _plain("Mistral", sliding_window=None),
    "gemma2": _plain("Gemma2", head_dim=8, final_logit_softcapping=4.0, **MIXED),
    "gemma3": _plain("Gemma3Text", head_dim=8, **MIXED),
    "phi": _plain("Phi", num_key_value_heads=4),
    "phi3": _plain("Phi3", sliding_window=None),
    "olmo2": _plain("Olmo2"),
    "gpt_neox": _plain("GPTNeoX"),
    "gpt_oss": _plain("GptOss", head_dim=8, num_local_experts=2, num_experts_per_tok=1, **MIXED),
    "smollm3": _plain("SmolLM3", no_rope_layers=[1, 0, 1, 1]),
    "granite": _plain("Granite", embedding_multiplier=3.0, residual_multiplier=0.7),
    "cohere2": _plain("Cohere2", logit_scale=0.5, **MIXED),
    "gpt2": _gpt2,
    "opt": _opt,
    "mixtral": _plain("Mixtral", num_local_experts=4, **FEW),
    "qwen3_moe": _plain("Qwen3Moe", head_dim=8, num_experts=4, **FEW),
}
WINDOWED = {"mistral_window": _plain("Mistral", sliding_window=WINDOW)}
# With layers of a convolution or a recurrence.
HYBRID: dict[str, Callable[[], Any]] = {
    "lfm2": _plain(
        "Lfm2", layer_types=["conv", "full_attention", "conv", "full_attention"], conv_L_cache=3
    ),
    "qwen3_next": _plain(
        "Qwen3Next",
        head_dim=8,
        num_experts=4,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        **FEW,
        **_DELTA,
    ),
    "jamba": _plain(
        "Jamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "falcon_h1": _plain("FalconH1", head_dim=8, mamba_d_ssm=64, **_MAMBA),
    "granite_hybrid": _plain(
        "GraniteMoeHybrid",
        num_local_experts=2,
        num_experts_per_tok=1,
        shared_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        **_MAMBA,
    ),
}
# Biases in place of positions, queries and keys in parts, recurrences alone.
ODD: dict[str, Callable[[], Any]] = {
    "bloom": _older("Bloom", hidden_size=32),
    "falcon_alibi": _older(
        "Falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
    ),
    "codegen": _older("CodeGen", n_embd=32, n_positions=256, rotary_dim=4),
    "mamba": _plain("Mamba", state_size=4),
}
SINGLE = {"gpt_oss", "mixtral", "qwen3_moe", *HYBRID, *ODD}  # their kernels take no float64
TEXTS = {**DENSE, **WINDOWED, **HYBRID}


@lru_cache
def text_model(name: str, scale: float = 3.0) -> Any:
    """A random model in float64 where it can be, its weights large enough for logits to differ."""
    torch.manual_seed(0)
    model = {**TEXTS, **ODD}[name]().eval()
    if name not in SINGLE:
        model = model.double()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1 and "conv1d" not in key and "A_log" not in key:
                parameter.mul_(1.0 if "embed" in key else scale)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.requires_grad_(False)


def prompt(length: int = 48, seed: int = 0) -> Tensor:
    """Ids of one prompt, `[1, length]`."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(3, WORDS, (1, length), generator=made)


def padded(prompts: list[Tensor]) -> dict[str, Tensor]:
    """Prompts as one batch, padded on the left."""
    longest = max(ids.shape[1] for ids in prompts)
    rows = [torch.nn.functional.pad(ids, (longest - ids.shape[1], 0)) for ids in prompts]
    ids = torch.cat(rows)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def written(model: Any, inputs: dict[str, Tensor], tokens: int = 6, **more: Any) -> Any:
    """Greedy tokens `[B, tokens]`, and their logits `[B, tokens, V]`."""
    out = model.generate(
        **inputs, max_new_tokens=tokens, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **more,
    )  # fmt: skip
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits, 1), out
