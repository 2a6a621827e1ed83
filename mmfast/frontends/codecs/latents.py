"""Codecs without codes: a frame is a vector of numbers that a talker's flow or diffusion makes.

VibeVoice's acoustic tokenizer (arXiv 2508.19205), 24 kHz, 7.5 frames/s of 64 numbers: causal
ConvNeXt blocks. Encoding gives the mean; the noise that VibeVoice adds to a voice prompt is left to
it. Pocket TTS' tokenizer (arXiv 2509.06926), 24 kHz, 12.5 frames/s of 32 numbers: Mimi without its
quantiser. Both stream exactly and without delay. The stock decoder of Pocket TTS keeps no state of
its convolutions.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.frontends.codecs.base import StackCodec
from mmfast.frontends.codecs.checkpoints import mimi_decoder, mimi_encoder
from mmfast.frontends.codecs.layers import CodecLayer
from mmfast.frontends.codecs.stages import walk


def vibevoice_codec(model: Any, codebooks: int | None = None) -> StackCodec:
    """Return a codec over a `VibeVoiceAcousticTokenizerModel`; frames are latents."""
    config = model.config
    width = int(config.hidden_size)
    _all_latents(codebooks, width, "VibeVoice's tokenizer")
    if config.channels != 1:
        raise ModelError(f"this tokenizer has {config.channels} channels; choose a mono one")
    return StackCodec(
        "vibevoice_acoustic_tokenizer",
        int(getattr(config, "sampling_rate", 24_000)),
        math.prod(config.downsampling_ratios),
        width,
        0,
        encode=_blocks(model.encoder, "conv"),
        quantise=lambda x: x,
        lookup=lambda latents: latents.to(next(model.parameters()).dtype),
        decode=_blocks(model.decoder, "convtr"),
        like=next(model.parameters()),
        width=width,
        whole=True,
    )


def _blocks(half: Any, change: str) -> CodecLayer:
    """Stages of blocks, each behind a convolution that changes the rate."""
    layers = [half.stem.conv, *half.stem.stage]
    for layer in half.conv_layers:
        layers += [getattr(layer, change), *layer.stage]
    return walk([*layers, half.head])


def pocket_codec(model: Any, codebooks: int | None = None) -> StackCodec:
    """Return a codec over a `PocketTTSAudioTokenizerModel`, either half of which may be missing."""
    config, project = model.config, model.latent_proj
    _all_latents(codebooks, int(config.latent_dim), "Pocket TTS' tokenizer")

    def lookup(latents: Tensor) -> Tensor:
        found: Tensor = project(latents.to(project.weight.dtype))
        return found

    return StackCodec(
        "pocket_tts_audio_tokenizer",
        int(config.sampling_rate),
        int(config.frame_size),
        int(config.latent_dim),
        0,
        encode=mimi_encoder(model.encoder),
        quantise=lambda x: x,
        lookup=lookup,
        decode=mimi_decoder(model.decoder),
        like=next(model.parameters()),
        width=int(config.hidden_size),
        whole=True,
    )


def _all_latents(wanted: int | None, width: int, name: str) -> None:
    if wanted not in (None, width):
        raise ModelError(f"codebooks={wanted} is out of range; {name} has {width} latents a frame")
