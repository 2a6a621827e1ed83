"""A tiny random Qwen2.5-Omni with everything that speaks."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

VOCAB, EOS = 60, 9
AUDIO, IMAGE, VIDEO = 40, 41, 42
CODES, CODE_EOS, CODE_PAD, CODE_BOS, CODE_MASK = 32, 34, 33, 35, 36


def _thinker() -> dict[str, Any]:
    text = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_window_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS,
    }  # fmt: skip
    audio = {
        "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "d_model": 16,
        "encoder_ffn_dim": 16, "output_dim": 16, "n_window": 4, "max_source_positions": 64,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": 16, "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [0],
    }  # fmt: skip
    return {
        "text_config": text, "audio_config": audio, "vision_config": vision,
        "audio_token_index": AUDIO, "image_token_index": IMAGE, "video_token_index": VIDEO,
        "audio_start_token_id": 43, "audio_end_token_id": 44, "vision_start_token_id": 45,
        "vision_end_token_id": 46,
    }  # fmt: skip


def _talker() -> dict[str, Any]:
    return {
        "vocab_size": 40, "embedding_size": 16, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_window_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        "tts_text_start_token_id": 50, "tts_text_end_token_id": 51, "tts_text_pad_token_id": 52,
        "tts_codec_start_token_id": CODE_BOS, "tts_codec_end_token_id": CODE_EOS,
        "tts_codec_pad_token_id": CODE_PAD, "tts_codec_mask_token_id": CODE_MASK,
        "audio_token_index": AUDIO, "image_token_index": IMAGE, "video_token_index": VIDEO,
        "audio_start_token_id": 43, "audio_end_token_id": 44, "vision_start_token_id": 45,
        "vision_end_token_id": 46,
    }  # fmt: skip


def _token2wav(**flow: Any) -> dict[str, Any]:
    dit = {
        "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 8,
        "emb_dim": 8, "block_size": 4, "look_ahead_layers": [1], "look_backward_layers": [0, 3],
        "num_embeds": 40, "mel_dim": 16, "enc_emb_dim": 6, "enc_dim": 8,
        "enc_channels": [8, 8, 8, 8, 24], "enc_attention_channels": 4, "enc_se_channels": 4,
        "enc_res2net_scale": 2, **flow,
    }  # fmt: skip
    vocoder = {
        "mel_dim": 16, "upsample_initial_channel": 16, "resblock_kernel_sizes": [3, 5],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]], "upsample_rates": [3, 2],
        "upsample_kernel_sizes": [7, 4],
    }  # fmt: skip
    return {"dit_config": dit, "bigvgan_config": vocoder}


@cache
def omni(**flow: Any) -> Any:
    """Two codes in a block of four mel frames; six samples in a mel frame."""
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    config = Qwen2_5OmniConfig(
        thinker_config=_thinker(), talker_config=_talker(), token2wav_config=_token2wav(**flow)
    )
    torch.manual_seed(0)
    model = Qwen2_5OmniForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:  # loud enough that every layer matters
                fan = weight[0].numel()
                gain = 0.5 if "adaln" in name or "attn_norm" in name else 1.0
                weight.copy_(torch.randn(weight.shape, generator=generator) * gain / fan**0.5)
            elif name.endswith("bias"):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
        model.thinker.lm_head.weight.mul_(4)
        model.talker.codec_head.weight.mul_(4)
    model.speaker_map["Chelsie"] = {
        "bos_token": 53,
        "cond": torch.randn(1, 6, generator=generator),
        "ref_mel": torch.randn(1, 12, 16, generator=generator),
    }
    return model


def prompt(n: int = 7, seed: int = 0) -> dict[str, Any]:
    """A prompt of text alone."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 40, (1, n), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
