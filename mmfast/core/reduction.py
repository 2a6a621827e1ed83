"""Reduction: a map from N source tokens onto M output tokens, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.gather_rows import gather_rows
from mmfast.core.mixing import mixed_then
from mmfast.core.segments import Segments, merged


@dataclass(frozen=True)
class Mix:
    """Triplets (output, source, weight), each `[..., K]`: output = sum of weight * source."""

    output: Tensor  # [..., K] in [0, M)
    source: Tensor  # [..., K] in [0, N)
    weight: Tensor  # [..., K]


@dataclass(frozen=True)
class Reduction:
    """Which sources each output stands for, and how they are combined.

    Pruning, merging, pooling, frame sampling and KV eviction are all this. It is data, not a
    closure, so it can be stored, composed, drawn and handed to a kernel.

    Attributes:
        keep: `[..., M]` ascending; the source whose position each output inherits.
        owner: `[..., N]` in `[-1, M)`; the output each source joins, -1 where it is dropped.
        weight: `[..., N]` share of a source in its output; None means a plain mean.
        mix: Triplets that alone define `apply`, where one source feeds several outputs.
        order: `[..., M]` permutation from ascending to emission order, where a method has one.
        pure: Every output is one untouched source, so `apply` is a gather.
    """

    keep: Tensor
    owner: Tensor
    weight: Tensor | None = None
    mix: Mix | None = None
    order: Tensor | None = None
    pure: bool = False

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
    def prune(keep: Tensor, n: int) -> Reduction:
        """Keep the sources `keep` `[..., M]` (any order, no duplicates) of `n`, drop the rest."""
        keep = keep.sort(dim=-1).values
        owner = torch.full((*keep.shape[:-1], n), -1, dtype=torch.int64, device=keep.device)
        slots = torch.arange(keep.shape[-1], device=keep.device).expand_as(keep)
        return Reduction(keep, owner.scatter_(-1, keep, slots), pure=True)

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
        """Items of equal N and M, without a mix, as one Reduction with leading dims `lead`."""
        if len(items) == 1 and not lead:
            return items[0]
        orders = [item.order for item in items if item.order is not None]
        pure = all(item.pure for item in items)
        plain = all(item.weight is None for item in items)

        def join(parts: list[Tensor]) -> Tensor:
            return torch.stack(parts).reshape(*lead, -1)

        return Reduction(
            keep=join([item.keep for item in items]),
            owner=join([item.owner for item in items]),
            weight=None if plain else join([item.share() for item in items]),
            order=join(orders) if orders else None,
            pure=pure,
        )

    def sizes(self) -> Tensor:
        """How many sources each output holds, `[..., M]` int64."""
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
        out = gather_rows(x, self.keep) if self.pure else merged(x, self.segments)
        return gather_rows(out, self.order) if emit and self.order is not None else out

    @cached_property
    def segments(self) -> Segments:
        """The same sources and outputs as a sum over segments."""
        if self.mix is not None:
            return Segments(self.mix.output, self.m, self.mix.source, self.mix.weight)
        return Segments(self.owner, self.m, weight=self.weight, mean=self.weight is None)

    def expand(self, y: Tensor) -> Tensor:
        """Copy outputs `[..., M, D]` to all their sources `[..., N, D]`; dropped ones get 0."""
        rows = gather_rows(y, self.owner.clamp_min(0))
        return rows.masked_fill_((self.owner < 0)[..., None], 0)

    def then(self, other: Reduction) -> Reduction:
        """This reduction (N to M) followed by `other` (M to K), as one (N to K).

        Raises:
            MmfastError: `other` does not start from M tokens.
        """
        if other.n != self.m:
            raise MmfastError(
                f"cannot compose: the first leaves {self.m} tokens, the second takes {other.n}"
            )
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
        )

    def select(self, index: int) -> Reduction:
        """Item `index` along the first leading dimension."""

        def take(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[index]

        mix = self.mix and Mix(
            *(t[index] for t in (self.mix.output, self.mix.source, self.mix.weight))
        )
        return replace(
            self,
            keep=self.keep[index],
            owner=self.owner[index],
            weight=take(self.weight),
            mix=mix,
            order=take(self.order),
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
