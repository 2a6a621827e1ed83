"""DAC, the Descript codec: convolutions that see both ways, snake activations, residual codes.

Nothing in it is recurrent, and its padding is zeros: streaming is exact, late by what the layers
see of the future. With less look-ahead each frame comes from a window that ends sooner, and is off
by an error that `deviation` measures.
Paper: arXiv 2306.06546.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.frontends.codecs.base import StackCodec, pick_books
from mmfast.frontends.codecs.layers import Chain, Layer
from mmfast.frontends.codecs.walk import walk
from mmfast.frontends.codecs.windowed import Windowed, at_once


def dac_codec(model: Any, codebooks: int | None = None, lookahead: int | None = None) -> StackCodec:
    """A codec over a `DacModel`.

    Args:
        model: On its device, in evaluation mode.
        codebooks: How many to encode to; None: all.
        lookahead: Frames of future each frame may see; None: all that the layers see (exact).

    Raises:
        ModelError: More codebooks than it has, or a negative look-ahead.
    """
    config = model.config
    books = pick_books(codebooks, 1, config.n_codebooks, "DAC")
    if lookahead is not None and lookahead < 0:
        raise ModelError(f"lookahead={lookahead} is negative; give 0 or more frames, None = exact")
    hop, like = config.hop_length, next(model.parameters())
    encode, decode = _encoder(model.encoder), _decoder(model.decoder)
    layers: list[Layer] = [encode, decode]
    if lookahead is not None:
        window = (_span(encode, hop), lookahead, like)
        wide = (_span(decode, 1, hop), lookahead, like)
        layers = [
            Windowed(at_once(encode), 1, hop, 1, *window),
            Windowed(at_once(decode), config.hidden_size, 1, hop, *wide),
        ]

    def quantise(x: Tensor) -> Tensor:
        codes: Tensor = model.quantizer(x, books)[1]
        return codes

    def lookup(codes: Tensor) -> Tensor:
        latents: Tensor = model.quantizer.from_codes(codes)[0]
        return latents

    return StackCodec(
        "dac",
        config.sampling_rate,
        hop,
        books,
        config.codebook_size,
        encode=layers[0],
        quantise=quantise,
        lookup=lookup,
        decode=layers[1],
        like=like,
        width=config.hidden_size,
        whole=True,
    )


def _encoder(half: Any) -> Chain:
    return walk([half.conv1, *half.block, half.snake1, half.conv2])


def _decoder(half: Any) -> Chain:
    return walk([half.conv1, *half.block, half.snake1, half.conv2, half.tanh])


def _span(layers: Chain, unit: int, yields: int = 1) -> int:
    """Frames that the layers see of the past: as many as of the future, for they are symmetric."""
    late = 256 * yields - layers.count(256 * unit)
    return -(-late // yields) + 1
