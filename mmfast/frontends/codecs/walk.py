"""From the modules of a codec to layers that stream, by what they are made of.

A module is known by its parts, not by its class: SEANet convolutions (`conv`, `causal`,
`pad_mode`), their residual blocks (`block`, `shortcut`), an LSTM beside a skip (`lstm`), plain
convolutions with zero padding, and functions of each moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from mmfast.core.errors import ModelError
from mmfast.frontends.codecs.convolution import Conv, ConvTranspose
from mmfast.frontends.codecs.layers import Chain, Layer, Pointwise, Recurrent, Residual

MOMENTARY = (nn.ELU, nn.GELU, nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Tanh, nn.Identity)


def walk(modules: Iterable[Any]) -> Chain:
    """Modules that run one behind the other, as one streaming layer.

    Raises:
        ModelError: One of them cannot stream.
    """
    return Chain([stream(module) for module in modules])


def stream(module: Any) -> Layer:
    """One module of a codec.

    Raises:
        ModelError: It cannot stream, or is not known.
    """
    if isinstance(module, nn.Conv1d):
        return Conv(module, *_own_padding(module))
    if isinstance(module, nn.ConvTranspose1d):
        return ConvTranspose(module, *_own_padding(module))
    if isinstance(getattr(module, "conv", None), (nn.Conv1d, nn.ConvTranspose1d)):
        return _seanet(module)
    if hasattr(module, "block") and hasattr(module, "shortcut"):
        return Residual(walk(module.block), stream(module.shortcut))
    if isinstance(getattr(module, "lstm", None), nn.LSTM):
        return Recurrent(module.lstm)
    if hasattr(module, "res_unit1"):
        return walk(_dac_block(module))
    if hasattr(module, "snake1") and hasattr(module, "conv2"):
        unit = walk([module.snake1, module.conv1, module.snake2, module.conv2])
        return Residual(unit, Pointwise(nn.Identity()))
    if isinstance(module, MOMENTARY) or hasattr(module, "alpha"):  # alpha: the snake activation
        return Pointwise(module)
    raise ModelError(
        f"cannot stream a layer {type(module).__name__}; choices: convolutions, transposed "
        "convolutions, LSTM, residual blocks, activations"
    )


def _own_padding(module: Any) -> tuple[int, int]:
    extra = any(getattr(module, "output_padding", (0,)))
    if module.padding_mode != "zeros" or isinstance(module.padding, str) or extra:
        raise ModelError(
            f"cannot stream padding {module.padding!r} of {module.padding_mode!r}"
            f"{' with output_padding' if extra else ''}; give zeros, the same at both ends"
        )
    return module.padding[0], module.padding[0]


def _seanet(module: Any) -> Layer:
    """Padding all on the left (causal) or on both sides, the odd one on the left."""
    if getattr(module, "norm_type", "weight_norm") == "time_group_norm":
        raise ModelError(
            "this codec normalises over all time (norm_type 'time_group_norm'), so it cannot "
            "stream; choose one of norm_type 'weight_norm', such as facebook/encodec_24khz"
        )
    conv, causal = module.conv, bool(module.causal)
    kernel = (conv.kernel_size[0] - 1) * conv.dilation[0] + 1
    total = kernel - conv.stride[0]
    if isinstance(conv, nn.ConvTranspose1d):
        right = math.ceil(total * module.trim_right_ratio) if causal else total // 2
        return ConvTranspose(conv, total - right, right)
    right = 0 if causal else total // 2
    return Conv(conv, total - right, right, module.pad_mode, whole=True)


def _dac_block(module: Any) -> list[Any]:
    units = [module.res_unit1, module.res_unit2, module.res_unit3]
    if hasattr(module, "conv_t1"):
        return [module.snake1, module.conv_t1, *units]
    return [*units, module.snake1, module.conv1]
