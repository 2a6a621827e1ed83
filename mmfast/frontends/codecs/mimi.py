"""Mimi: SEANet, a sliding-window transformer, a semantic and some acoustic codebooks.

24 kHz, 12.5 frames/s. All of it is causal, so streaming is exact and late by nothing. The stock
`decode` has no state for its upsampling and its convolutions, and is wrong in pieces.
Paper: arXiv 2410.00037.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmfast.frontends.codecs.attention import Transformer
from mmfast.frontends.codecs.base import StackCodec, pick_books
from mmfast.frontends.codecs.layers import Chain, Layer
from mmfast.frontends.codecs.walk import stream, walk


def mimi_codec(model: Any, codebooks: int | None = None) -> StackCodec:
    """A codec over a `MimiModel`, whose weights and quantisers it uses as they are.

    Args:
        model: On its device, in evaluation mode; one half may have been left out.
        codebooks: How many to encode to (Moshi: 8); None: all.

    Raises:
        ModelError: More or fewer codebooks than it has, or a layer that cannot stream.
    """
    config = model.config
    least = config.num_semantic_quantizers
    books = pick_books(codebooks, least, config.num_quantizers, "Mimi")

    def quantise(x: Tensor) -> Tensor:
        codes: Tensor = model.quantizer.encode(x, books)  # [Q, B, t]
        return codes.transpose(0, 1)

    return StackCodec(
        "mimi",
        config.sampling_rate,
        round(config.sampling_rate / config.frame_rate),
        books,
        config.codebook_size,
        encode=_encoder(model.encoder),
        quantise=quantise,
        lookup=model.quantizer.decode,
        decode=_decoder(model.decoder),
        like=next(model.parameters()),
        width=config.hidden_size,
    )


def _encoder(half: Any) -> Layer | None:
    if half is None:
        return None
    down = [] if half.downsample is None else [stream(half.downsample)]
    return Chain([walk(half.encoder_seanet.layers), Transformer(half.encoder_transformer), *down])


def _decoder(half: Any) -> Layer | None:
    if half is None:
        return None
    up = [] if half.upsample is None else [stream(half.upsample)]
    return Chain([*up, Transformer(half.decoder_transformer), walk(half.decoder_seanet.layers)])
