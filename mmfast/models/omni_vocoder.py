"""Qwen2.5-Omni's vocoder on a stream: BigVGAN, from mel frames to sound, exactly.

All of it is convolutions that see both ways, and activations at twice the rate between two
low-pass filters. In pieces it is late by what they see of the future, and equal to the stock one.
Paper: arXiv 2206.04658.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mmfast.frontends.codecs.convolution import Conv, ConvTranspose
from mmfast.frontends.codecs.edges import Capped, Edge
from mmfast.frontends.codecs.layers import Chain, Layer, Pointwise, Residual
from mmfast.frontends.codecs.walk import stream


def vocoder_layers(model: Any) -> Chain:
    """Mel frames `[B, mel, t]` to sound `[B, 1, t * hop]`.

    Args:
        model: A `Qwen2_5OmniToken2WavBigVGANModel`.
    """
    blocks = model.num_residual_blocks
    layers: list[Layer] = [Pointwise(model.process_mel_spectrogram), stream(model.conv_pre)]
    for i, up in enumerate(model.ups):
        branches = [_block(each) for each in model.resblocks[i * blocks : (i + 1) * blocks]]
        layers += [stream(up[0]), Residual(*branches), Pointwise(lambda x: x / blocks)]
    layers += [_activation(model.activation_post), stream(model.conv_post)]
    return Chain([*layers, Pointwise(lambda x: x.clamp(-1.0, 1.0))])


def _block(module: Any) -> Chain:
    """Pairs of dilated and plain convolutions, each pair beside a skip."""
    first, second = module.activations[::2], module.activations[1::2]
    parts = zip(first, module.convs1, second, module.convs2, strict=True)
    return Chain(
        [
            Residual(
                Chain([_activation(a), stream(wide), _activation(b), stream(narrow)]),
                Pointwise(torch.nn.Identity()),
            )
            for a, wide, b, narrow in parts
        ]
    )


def _activation(module: Any) -> Chain:
    """Up to twice the rate, the snake, and down again."""
    channels = module.act.alpha.shape[0]
    up, down = module.upsample, module.downsample
    raised = _filter(up.filter * up.ratio, channels, up.stride)
    spread = Chain([Edge(up.pad, up.pad), ConvTranspose(raised, up.pad_left, 0)])
    lowered = _filter(down.filter, channels, down.stride)
    return Chain(
        [
            Capped(spread, up.ratio),
            Pointwise(module.act),
            Conv(lowered, down.pad_left, down.pad_right, "replicate"),
        ]
    )


def _filter(taps: Tensor, channels: int, stride: int) -> SimpleNamespace:
    """The same taps for every channel, as a layer would hold them."""
    return SimpleNamespace(
        weight=taps.expand(channels, -1, -1).contiguous(),
        bias=None,
        stride=(stride,),
        dilation=(1,),
        groups=channels,
        kernel_size=(taps.shape[-1],),
    )
