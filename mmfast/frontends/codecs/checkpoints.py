"""Streaming codecs over the published models Mimi, EnCodec and DAC of transformers.

Mimi (arXiv 2410.00037), 24 kHz, 12.5 frames/s: SEANet, a sliding-window transformer, a semantic
and several acoustic codebooks. All of it is causal, so streaming is exact and without delay. The
stock `decode` keeps no state of its upsampling and its convolutions, and is wrong in pieces.

EnCodec (arXiv 2210.13438), 24 kHz, 75 frames/s: SEANet with an LSTM and residual codebooks. It is
causal but padded with the mirror image of its start, so the first sound comes after 7 frames
(93 ms) and nothing is late from then on. A non-causal variant streams exactly, too, late by its
look-ahead. The 48 kHz model does not stream: it normalises each second as a whole and keeps a
loudness beside the codes.

DAC (arXiv 2306.06546): convolutions that look both ways, snake activations, residual codes. Nothing
is recurrent and padding is zeros: streaming is exact, late by the look-ahead of the layers. With
less look-ahead each frame comes from a window that ends sooner, with an error.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmfast.core.errors import ModelError
from mmfast.core.kv import KVBlock
from mmfast.frontends.codecs.base import StackCodec, pick_books
from mmfast.frontends.codecs.layers import CodecLayer, LayerChain, Windowed, at_once
from mmfast.frontends.codecs.stages import stream, walk
from mmfast.ops.attention import rotate
from mmfast.ops.stream_cache import empty


class Transformer(CodecLayer):
    """Mimi's transformer, `[B, C, t]` to `[B, C, t]`; its modules are used as they are.

    Its state holds the last keys, before rotation, and values; `advance` `[B]` counts those of them
    that belong to the stream. Keys are rotated to their place in the window at every step:
    attention depends on distances only, so no number grows with the length of the stream.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.layers = model, list(model.layers)
        self.past = int(model.config.sliding_window) - 1  # beside the query itself

    def start(self, batch: int) -> KVBlock:
        """Return an empty window, which has its full size from the start."""
        attention = self.layers[0].self_attn
        weight = attention.k_proj.weight
        heads = weight.shape[0] // attention.head_dim
        shape = (batch, heads, self.past, attention.head_dim)
        zeros = tuple(weight.new_zeros(shape) for _ in self.layers)
        return replace(empty(batch, weight.device), keys=zeros, values=zeros)

    def step(self, state: KVBlock, x: Tensor) -> tuple[KVBlock, Tensor]:
        """Run `[B, C, t]` through all layers; each moment sees the window that ends with it."""
        n = x.shape[-1]
        if not n:
            return state, x
        hidden = x.transpose(1, 2)  # [B, t, C]
        places = torch.arange(self.past + n, device=x.device)
        turn = self.model.rotary_emb(hidden, places[None])
        mask = self._mask(state.advance, places, n)
        keys, values = [], []
        for layer, k, v in zip(self.layers, state.keys, state.values, strict=True):
            hidden, k, v = _layer(layer, hidden, k, v, turn, mask)
            keys.append(k[:, :, n:])
            values.append(v[:, :, n:])
        seen = (state.advance + n).clamp(max=self.past)
        state = KVBlock(tuple(keys), tuple(values), state.relative, seen)
        return state, hidden.transpose(1, 2)

    def _mask(self, seen: Tensor, places: Tensor, n: int) -> Tensor:
        """`[B, 1, n, past + n]`: causal, inside the window, of this stream."""
        query = places[self.past :, None]
        near = (places <= query) & (places >= query - self.past)
        own = places >= self.past - seen[:, None]  # [B, past + n]
        return (near[None] & own[:, None])[:, None]


def _layer(
    layer: Any, x: Tensor, past_k: Tensor, past_v: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    inner = layer.self_attn
    normed = layer.input_layernorm(x)
    heads = (*x.shape[:2], -1, inner.head_dim)
    q, k, v = (
        project(normed).view(heads).transpose(1, 2)
        for project in (inner.q_proj, inner.k_proj, inner.v_proj)
    )
    keys, values = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    cos, sin = (each[:, None] for each in turn)
    n = x.shape[1]
    out = functional.scaled_dot_product_attention(
        rotate(q, cos[:, :, -n:], sin[:, :, -n:]),
        rotate(keys, cos, sin),
        values,
        attn_mask=mask,
        scale=inner.scaling,
        enable_gqa=inner.num_key_value_groups > 1,
    )
    out = inner.o_proj(out.transpose(1, 2).flatten(2))
    x = x + layer.self_attn_layer_scale(out)
    return x + layer.mlp_layer_scale(layer.mlp(layer.post_attention_layernorm(x))), keys, values


def mimi_codec(model: Any, codebooks: int | None = None) -> StackCodec:
    """Return a codec over a `MimiModel` in evaluation mode; one half may have been left out."""
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
        encode=mimi_encoder(_mimi_half(model, "encoder")),
        quantise=quantise,
        lookup=model.quantizer.decode,
        decode=mimi_decoder(_mimi_half(model, "decoder")),
        like=next(model.parameters()),
        width=config.hidden_size,
    )


def _mimi_half(model: Any, side: str) -> Any:
    """Return encoder or decoder of a `MimiModel`, whose parts 5.17 keeps in the model itself."""
    half = getattr(model, side)
    if half is None or hasattr(half, f"{side}_transformer"):
        return half
    sampling = "downsample" if side == "encoder" else "upsample"
    parts = {name: getattr(model, name) for name in (f"{side}_transformer", sampling)}
    return SimpleNamespace(**{f"{side}_seanet": half, **parts})


def mimi_encoder(half: Any) -> CodecLayer | None:
    """Return the encoder of a model like Mimi as one layer."""
    if half is None:
        return None
    down = [] if half.downsample is None else [stream(half.downsample)]
    return LayerChain(
        [walk(half.encoder_seanet.layers), Transformer(half.encoder_transformer), *down]
    )


def mimi_decoder(half: Any) -> CodecLayer | None:
    """Return the decoder of a model like Mimi as one layer."""
    if half is None:
        return None
    up = [] if half.upsample is None else [stream(half.upsample)]
    return LayerChain(
        [*up, Transformer(half.decoder_transformer), walk(half.decoder_seanet.layers)]
    )


def encodec_codec(model: Any, codebooks: int | None = None) -> StackCodec:
    """Return a codec over an `EncodecModel` in evaluation mode; 8 codebooks are 6 kbit/s."""
    config = model.config
    _check_variant(config)
    quantiser = model.quantizer
    books = pick_books(codebooks, 1, config.num_quantizers, "EnCodec")
    # half a codebook more than needed: the quantiser rounds down
    bandwidth = (books + 0.5) * math.log2(config.codebook_size) * config.frame_rate / 1000

    def quantise(x: Tensor) -> Tensor:
        codes: Tensor = quantiser.encode(x, bandwidth)  # [Q, B, t]
        return codes.transpose(0, 1)

    return StackCodec(
        "encodec",
        config.sampling_rate,
        config.hop_length,
        books,
        config.codebook_size,
        encode=walk(model.encoder.layers),
        quantise=quantise,
        lookup=lambda codes: quantiser.decode(codes.transpose(0, 1)),
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


def dac_codec(model: Any, codebooks: int | None = None, lookahead: int | None = None) -> StackCodec:
    """A codec over a `DacModel`; frames see `lookahead` later ones, None is all that layers see."""
    config = model.config
    books = pick_books(codebooks, 1, config.n_codebooks, "DAC")
    if lookahead is not None and lookahead < 0:
        raise ModelError(f"lookahead={lookahead} is negative; give 0 or more frames, None = exact")
    hop, like = config.hop_length, next(model.parameters())
    encode, decode = (
        walk([half.conv1, *half.block, half.snake1, half.conv2, *ends])
        for half, ends in ((model.encoder, ()), (model.decoder, (model.decoder.tanh,)))
    )
    layers: list[CodecLayer] = [encode, decode]
    if lookahead is not None:
        window = (_span(encode, hop), lookahead, like)
        wide = (_span(decode, 1, hop), lookahead, like)
        layers = [
            Windowed(at_once(encode), 1, hop, 1, *window),
            Windowed(at_once(decode), config.hidden_size, 1, hop, *wide),
        ]

    return StackCodec(
        "dac",
        config.sampling_rate,
        hop,
        books,
        config.codebook_size,
        encode=layers[0],
        quantise=lambda x: model.quantizer(x, books)[1],
        lookup=lambda codes: model.quantizer.from_codes(codes)[0],
        decode=layers[1],
        like=like,
        width=config.hidden_size,
        whole=True,
    )


def _span(layers: LayerChain, unit: int, yields: int = 1) -> int:
    """Frames of the past that the layers see, as many as of the future: they are symmetric."""
    late = 256 * yields - layers.count(256 * unit)
    return -(-late // yields) + 1
