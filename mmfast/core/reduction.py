"""Reduction: a map from N source tokens onto M output tokens, as data."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import MmfastError

Triplets = tuple[Tensor, Tensor, Tensor]  # output, source and weight, each [..., K]


def mixed_then(first: Reduction, second: Reduction) -> Triplets:
    """Compose the triplets of `first` (N to M) and `second` (M to K).

    An output of -1 takes no part. Where both combine several tokens the triplets are dense,
    K * N of them.
    """
    if first.mix is not None and second.mix is None:
        slot = second.owner.gather(-1, first.mix.output)
        share = second.share().gather(-1, first.mix.output)
        return slot, first.mix.source, first.mix.weight * share
    if second.mix is not None and first.pure:
        return second.mix.output, first.keep.gather(-1, second.mix.source), second.mix.weight
    matrix = dense(second) @ dense(first)  # [..., K, N]
    places = torch.ones_like(matrix, dtype=torch.int64)
    output = places.cumsum(-2).flatten(-2) - 1
    source = places.cumsum(-1).flatten(-2) - 1
    return output, source, matrix.flatten(-2)


def dense(reduction: Reduction) -> Tensor:
    """Weights of all sources in all outputs, `[..., M, N]` float64."""
    eye = torch.eye(reduction.n, dtype=torch.float64, device=reduction.keep.device)
    return reduction.apply(eye.expand(*reduction.keep.shape[:-1], *eye.shape))


# Modules that merge on an accelerator, imported on first use: core imports no operations.
ACCELERATED = {"cuda": "mmfast.ops.merging"}
# Numbers of a block of rows, which fits the cache: a copy of all rows at once costs 10 times as
# much, most of it for fresh memory.
_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class Segments:
    """Pairs of a row and the output in `[-1, M)` that it is part of, `[..., K]`; -1 takes no part.

    `source` None means that entry k is source k, `weight` None that all weigh 1. `mean` divides
    every output by the number of its entries.
    """

    output: Tensor
    m: int
    source: Tensor | None = None
    weight: Tensor | None = None
    mean: bool = False

    def counts(self) -> Tensor:
        """Entries of each output, `[..., M]` int64."""
        zeros = self.output.new_zeros(*self.output.shape[:-1], max(1, self.m))
        there = (self.output >= 0).to(torch.int64)
        return zeros.scatter_add_(-1, self.output.clamp_min(0), there)[..., : self.m]

    @cached_property
    def ordered(self) -> SortedEntries:
        """The entries sorted by output, computed once."""
        output, place = self.output.to(torch.int32).sort(dim=-1, stable=True)
        source = place if self.source is None else self.source.gather(-1, place)
        weight = None if self.weight is None else self.weight.gather(-1, place).float()
        ends = torch.arange(self.m + 1, dtype=torch.int32, device=output.device)
        ends = ends.expand(*output.shape[:-1], -1).contiguous()
        offsets = torch.searchsorted(output, ends, out_int32=True)
        return SortedEntries(offsets, source.to(torch.int32), weight)


@dataclass(frozen=True, eq=False)
class SortedEntries:
    """Entries `[..., K]` sorted by output, unused ones first; sources ascend in each output.

    Entries `offsets[m]` to `offsets[m + 1]` make up output m.
    """

    offsets: Tensor
    source: Tensor
    weight: Tensor | None


def merged(x: Tensor, segments: Segments) -> Tensor:
    """Add up rows `[..., N, D]` to outputs `[..., M, D]`, at least in float32; 0 if empty."""
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
    if segments.mean:  # one division after the sum: the share of a lone token stays exactly 1
        total.div_(segments.counts().clamp_min(1)[..., None])
    return total.to(x.dtype)


def _blocks(
    flat: Tensor, segments: Segments, n: int, count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs `[k]` and weighted rows `[k, D]` of the entries that take part, in their order."""
    length, device = segments.output.shape[-1], flat.device
    output, source, weight = (
        None if t is None else t.reshape(count, length)
        for t in (segments.output, segments.source, segments.weight)
    )
    assert output is not None
    step = max(1, _BLOCK // max(1, flat.shape[1]))
    if flat.is_cuda or (source is None and weight is None and flat.dtype.itemsize > 2):
        step = max(1, output.numel())  # no copy, or no cache to fit
    many = max(1, step // max(1, length))  # leading indices of a block; of a part of one, one
    for first, at in itertools.product(range(0, count, many), range(0, length, step)):
        part = slice(first, first + many), slice(at, at + step)
        base = torch.arange(first, min(first + many, count), device=device)[:, None]
        dest, gone = output[part] + base * segments.m, output[part] < 0
        there = (~gone).flatten().nonzero()[:, 0] if bool(gone.any()) else None
        if source is None and there is None:
            rows = flat[first * n + at :][: dest.numel()]
        else:
            places = torch.arange(at, at + dest.shape[1], device=device)
            index = (places if source is None else source[part]) + base * n
            rows = flat.index_select(0, _those(index, there))
        if weight is not None:
            wide = torch.promote_types(flat.dtype, torch.float32)
            rows = rows.to(wide) * _those(weight[part], there)[:, None].to(wide)
        yield _those(dest, there), rows


def _those(x: Tensor, there: Tensor | None) -> Tensor:
    return x.flatten() if there is None else x.flatten()[there]


# Numbers to copy up to which one gather costs less than computing the places of the rows: on an
# accelerator that is two more launches, each as long as copying a million numbers.
_SMALL, _SMALL_ON_DEVICE = 1 << 14, 1 << 20


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Gather the rows `x[..., index, :]` `[..., K, D]`, chosen for each leading index on its own.

    `torch.gather` with an expanded index reads eight bytes of index for every number that it
    copies; here whole rows are copied: 10 to 15 times faster on a CPU. A slice of a longer buffer,
    transposed heads and an expanded index are read where they lie.
    """
    lead, (n, width) = x.shape[:-2], x.shape[-2:]
    if lead.numel() == 1:
        return x.reshape(n, width).index_select(0, index.reshape(-1)).view(*index.shape, width)
    small = _SMALL if x.device.type == "cpu" else _SMALL_ON_DEVICE
    if index.numel() * width <= small or x.stride(-1) != 1:
        return x.gather(-2, index[..., None].expand(*index.shape, width))
    # Along every dimension rows lie a whole number of units apart.
    whole = x.is_contiguous()
    unit = width if whole else math.gcd(*x.stride()[:-1]) or 1
    steps = [stride // unit for stride in x.stride()[:-1]]
    at = index if steps[-1] == 1 else index * steps[-1]
    for dim, (size, step) in enumerate(zip(lead, steps, strict=False)):
        if step and size > 1:
            first = torch.arange(0, size * step, step, device=x.device)
            at = at + first.view(-1, *[1] * (len(lead) - dim))
    span = sum((size - 1) * step for size, step in zip(x.shape, steps, strict=False)) + 1
    rows = x.view(-1, width) if whole else x.as_strided((span, width), (unit, 1))
    return rows.index_select(0, at.reshape(-1)).view(*index.shape, width)


@dataclass(frozen=True)
class Mix:
    """Triplets (output, source, weight), each `[..., K]`: output = sum of weight * source."""

    output: Tensor  # [..., K] in [0, M)
    source: Tensor  # [..., K] in [0, N)
    weight: Tensor  # [..., K]


@dataclass(frozen=True)
class Reduction:
    """Map from sources to outputs with the weights of their combination.

    It describes pruning, merging, pooling, frame sampling and KV eviction alike. It is data, not a
    closure, so it can be stored, composed, drawn and passed to a kernel.

    Attributes:
        keep: `[..., M]` ascending; the source whose position each output inherits.
        owner: `[..., N]` in `[-1, M)`; the output each source joins, -1 where it is dropped.
        weight: `[..., N]` share of a source in its output; None means a plain mean.
        mix: Triplets that alone define `apply`, where one source feeds several outputs.
        order: `[..., E]` outputs in the order of emission, where a method has one. A reference may
            emit one twice, or a sum of nothing, which is -1 and a row of zeros.
        pure: Every output is one untouched source, so `apply` is a gather.
        vectors: `[..., M, D]` outputs that a learned compressor computed, which `apply` returns.
        text: `[..., T, D]` what a learned compressor adds to the embeddings of the question.
        own_keys: In a cache values alone are combined, and keys are those of `keep`.
        note: What the method says of its choice, for the trace.
    """

    keep: Tensor
    owner: Tensor
    weight: Tensor | None = None
    mix: Mix | None = None
    order: Tensor | None = None
    pure: bool = False
    vectors: Tensor | None = None
    text: Tensor | None = None
    note: str = ""
    own_keys: bool = False

    @property
    def n(self) -> int:
        """Number of source tokens N."""
        return self.owner.shape[-1]

    @property
    def m(self) -> int:
        """Number of output tokens M."""
        return self.keep.shape[-1]

    @staticmethod
    def identity(
        n: int, lead: tuple[int, ...] = (), device: torch.device | None = None
    ) -> Reduction:
        """Keep all `n` tokens, for leading dims `lead`."""
        index = torch.arange(n, device=device).expand(*lead, n).contiguous()
        return Reduction(index, index.clone(), pure=True)

    @staticmethod
    def prune(keep: Tensor, n: int, ordered: bool = False) -> Reduction:
        """Keep the sources `keep` `[..., M]` of `n`, without duplicates, and drop the rest.

        They come in any order, or `ordered`, that is ascending.
        """
        return _Pruned.of(keep if ordered else keep.sort(dim=-1).values, n)

    @staticmethod
    def merge(keep: Tensor, target: Tensor, weight: Tensor | None = None) -> Reduction:
        """Fold sources into the kept ones.

        Args:
            keep: `[..., M]` kept sources, any order, no duplicates.
            target: `[..., N]` the kept SOURCE that each source joins, -1 where it is dropped;
                a kept source must join itself.
            weight: `[..., N]` share of a source in its output; None means a plain mean.
        """
        pruned = Reduction.prune(keep, target.shape[-1])
        slot = pruned.owner.gather(-1, target.clamp_min(0))
        return Reduction(pruned.keep, slot.masked_fill(target < 0, -1), weight)

    @staticmethod
    def stack(items: Sequence[Reduction], lead: tuple[int, ...]) -> Reduction:
        """Stack items of equal N and M, without vectors or text, to leading dims `lead`.

        Either all have a mix or none has.
        """
        if len(items) == 1 and not lead:
            return items[0]
        orders = [item.order for item in items if item.order is not None]
        pure = all(item.pure for item in items)
        plain = all(item.weight is None for item in items)

        def join(parts: list[Tensor]) -> Tensor:
            return torch.stack(parts).reshape(*lead, -1)

        mixes = [item.mix for item in items if item.mix is not None]
        most = max((mix.weight.shape[-1] for mix in mixes), default=0)

        def padded(name: str) -> Tensor:  # by entries of weight 0
            parts = [getattr(mix, name) for mix in mixes]
            return join([F.pad(part, (0, most - part.shape[-1])) for part in parts])

        return Reduction(
            keep=join([item.keep for item in items]),
            owner=join([item.owner for item in items]),
            mix=Mix(*map(padded, ("output", "source", "weight"))) if mixes else None,
            weight=None if plain else join([item.share() for item in items]),
            order=join(orders) if orders else None,
            pure=pure,
            own_keys=any(item.own_keys for item in items),
        )

    def sizes(self) -> Tensor:
        """Number of sources of each output, `[..., M]` int64."""
        return Segments(self.owner, self.m).counts()

    def share(self) -> Tensor:
        """Weight of each source in its output, `[..., N]`; 0 where it is dropped."""
        if self.weight is not None:
            return self.weight.masked_fill(self.owner < 0, 0)
        size = self.sizes().gather(-1, self.owner.clamp_min(0)).clamp_min(1)
        return size.to(torch.get_default_dtype()).reciprocal().masked_fill(self.owner < 0, 0)

    def apply(self, x: Tensor, *, emit: bool = False) -> Tensor:
        """Combine sources `[..., N, D]` into outputs `[..., M, D]`.

        Args:
            x: Sources; the leading dims are those of `keep`.
            emit: Return the outputs in the method's emission order instead of ascending.
        """
        if x.ndim < 2 or x.shape[-2] != self.n or x.shape[:-2] != self.keep.shape[:-1]:
            raise MmfastError(
                f"Reduction.apply got shape {list(x.shape)}; "
                f"give [{', '.join(map(str, self.owner.shape))}, D]"
            )
        if self.vectors is not None:
            return self.vectors.to(x)
        out = gather_rows(x, self.keep) if self.pure else merged(x, self.segments)
        if not emit or self.order is None:
            return out
        return gather_rows(out, self.order.clamp_min(0)).masked_fill(self.order[..., None] < 0, 0)

    def apply_keys(self, x: Tensor) -> Tensor:
        """Combine the keys `[..., N, d]` of a cache, as `apply` does, or gather those of `keep`."""
        return gather_rows(x, self.keep) if self.own_keys else self.apply(x)

    @cached_property
    def segments(self) -> Segments:
        """Sources and outputs as a sum over segments."""
        if self.mix is not None:
            return Segments(self.mix.output, self.m, self.mix.source, self.mix.weight)
        return Segments(self.owner, self.m, weight=self.weight, mean=self.weight is None)

    def expand(self, y: Tensor) -> Tensor:
        """Copy outputs `[..., M, D]` to all their sources `[..., N, D]`; dropped ones get 0."""
        if y.ndim < 2 or y.shape[-2] != self.m or y.shape[:-2] != self.keep.shape[:-1]:
            raise MmfastError(
                f"Reduction.expand got shape {list(y.shape)}; "
                f"give [{', '.join(map(str, self.keep.shape))}, D]"
            )
        rows = gather_rows(y, self.owner.clamp_min(0))
        return rows.masked_fill_((self.owner < 0)[..., None], 0)

    def then(self, other: Reduction) -> Reduction:
        """Compose this reduction (N to M) with `other` (M to K) to one (N to K).

        Raises:
            MmfastError: `other` does not start from M tokens.
        """
        if other.n != self.m:
            raise MmfastError(
                f"cannot compose: the first leaves {self.m} tokens, the second takes {other.n}"
            )
        vectors = other.vectors
        if vectors is None and self.vectors is not None:
            vectors = other.apply(self.vectors)
        text = self.text if other.text is None else other.text
        if self.text is not None and other.text is not None:
            text = self.text + other.text
        mixed = self.mix is not None or other.mix is not None
        slot = self.owner.clamp_min(0)
        owner = other.owner.gather(-1, slot).masked_fill(self.owner < 0, -1)
        plain = (other.pure and self.weight is None) or (self.pure and other.weight is None)
        plain = plain or mixed
        weight = None if plain else self.share() * other.share().gather(-1, slot)
        return Reduction(
            keep=self.keep.gather(-1, other.keep),
            owner=owner,
            weight=None if weight is None else weight.masked_fill(owner < 0, 0),
            mix=Mix(*mixed_then(self, other)) if mixed else None,
            order=other.order,
            pure=self.pure and other.pure,
            vectors=vectors,
            text=text,
        )

    def select(self, index: int) -> Reduction:
        """Return item `index` along the first leading dimension."""
        mix = self.mix and Mix(
            self.mix.output[index], self.mix.source[index], self.mix.weight[index]
        )
        parts = (self.weight, self.order, self.vectors, self.text)
        weight, order, vectors, text = (None if t is None else t[index] for t in parts)
        return replace(
            self,
            keep=self.keep[index],
            owner=self.owner[index],
            weight=weight,
            mix=mix,
            order=order,
            vectors=vectors,
            text=text,
        )

    def check(self) -> None:
        """Verify the invariants: ascending unique keeps in range, owners in range and consistent.

        Raises:
            MmfastError: Names the broken invariant.
        """
        keep, owner = self.keep, self.owner
        slots = torch.arange(self.m, device=keep.device).expand_as(keep)
        rules = {
            "keep is not strictly ascending": bool((keep.diff(dim=-1) <= 0).any()),
            "keep is out of range": bool(((keep < 0) | (keep >= self.n)).any()),
            "owner is out of range": bool(((owner < -1) | (owner >= self.m)).any()),
            "a kept source does not own its slot": bool(
                (owner.gather(-1, keep.clamp(0, self.n - 1)) != slots).any()
            ),
        }
        for rule, broken in rules.items():
            if broken:
                raise MmfastError(f"invalid Reduction of {self.n} onto {self.m} tokens: {rule}")


class _Pruned(Reduction):
    """A choice whose `owner` is found when it is first read: what gathers alone never reads it."""

    _n: int | None = None

    @staticmethod
    def of(keep: Tensor, n: int) -> Reduction:
        """Keep the sources `keep` `[..., M]`, ascending, of `n`."""
        found = object.__new__(_Pruned)
        found.__dict__.update(keep=keep, pure=True, _n=n)  # the other fields have their defaults
        return found

    @property
    def n(self) -> int:
        """Number of source tokens N."""
        return self.owner.shape[-1] if self._n is None else self._n

    @cached_property
    def owner(self) -> Tensor:
        """`[..., N]`; the output of each source, -1 where it is dropped."""
        keep = self.keep
        owner = torch.full((*keep.shape[:-1], self.n), -1, dtype=torch.int64, device=keep.device)
        slots = torch.arange(keep.shape[-1], device=keep.device).expand_as(keep)
        return owner.scatter_(-1, keep, slots)
