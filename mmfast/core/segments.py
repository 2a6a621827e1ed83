"""Weighted sums of rows over segments: what every merge of tokens comes down to."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# What merges on an accelerator, found by name on first use as the methods are: core imports none.
ACCELERATED = {"cuda": "mmfast.ops.segment_merge"}
# Numbers of a block of rows on their way through the cache: a copy of all of them costs 10 times
# as much, most of it for fresh memory.
_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class Segments:
    """Which rows make up which outputs, one entry per pair.

    Attributes:
        output: `[..., K]` int64 in `[-1, M)`; an entry of -1 takes no part.
        m: Outputs M.
        source: `[..., K]` int64 in `[0, N)`; None where entry k is source k.
        weight: `[..., K]` what a source counts in its output; None is 1.
        mean: Divide every output by the number of its entries.
    """

    output: Tensor
    m: int
    source: Tensor | None = None
    weight: Tensor | None = None
    mean: bool = False

    def counts(self) -> Tensor:
        """Entries of each output, `[..., M]` int64."""
        zeros = self.output.new_zeros(*self.output.shape[:-1], self.m)
        return zeros.scatter_add_(-1, self.output.clamp_min(0), (self.output >= 0).to(torch.int64))

    @cached_property
    def ordered(self) -> Ordered:
        """The entries one output after another, made once however often they are used."""
        output, place = self.output.to(torch.int32).sort(dim=-1, stable=True)
        source = place if self.source is None else self.source.gather(-1, place)
        weight = None if self.weight is None else self.weight.gather(-1, place).float()
        ends = torch.arange(self.m + 1, dtype=torch.int32, device=output.device)
        ends = ends.expand(*output.shape[:-1], -1).contiguous()
        offsets = torch.searchsorted(output, ends, out_int32=True)
        return Ordered(offsets, source.to(torch.int32), weight)


@dataclass(frozen=True, eq=False)
class Ordered:
    """Entries sorted by output, those that take no part in front; sources ascend in each.

    Attributes:
        offsets: `[..., M + 1]` int32; entries `offsets[m]` to `offsets[m + 1]` make up output m.
        source: `[..., K]` int32.
        weight: `[..., K]` float32, or None.
    """

    offsets: Tensor
    source: Tensor
    weight: Tensor | None


def merged(x: Tensor, segments: Segments) -> Tensor:
    """Add up rows `[..., N, D]` to outputs `[..., M, D]` of the same dtype, at least in float32.

    An output without entries is 0.
    """
    module = ACCELERATED.get(x.device.type)
    if module is None:
        return add_rows(x, segments)
    out: Tensor = importlib.import_module(module).segment_merge(x, segments)
    return out


def add_rows(x: Tensor, segments: Segments) -> Tensor:
    """`merged` in plain torch, for any device and with gradients."""
    lead, (n, width) = x.shape[:-2], x.shape[-2:]
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(lead.numel() * segments.m, width, dtype=wide, device=x.device)
    for dest, rows in _blocks(x.reshape(-1, width), segments, n, lead.numel()):
        if x.is_cuda:  # sorts first: index_add_ adds in any order there, and rounds differently
            total.index_put_((dest,), rows.to(wide), accumulate=True)
        else:
            total.index_add_(0, dest, rows.to(wide))
    total = total.view(*lead, segments.m, width)
    if segments.mean:  # one division behind the sum: the share of a lone token stays exactly 1
        total.div_(segments.counts().clamp_min(1)[..., None])
    return total.to(x.dtype)


def _blocks(
    flat: Tensor, segments: Segments, n: int, count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs `[k]` and weighted rows `[k, D]` of the entries that take part, in their order."""
    dest, source, weight = segments.output, segments.source, segments.weight
    gone = dest < 0
    if count > 1:
        base = torch.arange(count, device=flat.device)[:, None]
        dest = dest.reshape(count, -1) + base * segments.m
        source = None if source is None else source.reshape(count, -1) + base * n
    dest = dest.reshape(-1)
    source, weight = (None if t is None else t.reshape(-1) for t in (source, weight))
    if bool(gone.any()):
        there = (~gone).reshape(-1).nonzero()[:, 0]
        dest, source = dest[there], there if source is None else source[there]
        weight = None if weight is None else weight[there]
    step = max(1, _BLOCK // max(1, flat.shape[1]))
    if flat.is_cuda or (source is None and weight is None and flat.dtype.itemsize > 2):
        step = max(1, len(dest))  # nothing to copy, or no cache to stay in
    for at in range(0, len(dest), step):
        part = slice(at, at + step)
        rows = flat[part] if source is None else flat.index_select(0, source[part])
        if weight is not None:
            wide = torch.promote_types(flat.dtype, torch.float32)
            rows = rows.to(wide) * weight[part, None].to(wide)
        yield dest[part], rows
