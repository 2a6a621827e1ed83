"""Streaming layers against the plain torch ones, over shapes, paddings and splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from codec_cases import noise
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from mmfast.core.errors import ModelError
from mmfast.frontends.codecs.layers import Conv, ConvTranspose, LayerChain, Pointwise, Residual, pad
from mmfast.frontends.codecs.stages import stream


def pieces(layer: Any, x: Tensor, sizes: list[int]) -> tuple[Tensor, int]:
    """The output, and how much of it came before the end; its count is checked on the way."""
    state, outs, at, i = layer.start(x.shape[0]), [x.new_zeros(0)], 0, 0
    given = 0
    while at < x.shape[-1]:
        state, out = layer.step(state, x[..., at : at + sizes[i % len(sizes)]])
        at, i = min(x.shape[-1], at + sizes[i % len(sizes)]), i + 1
        given += out.shape[-1]
        outs.append(out)
        assert given == layer.count(at)
    tail = layer.finish(state)
    outs += [] if tail is None else [tail]
    return torch.cat([out for out in outs if out.dim() == 3], -1), given


splits = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@settings(max_examples=40)
@given(
    kernel=st.integers(1, 7),
    stride=st.integers(1, 5),
    dilation=st.integers(1, 3),
    causal=st.booleans(),
    mode=st.sampled_from(["constant", "replicate", "reflect"]),
    n=st.integers(1, 40),
    sizes=splits,
)
def test_convolution(
    kernel: int, stride: int, dilation: int, causal: bool, mode: str, n: int, sizes: list[int]
) -> None:
    """As the SEANet layer: padded to a whole number of strides."""
    span = (kernel - 1) * dilation + 1
    stride = min(stride, span)
    conv = nn.Conv1d(2, 3, kernel, stride, dilation=dilation).requires_grad_(False)
    total = span - stride
    right = 0 if causal else total // 2
    x = noise(2, 2, n)
    whole = conv(pad(x, total - right, right + (-n % stride), mode))
    layer = Conv(conv, total - right, right, mode, whole=True)
    out, early = pieces(layer, x, sizes)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-5)
    if layer.in_step:
        assert early == n // stride


@settings(max_examples=25)
@given(
    stride=st.integers(1, 5),
    more=st.integers(0, 6),
    left=st.integers(0, 3),
    bias=st.booleans(),
    n=st.integers(1, 20),
    sizes=splits,
)
def test_transposed_convolution(
    stride: int, more: int, left: int, bias: bool, n: int, sizes: list[int]
) -> None:
    left = min(left, more)
    conv = nn.ConvTranspose1d(2, 3, stride + more, stride, bias=bias).requires_grad_(False)
    x, right = noise(2, 2, n), more - left
    whole = conv(x)
    out, _ = pieces(ConvTranspose(conv, left, right), x, sizes)
    torch.testing.assert_close(out, whole[..., left : whole.shape[-1] - right], rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [1, 4, 23])
def test_branches_wait_for_each_other(n: int) -> None:
    wide = nn.Conv1d(2, 2, 7, dilation=2, padding=6).requires_grad_(False)
    narrow = nn.Conv1d(2, 2, 3, padding=1).requires_grad_(False)
    x = noise(2, 2, n)
    layer = LayerChain([Residual(stream(wide), stream(narrow)), Pointwise(functional.elu)])
    for sizes in ([1], [2, 5], [40]):
        out, _ = pieces(layer, x, sizes)
        torch.testing.assert_close(out, functional.elu(wide(x) + narrow(x)), rtol=0, atol=1e-5)


def test_a_layer_that_cannot_stream_is_named() -> None:
    with pytest.raises(ModelError, match="cannot stream a layer BatchNorm1d; choices"):
        stream(nn.BatchNorm1d(3))
    with pytest.raises(ModelError, match="'same' of 'zeros'"):
        stream(nn.Conv1d(2, 2, 3, padding="same"))
    with pytest.raises(ModelError, match="kernel 2, stride 3"):
        stream(nn.ConvTranspose1d(2, 2, 2, 3))
    with pytest.raises(ModelError, match="padding 'circular'"):
        Conv(nn.Conv1d(2, 2, 3), 2, 0, "circular")
