"""One tensor in two precisions: tokens that matter in more bits than the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.core.reduction import Reduction
from mmfast.ops.complement import complement
from mmfast.ops.gather_rows import gather_rows
from mmfast.ops.grouped_topk import marked
from mmfast.ops.quantise import Packed, dequantise, quantise

Part = Packed | Tensor | None


@dataclass(frozen=True, eq=False)
class MixedPacked:
    """A tensor `[..., n, d]` whose tokens are stored in two precisions.

    Attributes:
        important: `[..., n]` bool, equally many in every row: the tokens in more bits.
        high: Those tokens, packed or (16 bits) as they were; None where there are none.
        low: The other tokens, likewise.
    """

    important: Tensor
    high: Part
    low: Part

    @property
    def nbytes(self) -> int:
        """Bytes of both parts and of the mask."""
        parts = (self.important, self.high, self.low)
        return sum(part.nbytes for part in parts if part is not None)

    def snapshot(self) -> dict[str, Any]:
        """Tensors and numbers by name; `restore` makes the same object of them."""
        parts = {"high": self.high, "low": self.low}
        trees = {
            name: part.snapshot() if isinstance(part, Packed) else part
            for name, part in parts.items()
        }
        return {"important": self.important, **trees}

    @classmethod
    def restore(cls, tree: Mapping[str, Any]) -> MixedPacked:
        """The inverse of `snapshot`."""
        high, low = (
            Packed.restore(part) if isinstance(part, Mapping) else part
            for part in (tree["high"], tree["low"])
        )
        return cls(tree["important"], high, low)


def pack_mixed(
    x: Tensor, important: Reduction, bits: tuple[int, int], *, keys: bool = False, group: int = 32
) -> MixedPacked:
    """Store the tokens that `important` keeps in `bits[0]` bits, the others in `bits[1]`.

    Args:
        x: Keys or values `[..., n, d]`; leading dims as those of `important.keep`.
        important: Which tokens matter, from a policy such as `zipvl`.
        bits: 16 (as they are), 8, 4 or 2, for both parts.
        keys: Groups along the tokens, as keys need them; see `ops.quantise`.
        group: Numbers that share a scale.
    """
    keep, n = important.keep, x.shape[-2]
    parts = [
        _pack(gather_rows(x, index), width, group, keys)
        for index, width in zip((keep, complement(keep, n)), bits, strict=True)
    ]
    return MixedPacked(important.owner >= 0, parts[0], parts[1])


def unpack_mixed(packed: MixedPacked) -> Tensor:
    """The tensor `[..., n, d]`, every token at its place."""
    index = torch.cat([marked(packed.important), marked(~packed.important)], -1)
    parts = (packed.high, packed.low)
    rows = [dequantise(p) if isinstance(p, Packed) else p for p in parts if p is not None]
    joined = torch.cat(rows, -2)
    places = torch.arange(index.shape[-1], device=index.device).expand_as(index)
    return gather_rows(joined, torch.empty_like(index).scatter_(-1, index, places))


def _pack(x: Tensor, bits: int, group: int, keys: bool) -> Part:
    if x.shape[-2] == 0:
        return None
    return x if bits == 16 else quantise(x, bits, group, along_tokens=keys)
