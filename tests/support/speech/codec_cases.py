"""Tiny random codecs of the transformers classes, loud enough that an error shows."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

CHUNKS = (1, 2, 3, 7)  # frames


def _loud(model: Any, seed: int, gain: float = 1.2) -> Any:
    """Weights large enough that every layer matters, and codebooks that are not all zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("embed", "embed_sum", "codebook.weight")):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
            elif name.endswith("bias"):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
            elif name.endswith("layer_scale.scale"):
                weight.fill_(0.5)
            elif name.endswith("alpha"):
                weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
            elif weight.dim() == 3 and "embed" not in name:
                fan = weight[0].numel()
                weight.copy_(torch.randn(weight.shape, generator=generator) / fan**0.5 * gain)
    return model.eval()


@cache
def mimi(**changes: Any) -> Any:
    """16 samples in a frame; a window of 12 positions, two of them in a frame."""
    from transformers import MimiConfig, MimiModel

    options = {
        "sampling_rate": 400, "frame_rate": 25.0, "hidden_size": 16, "num_filters": 4,
        "upsampling_ratios": [4, 2], "codebook_size": 32, "codebook_dim": 8, "num_quantizers": 4,
        "vector_quantization_hidden_dimension": 8, "upsample_groups": 16, "num_hidden_layers": 2,
        "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
        "sliding_window": 12,
    }  # fmt: skip
    torch.manual_seed(0)
    return _loud(MimiModel(MimiConfig(**{**options, **changes})), 1)


@cache
def encodec(**changes: Any) -> Any:
    """8 samples in a frame."""
    from transformers import EncodecConfig, EncodecModel

    options = {
        "sampling_rate": 800, "hidden_size": 16, "num_filters": 4, "upsampling_ratios": (4, 2),
        "codebook_size": 32, "target_bandwidths": (1.0, 2.0),
    }  # fmt: skip
    torch.manual_seed(0)
    return _loud(EncodecModel(EncodecConfig(**{**options, **changes})), 2)


@cache
def dac(**changes: Any) -> Any:
    """8 samples in a frame."""
    from transformers import DacConfig, DacModel

    options = {
        "encoder_hidden_size": 4, "downsampling_ratios": (2, 4), "decoder_hidden_size": 32,
        "n_codebooks": 3, "codebook_size": 32, "codebook_dim": 4, "sampling_rate": 800,
    }  # fmt: skip
    torch.manual_seed(0)
    return _loud(DacModel(DacConfig(**{**options, **changes})), 3, 0.6)


SEMANTIC = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "conv_dim": (8, 8, 8), "conv_kernel": (4, 3, 3), "conv_stride": (2, 2, 2),
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
ACOUSTIC = {
    "encoder_hidden_size": 4, "decoder_hidden_size": 32, "hidden_size": 8, "n_codebooks": 2,
    "codebook_size": 32, "codebook_dim": 4,
}  # fmt: skip


def _keen(model: Any) -> Any:
    """Latents as large as the codebooks' entries, so that sounds differ in codes."""
    with torch.no_grad():
        model.fc.weight.mul_(30)
    return model


@cache
def xcodec(**changes: Any) -> Any:
    """8 samples in a frame; HuBERT hears as many frames."""
    from transformers import XcodecConfig, XcodecModel

    ratios = {"downsampling_ratios": (2, 4), "upsampling_ratios": (4, 2)}
    options = {
        "acoustic_model_config": {"model_type": "dac", **ACOUSTIC, **ratios},
        "semantic_model_config": {"model_type": "hubert", **SEMANTIC}, "sample_rate": 800,
        "codebook_size": 32, "target_bandwidths": (0.5, 1.5),
    }  # fmt: skip
    torch.manual_seed(0)
    return _keen(_loud(XcodecModel(XcodecConfig(**{**options, **changes})), 4, 0.8))


@cache
def higgs_tokenizer(**changes: Any) -> Any:
    """480 samples in a frame, odd strides among them; two frames of speech are one of sound."""
    from transformers import HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel

    ratios = {"downsampling_ratios": (8, 5, 4, 3), "upsampling_ratios": (8, 5, 4, 3)}
    semantic = {**SEMANTIC, "conv_dim": (8,) * 5, "conv_kernel": (10, 4, 4, 3, 3)}
    semantic |= {"conv_stride": (5, 4, 4, 2, 1), "num_feat_extract_layers": 5}
    options = {
        "acoustic_model_config": {"model_type": "dac", **ACOUSTIC, **ratios},
        "semantic_model_config": {"model_type": "hubert", **semantic}, "codebook_size": 32,
        "codebook_dim": 8, "downsample_factor": 160, "target_bandwidths": (0.25, 0.75),
    }  # fmt: skip
    torch.manual_seed(0)
    config = HiggsAudioV2TokenizerConfig(**{**options, **changes})
    return _keen(_loud(HiggsAudioV2TokenizerModel(config), 5, 0.8))


@cache
def xcodec2() -> Any:
    """320 samples in a frame, four levels in each of three dimensions."""
    from transformers import Xcodec2Config, Xcodec2Model

    config = Xcodec2Config(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, encoder_hidden_size=4, quantization_dim=48,
        quantization_levels=(4, 4, 4),
        semantic_model_config={
            "model_type": "wav2vec2-bert", "hidden_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "intermediate_size": 32, "feature_projection_input_dim": 160,
            "conv_depthwise_kernel_size": 3,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    model = Xcodec2Model(config)
    filters = {name: value.clone() for name, value in model.named_buffers()}
    _loud(model, 8)
    with torch.no_grad():
        for name, value in model.named_buffers():  # they are made anew when it is loaded
            value.copy_(filters[name])
        for layer in (model.fc_encoder, model.quantizer.project_in, model.quantizer.project_out):
            layer.weight.mul_(20)
    return model


@cache
def vibevoice_tokenizer() -> Any:
    """8 samples in a frame, four latents."""
    from transformers import VibeVoiceAcousticTokenizerConfig, VibeVoiceAcousticTokenizerModel

    config = VibeVoiceAcousticTokenizerConfig(
        hidden_size=4, kernel_size=5, num_filters=4, downsampling_ratios=[2, 4], depths=[1, 2, 1],
        ffn_expansion=2, layer_scale_init_value=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    return _loud(VibeVoiceAcousticTokenizerModel(config), 6)


@cache
def pocket_tokenizer() -> Any:
    """16 samples in a frame, four latents."""
    from transformers import PocketTTSAudioTokenizerConfig, PocketTTSAudioTokenizerModel

    config = PocketTTSAudioTokenizerConfig(
        sampling_rate=1600, hidden_size=16, num_filters=4, upsampling_ratios=[4, 2],
        upsample_groups=16, num_hidden_layers=2, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=12, latent_stride=2, latent_dim=4,
    )  # fmt: skip
    torch.manual_seed(0)
    return _loud(PocketTTSAudioTokenizerModel(config), 7)


def parametrised(model: Any) -> int:
    """How many of its convolutions carry weight normalisation."""
    kinds = (nn.Conv1d, nn.ConvTranspose1d)
    return sum(isinstance(m, kinds) and hasattr(m, "parametrizations") for m in model.modules())


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Sound."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def some_codes(codec: Any, batch: int, frames: int, seed: int = 0) -> Tensor:
    """Codes `[B, Q, T]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(codec.size, (batch, codec.codebooks, frames), generator=generator)


def in_pieces(stage: Any, x: Tensor, sizes: list[int] | int) -> Tensor:
    """A stream in pieces along time; the sizes given are used in turn."""
    sizes = [sizes] if isinstance(sizes, int) else sizes
    state, outs, at, i = stage.start(x.shape[0]), [], 0, 0
    while at < x.shape[-1]:
        n = sizes[i % len(sizes)]
        state, out = stage.step(state, x[..., at : at + n])
        outs.append(out)
        at, i = at + n, i + 1
    return torch.cat([*outs, stage.finish(state)], -1)


def deviation(exact: Tensor, other: Tensor) -> tuple[float, float]:
    """Largest difference of two sounds, and the ratio of error to signal in decibels."""
    error = other.double() - exact.double()
    power = float(exact.double().pow(2).mean().clamp(min=1e-30))
    noise = float(error.pow(2).mean().clamp(min=1e-30))
    return float(error.abs().max()), 10 * math.log10(noise / power)
