"""Keys and values in 8, 4 or 2 bits, packed into bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import MmfastError, SpecError
from mmfast.ops.ragged import RaggedRows, ThinRows

BITS = (8, 4, 2)
_BLOCK = 1 << 18  # numbers worked on at once
_WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A tensor `[..., n, d]` in few bits."""

    codes: Tensor  # `[..., bytes]` uint8, 8 / bits numbers a byte
    low: Tensor  # smallest value of each group, exact: `[..., G, d]` or `[..., n, G]`
    step: Tensor  # distance of codes, as `low`, rounded up: the last code reaches the largest value
    n: int  # tokens
    width: int  # width d
    bits: int  # 8, 4 or 2
    group: int  # numbers of a group
    along_tokens: bool  # groups run along the tokens, one scale per channel

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(t.nbytes for t in (self.codes, self.low, self.step))

    @property
    def shape(self) -> torch.Size:
        """The shape `[..., n, d]` of the numbers."""
        return torch.Size((*self.codes.shape[:-1], self.n, self.width))

    def to(self, device: torch.device) -> PackedTensor:
        """The same on another device."""
        codes, low, step = (x.to(device) for x in (self.codes, self.low, self.step))
        return replace(self, codes=codes, low=low, step=step)

    def rows(self) -> list[PackedTensor]:
        """Views of the parts of `[R, ..., n, d]` along the first dimension."""
        parts = zip(self.codes, self.low, self.step, strict=True)
        return [replace(self, codes=codes, low=low, step=step) for codes, low, step in parts]

    def apart(self) -> list[PackedTensor]:
        """The P parts of `[..., P, n, d]` packed at once, each with memory of its own."""
        parts = (t.unbind(d) for t, d in ((self.codes, -2), (self.low, -3), (self.step, -3)))
        return [
            replace(self, codes=codes.clone(), low=low.clone(), step=step.clone())
            for codes, low, step in zip(*parts, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class ScaledRows:
    """Rows `[H, n, d]` in few bits, divided by a size of their channel; a token has one scale."""

    rows: PackedTensor  # `[n, H * d]`
    sizes: Tensor  # `[H, 1, d]`

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(H, n, d)`."""
        return int(self.sizes.shape[0]), self.rows.n, int(self.sizes.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and sizes."""
        return self.rows.nbytes + self.sizes.nbytes

    def to(self, device: torch.device) -> ScaledRows:
        """The same on another device."""
        return ScaledRows(self.rows.to(device), self.sizes.to(device))

    def whole(self) -> Tensor:
        """Rows `[H, n, d]`."""
        rows: Tensor = dequantise(self.rows).unflatten(1, (self.shape[0], -1))  # [n, H, d]
        return rows.transpose(0, 1) * self.sizes


def quantise_apart(x: Tensor, bits: int) -> ScaledRows:
    """Divide `x` `[H, n, d]` by the root of the largest magnitude of each channel and round it.

    Channel-separable tokenwise quantisation (ZipCache, He et al. 2024): a large channel no longer
    sets the scale of the token, and only two numbers a token are stored for all heads. NaN and
    infinity are an MmfastError.
    """
    sizes = x.abs().amax(1, keepdim=True).sqrt()
    sizes = sizes.masked_fill(sizes == 0, 1)
    rows = (x / sizes).transpose(0, 1).flatten(1)
    return ScaledRows(quantise(rows, bits, max(1, rows.shape[1]), along_tokens=False), sizes)


@dataclass(frozen=True)
class Quantiser:
    """Settings of a quantised store; it holds no state."""

    bits: int  # 8, 4 or 2
    group: int = 32  # numbers that share a scale
    residual: int = 128  # how many of the most recent tokens a cache keeps as they are

    def pack(self, x: Tensor, *, keys: bool = False) -> PackedTensor:
        """Quantise `x` `[..., n, d]` by row, `keys` by channel (KIVI, Liu et al. 2024)."""
        return quantise(x, self.bits, self.group, along_tokens=keys)


def quantise(x: Tensor, bits: int, group: int, *, along_tokens: bool) -> PackedTensor:
    """Round every group of `x` `[..., n, d]` to 2^bits evenly spaced numbers between its extremes.

    Groups are of consecutive tokens in one channel, or of one token's channels; the last one of a
    row may be smaller. NaN and infinity are an MmfastError.
    """
    check_bits(bits, group)
    dim = -2 if along_tokens else -1
    grouped = _grouped(x, group, dim)  # [..., G, g, d] or [..., n, G, g]
    low, high = _extremes(grouped, dim)
    if not bool(torch.isfinite(low).all() & torch.isfinite(high).all()):
        raise MmfastError(
            f"cannot store {list(x.shape)} in {bits} bits: it holds NaN or infinity; look for the "
            "step of the model that made them"
        )
    step = _step(low, high, 2**bits - 1)
    codes = _ungrouped(_nearest_levels(grouped, low, step, 2**bits - 1), x, dim)
    return PackedTensor(
        codes=_into_bytes(codes.flatten(-2), bits),
        low=low.squeeze(dim),
        step=step.squeeze(dim),
        n=x.shape[-2],
        width=x.shape[-1],
        bits=bits,
        group=group,
        along_tokens=along_tokens,
    )


def _extremes(grouped: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest number of every group, `dim` of length 1."""
    if grouped.dtype == torch.float32 or dim == -2:
        return grouped.amin(dim, keepdim=True), grouped.amax(dim, keepdim=True)
    # Along adjacent numbers of 16 bits torch compares one by one; as float32 it does 8 at a time.
    found = [_extremes(part.float(), dim) for part in grouped.split(_block(grouped), -3)]
    low, high = (torch.cat(parts, -3).to(grouped.dtype) for parts in zip(*found, strict=True))
    return low, high


def _block(grouped: Tensor) -> int:
    return max(1, _BLOCK * grouped.shape[-3] // max(1, grouped.numel()))


def _nearest_levels(grouped: Tensor, low: Tensor, step: Tensor, levels: int) -> Tensor:
    """The nearest level of every number, uint8; in blocks, so that only codes leave the cache."""
    codes = torch.empty(grouped.shape, dtype=torch.uint8, device=grouped.device)
    wide = step.float().masked_fill(step == 0, 1)
    block = _block(grouped)
    parts = (part.split(block, -3) for part in (codes, grouped, low.float(), wide))
    for out, values, lowest, apart in zip(*parts, strict=True):
        out.copy_((values.float() - lowest).div_(apart).round_().clamp_(0, levels))
    return codes


def dequantise(packed: PackedTensor, out: Tensor | None = None) -> Tensor:
    """The tensor `[..., n, d]` that `packed` stands for, in the dtype it had, written to `out`."""
    shape = (*packed.codes.shape[:-1], packed.n, packed.width)
    codes = _out_of_bytes(packed.codes, packed.bits, packed.n * packed.width).view(shape)
    dim = -2 if packed.along_tokens else -1
    grouped = _grouped(codes, packed.group, dim)
    if out is None:
        out = torch.empty(shape, dtype=packed.low.dtype, device=codes.device)
    whole = grouped.numel() == out.numel()  # no group lacks numbers
    values = out.unflatten(dim, (-1, packed.group)) if whole else out.new_empty(grouped.shape)
    block = _block(grouped)
    scales = (scale.unsqueeze(dim).float() for scale in (packed.low, packed.step))
    parts = [(part,) for part in (values, grouped, *scales)]
    if block < grouped.shape[-3]:
        parts = [part.split(block, -3) for (part,) in parts]
    for target, mine, low, step in zip(*parts, strict=True):
        wide = target.copy_(mine) if target.dtype == torch.float32 else mine.float()
        target.copy_(wide.mul_(step).add_(low))
    return out if whole else out.copy_(_ungrouped(values, codes, dim))


def unpacked(x: PackedTensor | Tensor) -> Tensor:
    """The numbers `[..., n, d]`, in few bits or as they were."""
    return dequantise(x) if isinstance(x, PackedTensor) else x


def check_bits(bits: object, group: int) -> None:
    """Refuse what cannot be packed, naming the value and the choices."""
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in BITS:
        raise SpecError(f"{bits!r} bits cannot be stored; choices: 8, 4, 2")
    if group < 1:
        raise SpecError(f"group={group} holds no number; choose 1 or more, such as 32")


def _grouped(x: Tensor, group: int, dim: int) -> Tensor:
    """Split a dimension into groups; the last value stands in for what the last group lacks."""
    size = x.shape[dim]
    missing = -size % group
    if missing:
        x = torch.cat([x, x.narrow(dim, size - 1, 1).expand(_with(x.shape, dim, missing))], dim)
    grouped: Tensor = x.unflatten(dim, (-1, group))
    return grouped


def _ungrouped(grouped: Tensor, like: Tensor, dim: int) -> Tensor:
    return grouped.flatten(dim - 1, dim).narrow(dim, 0, like.shape[dim])


def _with(shape: torch.Size, dim: int, size: int) -> list[int]:
    sizes = list(shape)
    sizes[dim] = size
    return sizes


def _step(low: Tensor, high: Tensor, levels: int) -> Tensor:
    """Distance of codes in the dtype of `low`, rounded up: the next number above, if it was not."""
    exact = high.float() / levels - low.float() / levels  # the range itself may overflow
    step = exact.to(low.dtype)
    above = (step.view(_WORD[step.element_size()]) + 1).view(step.dtype)
    return torch.where(step.float() < exact, above, step)


def _into_bytes(codes: Tensor, bits: int) -> Tensor:
    """`[..., K]` codes into `[..., ceil(K * bits / 8)]` bytes; byte j holds codes j, j + m, ..."""
    per = 8 // bits
    if per == 1:
        return codes.contiguous()
    parts = F.pad(codes, (0, -codes.shape[-1] % per)).unflatten(-1, (per, -1))
    packed: Tensor = parts[..., 0, :].clone()
    for place in range(1, per):
        packed |= parts[..., place, :] << (bits * place)
    return packed


def _out_of_bytes(packed: Tensor, bits: int, total: int) -> Tensor:
    if bits == 8:
        return packed
    mask, per = 2**bits - 1, 8 // bits
    parts = [(packed >> (bits * place)) & mask for place in range(per)]
    return torch.cat(parts, -1)[..., :total]


def rows_of_bytes(packs: Sequence[PackedTensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[..., N, bytes]`, lowest values and steps of packs of one form, in order of time.

    Each pack is filled up to whole groups of tokens, so that rows of many packs can lie side by
    side; the fillers count as tokens.
    """
    codes, low, step = [], [], []
    for pack in packs:
        missing = -pack.n % pack.group
        mine = _out_of_bytes(pack.codes, pack.bits, pack.n * pack.width)
        mine = F.pad(mine.unflatten(-1, (pack.n, pack.width)), (0, 0, 0, missing))
        codes.append(_into_bytes(mine, pack.bits))
        rest = 0 if pack.along_tokens else missing
        low.append(F.pad(pack.low, (0, 0, 0, rest)))
        step.append(F.pad(pack.step, (0, 0, 0, rest)))
    return torch.cat(codes, -2), torch.cat(low, -2), torch.cat(step, -2)


def dequantise_rows(
    codes: Tensor, low: Tensor, step: Tensor, form: PackedTensor, out: Tensor
) -> None:
    """Write what `rows_of_bytes` has of any number of rows `[..., N, d]` into `out`."""
    whole, dim = _out_of_bytes(codes, form.bits, form.width), -2 if form.along_tokens else -1
    group = min(form.group, whole.shape[dim])
    if out.dtype == torch.float32 and whole.shape[dim] % group == 0:  # what follows, at once
        values = out.unflatten(dim, (-1, group)).copy_(whole.unflatten(dim, (-1, group)))
        values.mul_(step.unsqueeze(dim)).add_(low.unsqueeze(dim))
        return
    n, codes = whole.shape[-2], whole.flatten(-2)
    dequantise(replace(form, codes=codes, low=low, step=step, n=n, bits=8), out)


# Parts of what a row of a cache holds, `[H, n, d]` each.
PackedPart = PackedTensor | ScaledRows | RaggedRows | ThinRows | Tensor


def dequantise_row(packs: Sequence[PackedPart], out: Tensor) -> None:
    """Write parts `[..., n, d]` one behind the other into `out`; tensors are copied."""
    start = 0
    for _, group in groupby(packs, _form):
        alike = list(group)
        first, plain = alike[0], [part for part in alike if isinstance(part, PackedTensor)]
        if not isinstance(first, PackedTensor):
            whole = first if isinstance(first, Tensor) else first.whole()
            out[..., start : start + first.shape[-2], :] = whole
            start += first.shape[-2]
            continue
        stop = start + len(plain) * first.n
        joined = replace(
            first,
            codes=torch.stack([p.codes for p in plain], -2),  # [..., P, bytes]
            low=torch.stack([p.low for p in plain], -3),
            step=torch.stack([p.step for p in plain], -3),
        )
        dequantise(joined, out[..., start:stop, :].unflatten(-2, (len(plain), -1)))
        start = stop


def _form(packed: PackedPart) -> tuple[object, ...]:
    if not isinstance(packed, PackedTensor):
        return (id(packed),)
    settings = (packed.n, packed.width, packed.bits, packed.group, packed.along_tokens)
    return (*settings, packed.codes.shape, packed.low.dtype)
