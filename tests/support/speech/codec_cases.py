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
