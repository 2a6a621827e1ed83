"""Tiny random Moshi, CSM and Llama, and depth heads, whose answers vary from prompt to prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmfast.decoding.codebooks import CodeChoice
from mmfast.decoding.sampling import Sampling
from mmfast.heads.depth import DepthCore, DepthShape

MIMI: dict[str, Any] = {
    "model_type": "mimi",
    "sampling_rate": 24000,
    "hidden_size": 32,
    "num_filters": 4,
    "num_residual_layers": 1,
    "upsampling_ratios": [8, 6, 5, 4],
    "codebook_size": 64,
    "codebook_dim": 16,
    "vector_quantization_hidden_dimension": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_quantizers": 8,
    "num_semantic_quantizers": 1,
    "sliding_window": 50,
    "upsample_groups": 32,
}
KINDS: dict[str, dict[str, Any]] = {
    "moshi": {"per_step": True},
    "csm": {
        "per_step": False,
        "prepend": True,
        "final_norm": True,
        "theta": 10000.0,
        "kv_heads": 2,
    },
}


def spread(model: nn.Module, skip: str = "-", std: float = 1.5) -> Any:
    """Random weights large enough that greedy answers differ between prompts."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and skip not in name:
                weight.normal_(std=std * weight.shape[-1] ** -0.5)
    return model.eval()


def depth_core(kind: str, codes: int = 8, size: int = 32, seed: int = 0, **sizes: int) -> DepthCore:
    """A depth transformer of Moshi's or of CSM's kind."""
    torch.manual_seed(seed)
    wide = {"hidden": 24, "first": 40, "dim": 32, "layers": 2, "heads": 4, "ffn": 48} | sizes
    core = DepthCore(DepthShape(codes=codes, size=size, **wide, **KINDS[kind]))
    nn.init.normal_(core.embed.weight)
    return core.eval()


def choices(sampled: bool) -> dict[str, CodeChoice]:
    """How Moshi's steps choose text and codes: the likeliest, or drawn from a seed."""
    if not sampled:
        return {}
    return {
        "text": CodeChoice(Sampling(temperature=0.9, top_k=10)),
        "audio": CodeChoice(Sampling(temperature=0.8, top_k=20, seed=3)),
    }


def moshi(window: int = 20, **config: Any) -> Any:
    """A Moshi of 4 codebooks of 64 and 50 words."""
    from transformers import MoshiConfig, MoshiForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    depth = sizes | {"hidden_size": 24, "ffn_dim": 48}
    model = MoshiForConditionalGeneration(
        MoshiConfig(
            **sizes,
            vocab_size=50,
            num_codebooks=4,
            audio_vocab_size=64,
            sliding_window=window,
            max_position_embeddings=window,
            audio_encoder_config=MIMI,
            depth_decoder_config=depth,
            **config,
        )
    )
    spread(model, skip="audio_encoder")
    for table in model.embed_tokens:
        nn.init.normal_(table.weight, std=0.5)
    return model


def csm(books: int = 8) -> Any:
    """A CSM of 8 codebooks of 64 (and 3 more rows) and 100 words."""
    from transformers import CsmConfig, CsmForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    books_of = {"num_codebooks": books, "vocab_size": 67}
    depth = {"backbone_hidden_size": 32, "hidden_size": 24, "intermediate_size": 48}
    model = CsmForConditionalGeneration(
        CsmConfig(
            **sizes,
            **books_of,
            text_vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            codebook_pad_token_id=66,
            audio_token_id=98,
            audio_eos_token_id=99,
            bos_token_id=1,
            pad_token_id=98,
            codec_config=MIMI,
            depth_decoder_config=depth | sizes | books_of,
        )
    )
    spread(model, skip="codec_model")
    nn.init.normal_(model.depth_decoder.codebooks_head.weight)
    nn.init.normal_(model.backbone_model.embed_tokens.embed_audio_tokens.weight, std=0.3)
    return model


def llama() -> Any:
    """A Llama of 40 words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return spread(LlamaForCausalLM(config))


def prompts(count: int, seed: int = 0, words: int = 40) -> list[Tensor]:
    """Random prompts of 2 to 6 words."""
    source = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7, (count,), generator=source).tolist()
    return [torch.randint(words, (n,), generator=source) for n in lengths]
