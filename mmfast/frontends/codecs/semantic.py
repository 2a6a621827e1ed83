"""Codecs whose encoder hears words as well as sound: X-Codec, Higgs Audio's and X-Codec 2.

A speech model (HuBERT or wav2vec 2.0 BERT) looks at all of a recording, so `encode` needs the whole
of it; in pieces nothing comes before the end. X-Codec (arXiv 2408.17175) and the tokenizer of Higgs
Audio v2 decode with DAC's convolutions: that streams exactly, late by their look-ahead. X-Codec 2
(arXiv 2502.04128) decodes with a transformer that sees everything, so it needs all codes, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from mmfast.frontends.codecs.base import StackCodec, StreamCodec, check_codes, check_pcm, pick_books
from mmfast.frontends.codecs.stages import WholeStage, walk


def xcodec_codec(model: Any, codebooks: int | None = None, name: str = "xcodec") -> StreamCodec:
    """Return a codec over an `XcodecModel` or a `HiggsAudioV2TokenizerModel`."""
    config, decoder = model.config, model.acoustic_decoder
    books = pick_books(codebooks, 1, int(config.num_quantizers), name)
    hop, like = int(config.hop_length), next(model.parameters())

    def encode(pcm: Tensor) -> Tensor:
        whole = functional.pad(pcm, (0, -pcm.shape[-1] % hop))[:, None].to(like.dtype)
        codes: Tensor = model.encode(whole, return_dict=False)
        return codes[:, :books].long()

    def lookup(codes: Tensor) -> Tensor:
        latents = model.quantizer.decode(codes.transpose(0, 1))
        found: Tensor = model.fc2(latents.transpose(1, 2)).transpose(1, 2)
        return found

    layers = [decoder.conv1, *decoder.block, decoder.snake1, decoder.conv2, decoder.tanh]
    return StackCodec(
        name,
        int(config.sample_rate),
        hop,
        books,
        int(config.codebook_size),
        encode=None,
        quantise=lambda x: x,
        lookup=lookup,
        decode=walk(layers),
        like=like,
        width=int(config.acoustic_model_config.hidden_size),
        encoder=WholeStage(encode, check_pcm, -1, (books,), like.device),
    )


higgs_codec = partial(xcodec_codec, name="higgs_audio_v2_tokenizer")


def xcodec2_codec(
    model: Any, codebooks: int | None = None, features: Callable[..., Any] | None = None
) -> StreamCodec:
    """Return a codec over an `Xcodec2Model`; `features` is its feature extractor, to encode.

    Like that one it hears a sample of silence at the end: whole frames give one more.
    """
    config, like = model.config, next(model.parameters())
    pick_books(codebooks, 1, 1, "X-Codec 2")
    size = math.prod(config.quantization_levels)
    rate, hop = int(config.sampling_rate), int(config.hop_length)

    def encode(pcm: Tensor) -> Tensor:
        assert features is not None
        heard = features(
            [row.cpu().numpy() for row in pcm], sampling_rate=config.sampling_rate,
            return_tensors="pt",
        )  # fmt: skip
        codes: Tensor = model.encode(
            heard["input_values"].to(like),
            heard["input_features"].to(like),
            input_features_mask=heard["input_features_mask"].to(like.device),
        ).audio_codes
        return codes.long()

    def decode(codes: Tensor) -> Tensor:
        found: Tensor = model.decode(codes).audio_values
        return found.reshape(len(codes), -1).float()

    ear = WholeStage(encode, check_pcm, -1, (1,), like.device)
    mouth = WholeStage(decode, lambda x, b: check_codes(x, 1, size, b), 0.0, (), like.device)
    return StreamCodec("xcodec2", rate, hop, 1, size, ear if features else None, mouth)
