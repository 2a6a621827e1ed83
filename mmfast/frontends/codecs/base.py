"""A codec out of two stages: what Mimi, EnCodec and DAC have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.frontends.codecs.checks import check_codes, check_pcm
from mmfast.frontends.codecs.layers import Chain, Layer, Pointwise
from mmfast.frontends.codecs.streaming import FrameStage, run


class StackCodec:
    """Sound to codes and back, whole or in pieces of any size (`core.speech.Codec`).

    Args:
        name: What to call it.
        sample_rate: Samples per second.
        hop: Samples per frame.
        books: Codebooks used.
        size: Entries per codebook.
        encode: Layers from sound `[B, 1, n]` to latents `[B, D, t]`; None: it only decodes.
        quantise: Latents to codes `[B, Q, t]`.
        lookup: Codes to latents.
        decode: Layers from latents to sound `[B, 1, n]`; None: it only encodes.
        like: A weight of the model: its type, its place and, in `width`, the latents' channels.
        whole: Fill the last frame of sound with silence, as the model's own processor does.
    """

    def __init__(
        self,
        name: str,
        sample_rate: int,
        hop: int,
        books: int,
        size: int,
        *,
        encode: Layer | None,
        quantise: Callable[[Tensor], Tensor],
        lookup: Callable[[Tensor], Tensor],
        decode: Layer | None,
        like: Tensor,
        width: int,
        whole: bool = False,
    ) -> None:
        self.name, self.sample_rate, self.hop = name, sample_rate, hop
        self.frame_rate, self.codebooks, self.size = sample_rate / hop, books, size
        self._encoder: FrameStage | None = None
        self._decoder: FrameStage | None = None
        if encode is not None:
            first = Pointwise(lambda x: x[:, None].to(like.dtype), (1,), like.dtype)
            last = Pointwise(lambda x: quantise(x).long(), (books,), torch.long)
            self._encoder = FrameStage(
                Chain([first, encode, last]),
                check_pcm, hop, 1, -1, (books,), whole, like.device,
            )  # fmt: skip
        if decode is not None:
            first = Pointwise(lookup, (width,), like.dtype)
            last = Pointwise(lambda x: x[:, 0].float(), (), torch.float32)
            self._decoder = FrameStage(
                Chain([first, decode, last]), self._check_codes, 1, hop, 0.0, device=like.device
            )

    def __repr__(self) -> str:
        return (
            f"<codec {self.name}: {self.sample_rate} Hz, {self.frame_rate:g} frames/s, "
            f"{self.codebooks} x {self.size}>"
        )

    @property
    def encoder(self) -> FrameStage:
        """Sound `[B, n]` to codes `[B, Q, t]`; `lookahead` in frames.

        Raises:
            ModelError: The model was loaded without its encoder.
        """
        return self._half(self._encoder, "encoder")

    @property
    def decoder(self) -> FrameStage:
        """Codes `[B, Q, t]` to sound `[B, n]`; `lookahead` in samples.

        Raises:
            ModelError: The model was loaded without its decoder.
        """
        return self._half(self._decoder, "decoder")

    def encode(self, pcm: Tensor) -> Tensor:
        """Sound `[B, n]` or `[n]` to codes `[B, Q, ceil(n / hop)]`; memory is bounded.

        Raises:
            MediaError: Not a finite floating-point tensor of that shape.
        """
        one = isinstance(pcm, Tensor) and pcm.dim() == 1
        return run(self.encoder, check_pcm(pcm[None] if one else pcm))

    def decode(self, codes: Tensor) -> Tensor:
        """Codes `[B, Q, T]` or `[Q, T]` to sound `[B, T * hop]`; fewer books than Q may be given.

        Raises:
            MediaError: Not whole numbers of that shape and range.
        """
        one = isinstance(codes, Tensor) and codes.dim() == 2
        return run(self.decoder, self._check_codes(codes[None] if one else codes))

    def _check_codes(self, codes: Any, batch: int | None = None) -> Tensor:
        return check_codes(codes, self.codebooks, self.size, batch)

    def _half(self, stage: FrameStage | None, which: str) -> FrameStage:
        if stage is None:
            raise ModelError(f"codec {self.name} has no {which}; load the whole checkpoint")
        return stage


def pick_books(wanted: int | None, least: int, most: int, name: str) -> int:
    """How many codebooks to use.

    Raises:
        ModelError: Fewer than the model can do with, or more than it has.
    """
    books = most if wanted is None else wanted
    if not least <= books <= most:
        raise ModelError(f"codebooks={books} is out of range; {name} takes {least} to {most}")
    return books
