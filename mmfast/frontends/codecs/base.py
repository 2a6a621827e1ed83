"""Codecs from an encoder and a decoder stage, and the checks of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MediaError, ModelError
from mmfast.frontends.codecs.layers import CodecLayer, LayerChain, Pointwise
from mmfast.frontends.codecs.stages import FrameStage, run


def check_pcm(pcm: Any, batch: int | None = None) -> Tensor:
    """Return sound `[B, n]` of finite floating-point samples, n may be 0; or raise `MediaError`."""
    if not isinstance(pcm, Tensor) or not pcm.is_floating_point():
        kind = pcm.dtype if isinstance(pcm, Tensor) else type(pcm).__name__
        raise MediaError(f"sound is {kind}; give a float32 tensor [B, n] of samples in -1..1")
    if pcm.dim() != 2 or pcm.shape[0] < 1:
        raise MediaError(f"sound has shape {list(pcm.shape)}; give [B, n], one mono stream a row")
    _check_batch("sound", pcm, batch)
    if not torch.isfinite(pcm).all():
        bad = int((~torch.isfinite(pcm)).sum())
        raise MediaError(
            f"sound holds {bad} NaN or infinite samples; give finite ones (0 = silent)"
        )
    return pcm


def check_codes(codes: Any, books: int, size: int, batch: int | None = None) -> Tensor:
    """Return codes `[B, Q, t]` in `[0, size)` of 1 to `books` books, t may be 0; or raise."""
    whole = isinstance(codes, Tensor) and codes.dtype in (torch.int64, torch.int32, torch.int16)
    if not whole:
        kind = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise MediaError(f"codes are {kind}; give an int64 tensor [B, Q, t]")
    if codes.dim() != 3 or codes.shape[0] < 1 or not 1 <= codes.shape[1] <= books:
        raise MediaError(
            f"codes have shape {list(codes.shape)}; give [B, Q, t] with 1 to {books} codebooks"
        )
    _check_batch("codes", codes, batch)
    if codes.numel():
        low, high = (int(each) for each in codes.aminmax())
        if low < 0 or high >= size:
            worst = low if low < 0 else high
            raise MediaError(f"code {worst} is not in a codebook; give codes of 0 to {size - 1}")
    whole_numbers: Tensor = codes.long()
    return whole_numbers


def check_latents(latents: Any, width: int, batch: int | None = None) -> Tensor:
    """Return latents `[B, width, t]` of finite floating-point numbers, t may be 0; or raise."""
    if not isinstance(latents, Tensor) or not latents.is_floating_point():
        kind = latents.dtype if isinstance(latents, Tensor) else type(latents).__name__
        raise MediaError(f"latents are {kind}; give a float32 tensor [B, {width}, t]")
    if latents.dim() != 3 or latents.shape[0] < 1 or latents.shape[1] != width:
        raise MediaError(f"latents have shape {list(latents.shape)}; give [B, {width}, t]")
    _check_batch("latents", latents, batch)
    if not torch.isfinite(latents).all():
        raise MediaError("latents hold NaN or infinite numbers; give finite ones")
    return latents


def _check_batch(what: str, x: Tensor, batch: int | None) -> None:
    if batch is not None and x.shape[0] != batch:
        raise MediaError(
            f"{what} of {x.shape[0]} streams for a state of {batch}; give as many rows as start()"
        )


class StreamCodec:
    """Sound to codes and back, whole or in pieces of any size (`core.speech.Codec`).

    A frame has `hop` samples and a code of each of `books` codebooks of `size` entries. `encoder`
    is a stage from sound `[B, n]` to codes `[B, Q, t]`, `decoder` one back; either may be None.
    A size of 0 means that there are no codes: frames are latents of `books` numbers, float32.
    """

    def __init__(
        self,
        name: str,
        sample_rate: int,
        hop: int,
        books: int,
        size: int,
        encoder: Any,
        decoder: Any,
    ) -> None:
        self.name, self.sample_rate, self.hop = name, sample_rate, hop
        self.frame_rate, self.codebooks, self.size = sample_rate / hop, books, size
        self._encoder, self._decoder = encoder, decoder

    def __repr__(self) -> str:
        kind = f"{self.codebooks} x {self.size}" if self.size else f"{self.codebooks} latents"
        return f"<codec {self.name}: {self.sample_rate} Hz, {self.frame_rate:g} frames/s, {kind}>"

    def check(self, codes: Any, batch: int | None = None) -> Tensor:
        """Return codes, or latents, that the codec can decode; MediaError for others."""
        if not self.size:
            return check_latents(codes, self.codebooks, batch)
        return check_codes(codes, self.codebooks, self.size, batch)

    @property
    def encoder(self) -> Any:
        """Stage from sound `[B, n]` to codes `[B, Q, t]`; `lookahead` in frames, inf if all."""
        return self._half(self._encoder, "encoder")

    @property
    def decoder(self) -> Any:
        """Stage from codes `[B, Q, t]` to sound `[B, n]`; `lookahead` in samples, inf if all."""
        return self._half(self._decoder, "decoder")

    def encode(self, pcm: Tensor) -> Tensor:
        """Encode sound `[B, n]` or `[n]` to codes `[B, Q, ceil(n / hop)]` in bounded memory."""
        one = isinstance(pcm, Tensor) and pcm.dim() == 1
        return run(self.encoder, check_pcm(pcm[None] if one else pcm))

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes `[B, Q, T]` or `[Q, T]`, of Q or fewer books, to sound `[B, T * hop]`."""
        one = isinstance(codes, Tensor) and codes.dim() == 2
        codes = self.check(codes[None] if one else codes)
        return run(self.decoder, codes)[:, : codes.shape[2] * self.hop]

    def _half(self, stage: Any, which: str) -> Any:
        if stage is None:
            raise ModelError(f"codec {self.name} has no {which}; load the whole checkpoint")
        return stage


class StackCodec(StreamCodec):
    """A codec from stacks of layers, such as Mimi, EnCodec and DAC.

    `encode` leads from sound `[B, 1, n]` to latents `[B, width, t]`, `quantise` on to codes `[B, Q,
    t]`, `lookup` and `decode` back; without one of the stacks the codec does the other half. `like`
    is a weight of the model. `whole` fills the last frame of sound with silence, as the model's own
    processor does. With a `size` of 0, `quantise` and `lookup` take and give latents.
    `encoder` is a stage in place of `encode`.
    """

    def __init__(
        self,
        name: str,
        sample_rate: int,
        hop: int,
        books: int,
        size: int,
        *,
        encode: CodecLayer | None,
        quantise: Callable[[Tensor], Tensor],
        lookup: Callable[[Tensor], Tensor],
        decode: CodecLayer | None,
        like: Tensor,
        width: int,
        whole: bool = False,
        encoder: Any = None,
    ) -> None:
        decoder = None
        if encode is not None:
            first = Pointwise(lambda x: x[:, None].to(like.dtype), (1,), like.dtype)
            kind = torch.long if size else torch.float32
            last = Pointwise(lambda x: quantise(x).to(kind), (books,), kind)
            encoder = FrameStage(
                LayerChain([first, encode, last]),
                check_pcm, hop, 1, -1 if size else 0.0, (books,), whole, like.device,
            )  # fmt: skip
        if decode is not None:
            first = Pointwise(lookup, (width,), like.dtype)
            last = Pointwise(lambda x: x[:, 0].float(), (), torch.float32)
            decoder = FrameStage(
                LayerChain([first, decode, last]), self.check, 1, hop, 0.0,
                device=like.device,
            )  # fmt: skip
        super().__init__(name, sample_rate, hop, books, size, encoder, decoder)


def pick_books(wanted: int | None, least: int, most: int, name: str) -> int:
    """Return the number of codebooks to use, all by default; ModelError where out of range."""
    books = most if wanted is None else wanted
    if not least <= books <= most:
        raise ModelError(f"codebooks={books} is out of range; {name} takes {least} to {most}")
    return books
