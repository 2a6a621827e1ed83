"""Tiny random causal language models of many stock classes, for draft heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from decode_models import SMALL, VOCABULARY

SIZES: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WINDOW = 5  # shorter than the prompts: a mask that ignored it would be seen
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
MIXED = {"sliding_window": WINDOW, "layer_types": ALTERNATING}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_SIGHT = {"depth": 1, "hidden_size": 16, "num_heads": 2}
_QWEN_SIGHT = {**_SIGHT, "out_hidden_size": 32, "intermediate_size": 16}


def _plain(name: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(hf, f"{name}Config")(**{**SIZES, **more})
        return getattr(hf, f"{name}ForCausalLM")(config)

    return make


def _gpt2() -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def _gpt_oss() -> Any:
    more = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, **MIXED}
    return hf.GptOssForCausalLM(hf.GptOssConfig(**{**SIZES, **more}))


def _gemma3() -> Any:
    config = hf.Gemma3TextConfig(**{**SIZES, "head_dim": 8, **MIXED})
    return hf.Gemma3ForCausalLM(config)


def _qwen2_vl() -> Any:
    text = {**SIZES, "rope_parameters": MROPE}
    sight = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}
    return hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(text_config=text, vision_config=sight, **_marks())
    )


def _qwen2_5_vl() -> Any:
    text = {**SIZES, "rope_parameters": MROPE}
    return hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(text_config=text, vision_config=_QWEN_SIGHT, **_marks())
    )


def _qwen3_vl() -> Any:
    text = {**SIZES, "head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
    sight = {**_QWEN_SIGHT, "deepstack_visual_indexes": [0]}
    return hf.Qwen3VLForConditionalGeneration(
        hf.Qwen3VLConfig(text_config=text, vision_config=sight, **_marks())
    )


def _omni() -> Any:
    kind = hf.models.qwen2_5_omni.configuration_qwen2_5_omni.Qwen2_5OmniThinkerConfig
    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2,
             "encoder_ffn_dim": 16, "output_dim": 32}  # fmt: skip
    text = {**SIZES, "rope_parameters": MROPE}
    marks = {**_marks(), "audio_token_id": VOCABULARY + 4}
    config = kind(text_config=text, vision_config=_QWEN_SIGHT, audio_config=audio, **marks)
    return hf.Qwen2_5OmniThinkerForConditionalGeneration(config)


def _marks() -> dict[str, int]:
    return {"image_token_id": VOCABULARY + 1, "video_token_id": VOCABULARY + 2,
            "vision_start_token_id": VOCABULARY + 3}  # fmt: skip


ZOO: dict[str, Callable[[], Any]] = {
    "llama": _plain("Llama"),
    "qwen2": _plain("Qwen2"),
    "qwen3": _plain("Qwen3", head_dim=8),
    "mistral": _plain("Mistral", sliding_window=WINDOW),
    "phi": _plain("Phi", num_key_value_heads=4),
    "phi3": _plain("Phi3", sliding_window=WINDOW),
    "olmo": _plain("Olmo"),
    "olmo2": _plain("Olmo2"),
    "gpt_neox": _plain("GPTNeoX"),
    "granite": _plain(
        "Granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.7
    ),
    "smollm3": _plain("SmolLM3", no_rope_layers=[1, 0, 1]),
    "cohere": _plain("Cohere", logit_scale=0.5),
    "gemma2": _plain("Gemma2", head_dim=8, final_logit_softcapping=4.0, **MIXED),
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "gpt2": _gpt2,
    "gptj": _plain("GPTJ", n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen2_5_omni": _omni,
}


def tiny_causal(name: str, seed: int = 0, scale: float = 3.0) -> Any:
    """A random model in float64, its weights large enough for its logits to differ.

    The experts of GPT-OSS multiply in float32 at most.
    """
    torch.manual_seed(seed)
    model = ZOO[name]().eval()
    model = model if name == "gpt_oss" else model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.requires_grad_(False)
