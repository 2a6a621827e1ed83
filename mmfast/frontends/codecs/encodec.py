"""EnCodec: SEANet with an LSTM and residual codebooks.

24 kHz, 75 frames/s: causal, but padded with the mirror image of its start, so the first sound
comes after 7 frames (93 ms) and nothing is late from then on. A non-causal one of the same layers
streams exactly, too, late by what it looks ahead. The 48 kHz model does not stream: it normalises
each second as a whole and keeps a loudness beside the codes.
Paper: arXiv 2210.13438.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.frontends.codecs.base import StackCodec, pick_books
from mmfast.frontends.codecs.walk import walk


def encodec_codec(model: Any, codebooks: int | None = None) -> StackCodec:
    """A codec over an `EncodecModel`.

    Args:
        model: On its device, in evaluation mode.
        codebooks: How many to encode to (a bandwidth of 6 kbit/s: 8); None: all.

    Raises:
        ModelError: More codebooks than it has, or a variant that cannot stream.
    """
    config = model.config
    _check_variant(config)
    quantiser = model.quantizer
    books = pick_books(codebooks, 1, config.num_quantizers, "EnCodec")
    # half a codebook more than needed: the quantiser rounds down
    bandwidth = (books + 0.5) * math.log2(config.codebook_size) * config.frame_rate / 1000

    def quantise(x: Tensor) -> Tensor:
        codes: Tensor = quantiser.encode(x, bandwidth)  # [Q, B, t]
        return codes.transpose(0, 1)

    def lookup(codes: Tensor) -> Tensor:
        latents: Tensor = quantiser.decode(codes.transpose(0, 1))
        return latents

    return StackCodec(
        "encodec",
        config.sampling_rate,
        config.hop_length,
        books,
        config.codebook_size,
        encode=walk(model.encoder.layers),
        quantise=quantise,
        lookup=lookup,
        decode=walk(model.decoder.layers),
        like=next(model.parameters()),
        width=config.hidden_size,
    )


def _check_variant(config: Any) -> None:
    reasons = {
        "normalises each piece": config.normalize,
        f"works in pieces of {config.chunk_length_s} s": config.chunk_length_s is not None,
        f"has {config.audio_channels} channels": config.audio_channels != 1,
    }
    bad = [reason for reason, found in reasons.items() if found]
    if bad:
        raise ModelError(
            f"this EnCodec {' and '.join(bad)}, so its codes alone are no stream of sound; "
            "choose a mono one without, such as facebook/encodec_24khz"
        )
