"""Weights of linear layers in fewer bits, through the packed CPU kernels of torch.

A step of decoding reads every weight once for one row of activations: bytes set its time. Every
form here computes `x W^T` for few rows by the kernel that was fastest, and for many rows, where
arithmetic sets the time, on weights that are turned back into numbers first.

`bfloat16` is laid out once for oneDNN where the processor multiplies it. `int8` rounds each
output's weights to 8 bits by one scale. Wide layers, but those of bfloat16 on AVX-512, go through
FBGEMM, whose kernel takes activations of 7 bits alone: a row enters twice, once rounded and once as
what rounding left, which together are 13 bits, so that only the weights are rounded. `int4` rounds
groups of 32 inputs to 4 bits by a scale and a middle each. `int8-dynamic` rounds activations to 7
bits, too, by the largest number of each row, so that no row depends on those beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError, unknown

FEW = 16  # rows up to which a step reads weights; drafts that are verified are as few
WIDE = 2048  # outputs from which FBGEMM is faster than `_weight_int8pack_mm`, both measured on AVX2
BLOCK = 32  # numbers that `_weight_int8pack_mm` takes at a time, along both sides
GROUP = 32  # inputs that share a scale of int4
_HALF = 63  # largest activation: with one more bit, sums of AVX2 in 16 bits would overflow
_REST = 2 * _HALF  # what rounding leaves is at most a half
_ZERO = 64


class WeightForm(Protocol):
    """Weights `[N, K]` as one kernel reads them."""

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` `[m, K]` times the transposed weights, and `bias` `[N]`: `[m, N]` as `x`."""

    def weight(self) -> Tensor:
        """The weights `[N, K]` as they count, in float32."""


def _kernels() -> Any:
    return torch.ops.quantized


def has_fbgemm() -> bool:
    """Return whether this build of torch has FBGEMM: on x86 alone."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def has_avx512() -> bool:
    """Return whether torch runs its AVX-512 kernels here."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@cache
def has_bfloat16() -> bool:
    """Return whether the processor itself multiplies bfloat16; others take each product apart.

    The names are private to torch, so a build without them counts as one without.
    """
    tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in tests)


@cache
def has_onednn() -> bool:
    """Return whether oneDNN multiplies bfloat16 here, on weights that it lays out once.

    Both names are private to torch, so a build without them counts as one without oneDNN.
    """
    found: Any = torch.ops.mkldnn
    needed = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    fits = torch.backends.mkldnn.is_available() and all(hasattr(found, name) for name in needed)
    return fits and bool(found._is_mkldnn_bf16_supported())


@contextmanager
def _fbgemm() -> Iterator[None]:
    """Pack for FBGEMM; what was packed stays of its engine."""
    engine: Any = torch.backends.quantized
    before = engine.engine
    engine.engine = "fbgemm"
    try:
        yield
    finally:
        engine.engine = before


def _bytes(*tensors: Tensor | None) -> int:
    return sum(each.nbytes for each in tensors if each is not None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _onednn_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str = "none", variant: str = ""
) -> Tensor:
    """The product with weights that oneDNN has laid out, which no compiler of torch reads."""
    run = torch.ops.mkldnn._linear_pointwise
    return cast(Tensor, run(x, weight, bias, name, [], variant))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _onednn_scaled(x: Tensor, factor: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    run = torch.ops.mkldnn._linear_pointwise.binary
    return cast(Tensor, run(x, factor, weight, bias, "mul"))


def _added(found: Tensor, bias: Tensor | None) -> Tensor:
    """A fresh product with its bias, in place."""
    return found if bias is None else found.add_(bias)


class HalfWeights:
    """bfloat16 weights and activations."""

    def __init__(self, weight: Tensor) -> None:
        self._shape, self._weight = weight.shape, weight.to(torch.bfloat16).contiguous()
        self._onednn = has_onednn()
        if self._onednn:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, FEW)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return 2 * self._shape.numel()

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `WeightForm`."""
        half, fused = x.to(torch.bfloat16), bias if x.dtype is torch.bfloat16 else None
        run = _onednn_product if self._onednn else F.linear
        found = run(half, self._weight, fused).to(x.dtype)
        return found if fused is bias else _added(found, bias)

    @property
    def fuses(self) -> bool:
        """Return whether products take in what is done with each of their numbers."""
        return self._onednn

    def activated(self, x: Tensor, bias: Tensor | None, name: str, variant: str = "") -> Tensor:
        """An activation, in oneDNN's words, of the product of bfloat16 `x` `[m, K]`: `[m, N]`."""
        found: Tensor = _onednn_product(x, self._weight, bias, name, variant)
        return found

    def times(self, x: Tensor, factor: Tensor, bias: Tensor | None) -> Tensor:
        """The product of bfloat16 `x` `[m, K]`, times a factor `[m, N]`."""
        found: Tensor = _onednn_scaled(x, factor, self._weight, bias)
        return found

    def weight(self) -> Tensor:
        """See `WeightForm`."""
        whole = self._weight.to_dense() if self._onednn else self._weight
        return whole.float()


class Float16Weights:
    """float16 weights, float32 activations and sums (FBGEMM)."""

    def __init__(self, weight: Tensor) -> None:
        self._shape = weight.shape
        with _fbgemm():
            self._packed = _kernels().linear_prepack_fp16(weight.float().contiguous(), None)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return 2 * self._shape.numel()

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `WeightForm`."""
        found: Tensor = _kernels().linear_dynamic_fp16(x.float(), self._packed)
        return _added(found.to(x.dtype), bias)

    def weight(self) -> Tensor:
        """See `WeightForm`."""
        with _fbgemm():
            return cast(Tensor, _kernels().linear_unpack_fp16(self._packed)[0]).float()


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights `[N, K]` as int8 and the scale of each output `[N]`; zeros have a scale of 1."""
    scale = weight.float().abs().amax(-1) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight.float() / scale[:, None]).round_().to(torch.int8), scale


def _pack_int8(whole: Tensor, scale: Tensor) -> Any:
    """Int8 weights as FBGEMM lays them out."""
    zeros = torch.zeros(len(scale), dtype=torch.long)
    make: Any = torch._make_per_channel_quantized_tensor
    with _fbgemm(), warnings.catch_warnings():
        # torch 2.14 says that such tensors will go; no other kernel multiplies in int8 as fast yet
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        return _kernels().linear_prepack(make(whole, scale.double(), zeros, 0), None)


def _unpacked(packed: Any) -> Tensor:
    with _fbgemm():
        return cast(Tensor, _kernels().linear_unpack(packed)[0].dequantize())


def int8_kernel(weight: Tensor, head: bool = False) -> tuple[bool, bool]:
    """Return whether weights are whole blocks, and whether few rows go through FBGEMM."""
    outputs, inputs = weight.shape
    # `_weight_int8pack_mm` reads past the end of weights that are no whole blocks.
    blocks = outputs % BLOCK == 0 and inputs % BLOCK == 0
    rounded_rows = weight.dtype is torch.bfloat16 and has_avx512()
    wide = outputs >= WIDE and (head or not rounded_rows)
    return blocks, has_fbgemm() and (wide or not blocks)


def _multiplied(x: Tensor, step: float, packed: Any) -> Tensor:
    """The product with activations rounded to multiples of `step`, 64 below zero to 63 above."""
    run = _kernels().linear_with_input_q_dq_qweight_dq_output_fp32
    return cast(Tensor, run(x, step, _ZERO, packed))


def _row_steps(x: Tensor) -> Tensor:
    """Step of each row, so that its largest number is 63 of them; above zero."""
    top = torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True)
    steps: Tensor = top / _HALF
    return steps.clamp_min_(torch.finfo(torch.float32).tiny)


def _one_step(x: Tensor) -> float:
    """The step of a single row, as a number: kernels take it so, in fewer operations."""
    top: float = torch.linalg.vector_norm(x, float("inf")).item()
    return max(top / _HALF, torch.finfo(torch.float32).tiny)


class Int8Weights:
    """Int8 weights, activations as they are; `head` is for layers that see few rows alone."""

    def __init__(self, weight: Tensor, head: bool = False) -> None:
        whole, self._scale = rounded(weight)
        self._narrow = self._scale.to(torch.bfloat16)
        self._count, (self._blocks, fits) = whole.numel(), int8_kernel(weight, head)
        self._packed = _pack_int8(whole, self._scale) if fits else None
        # A head is held once: its rare passes of many rows go through FBGEMM, too.
        self._whole = None if fits and head else whole

    @property
    def nbytes(self) -> int:
        """Bytes that are held: twice where few rows go through FBGEMM and many do not."""
        twice = (self._packed is not None) + (self._whole is not None)
        return twice * self._count + _bytes(self._scale, self._narrow)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `WeightForm`."""
        return _added(self._product(x), bias)

    def _product(self, x: Tensor) -> Tensor:
        whole = self._whole
        if whole is None:
            return self._in_two_parts(x.float()).to(x.dtype)
        if len(x) > FEW or (self._packed is None and not self._blocks):
            return F.linear(x, whole.to(x.dtype)).mul_(self._scale.to(x.dtype))
        if self._packed is None:  # in float32 this kernel is not vectorised
            run = torch.ops.aten._weight_int8pack_mm
            return cast(Tensor, run(x.to(torch.bfloat16), whole, self._narrow)).to(x.dtype)
        return self._in_two_parts(x.float()).to(x.dtype)

    def _in_two_parts(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            step = _one_step(x)
            near = torch.fake_quantize_per_tensor_affine(x, step, 0, -_ZERO, _HALF)
            both = _multiplied(torch.cat([x, (x - near).mul_(_REST)]), step, self._packed)
            return torch.add(both[:1], both[1:], alpha=1 / _REST)
        steps = _row_steps(x)
        steady = x / steps
        near = steady.round()
        both = _multiplied(torch.cat([near, (steady - near).mul_(_REST)]), 1.0, self._packed)
        first, second = both.chunk(2)
        return torch.add(first, second, alpha=1 / _REST).mul_(steps)

    def weight(self) -> Tensor:
        """See `WeightForm`."""
        if self._whole is None:
            return _unpacked(self._packed)
        return self._whole * self._scale[:, None]


class DynamicWeights:
    """Int8 weights, and activations rounded row by row to 7 bits (FBGEMM)."""

    def __init__(self, weight: Tensor) -> None:
        whole, scale = rounded(weight)
        self._count, self._packed = whole.numel(), _pack_int8(whole, scale)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._count

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `WeightForm`."""
        if len(x) == 1:
            whole = x.float()
            found = _multiplied(whole, _one_step(whole), self._packed)
        else:
            steps = _row_steps(x.float())
            found = _multiplied(x.float() / steps, 1.0, self._packed).mul_(steps)
        return _added(found.to(x.dtype), bias)

    def weight(self) -> Tensor:
        """See `WeightForm`."""
        return _unpacked(self._packed)


class Int4Weights:
    """Weights of 4 bits in groups of 32, activations in bfloat16 where rows are few.

    The kernel reads `packed` and `scales` `[groups, N, 2]`, which hold the middles, too.
    """

    def __init__(self, weight: Tensor) -> None:
        rows, width = weight.shape
        groups = weight.float().reshape(rows, width // GROUP, GROUP)
        least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        # The kernel reads both in bfloat16, so weights are rounded by what it will read.
        scale = ((most - least) / 15).to(torch.bfloat16).float()
        scale = torch.where(scale > 0, scale, 1.0)
        middle = (least + 8 * scale).to(torch.bfloat16).float()
        whole = ((groups - middle) / scale + 8).round_().clamp_(0, 15)
        flat = whole.reshape(rows, width).to(torch.int32)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(flat, 2)
        pair = torch.cat([scale, middle], -1)  # [N, groups, 2]
        self.scales = pair.transpose(0, 1).contiguous().to(torch.bfloat16)
        # The order of the kernel is its own. Outputs lie side by side here, so that scales are
        # read along them, and a number of two's complement unpacks by shifts.
        small = (whole - 8).to(torch.int8).permute(1, 2, 0)  # [groups, 32, N]
        low, high = small.chunk(2, 1)
        self._pairs = (low & 15 | high << 4).contiguous()  # [groups, 16, N]

    @property
    def nbytes(self) -> int:
        """Bytes that are held: every weight twice, for few rows and for many."""
        return _bytes(self.packed, self.scales, self._pairs)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `WeightForm`."""
        if len(x) > FEW:
            return _added(x @ self._columns(x.dtype), bias)
        run = torch.ops.aten._weight_int4pack_mm_for_cpu
        found: Tensor = run(x.to(torch.bfloat16), self.packed, GROUP, self.scales)
        return _added(found.to(x.dtype), bias)

    def _columns(self, dtype: torch.dtype) -> Tensor:
        """The weights as they count, transposed `[K, N]`; in bfloat16 rounded once."""
        groups, half, outputs = self._pairs.shape
        scale, middle = (each.contiguous()[:, None] for each in self.scales.to(dtype).unbind(-1))
        found = torch.empty(groups, 2 * half, outputs, dtype=dtype)
        for part, numbers in enumerate((self._pairs << 4 >> 4, self._pairs >> 4)):
            torch.addcmul(middle, numbers.to(dtype), scale, out=found[:, half * part :][:, :half])
        return found.reshape(-1, outputs)

    def weight(self) -> Tensor:
        """See `WeightForm`."""
        return self._columns(torch.float32).t().contiguous()


FORMS: dict[str, Callable[[Tensor], WeightForm]] = {
    "bfloat16": HalfWeights,
    "float16": Float16Weights,
    "int8": Int8Weights,
    "int8-dynamic": DynamicWeights,
    "int4": Int4Weights,
}
_FBGEMM_ALONE = ("float16", "int8-dynamic")


def pack(name: str, weight: Tensor, head: bool = False) -> WeightForm:
    """Weights `[N, K]` in a form by name; ModelError for an unknown one, or one not in torch here.

    Shapes that the kernel of int4 does not take (inputs in groups of 32, outputs of 64) are int8.
    A `head` is read by few rows nearly always.
    """
    if name not in FORMS:
        raise ModelError(unknown("form of weights", name, FORMS))
    if name in _FBGEMM_ALONE and not has_fbgemm():
        raise ModelError(
            f"weights={name!r} needs FBGEMM, which torch has on x86 alone; use weights='int8'"
        )
    if name == "int4" and not _fits_int4(weight):
        name = "int8"
    plain = weight.detach()
    return Int8Weights(plain, head) if name == "int8" else FORMS[name](plain)


def _fits_int4(weight: Tensor) -> bool:
    rows, width = weight.shape
    return not (width % GROUP or rows % 64)


def pack_joint(name: str, weights: Sequence[Tensor]) -> WeightForm | None:
    """One form of weights that multiply the same rows, `[N1 + N2 + .., K]`.

    None where each would have a kernel of its own, so that numbers stay those of each alone.
    """
    whole = torch.cat([each.detach() for each in weights])

    def kernel(weight: Tensor) -> tuple[bool, ...]:
        small = name == "int4" and _fits_int4(weight)
        return (small, *(int8_kernel(weight) if name in ("int8", "int4") and not small else ()))

    if any(kernel(each) != kernel(whole) for each in weights):
        return None
    return pack(name, whole)
