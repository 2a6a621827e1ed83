"""Many packed parts of one row, unpacked next to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from mmfast.ops.quantise import Packed, dequantise


def dequantise_row(packs: Sequence[Packed], out: Tensor) -> None:
    """Write parts `[..., n, d]` one behind the other; neighbours of one form are read at once.

    Args:
        packs: In order, at least one.
        out: `[..., N, d]`, N the tokens of all parts together.
    """
    start = 0
    for _, group in groupby(packs, _form):
        alike = list(group)
        stop = start + len(alike) * alike[0].n
        joined = replace(
            alike[0],
            codes=torch.stack([p.codes for p in alike], -2),  # [..., P, bytes]
            low=torch.stack([p.low for p in alike], -3),
            step=torch.stack([p.step for p in alike], -3),
        )
        dequantise(joined, out[..., start:stop, :].unflatten(-2, (len(alike), -1)))
        start = stop


def _form(packed: Packed) -> tuple[object, ...]:
    settings = (packed.n, packed.width, packed.bits, packed.group, packed.along_tokens)
    return (*settings, packed.codes.shape, packed.low.dtype)
