"""Lengths of what the values of a cache layer add to the output of its attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import ModelError

_OUT = ("o_proj", "out_proj", "dense")


@torch.no_grad()
def added_lengths(attention: Any, values: Tensor) -> Tensor:
    """Sum of magnitudes `[H, n]` float32 of what values `[H, n, d]` add behind the projection.

    At an attention of 1, mean over the query heads of a key head. ModelError where the attention
    has no output projection of a name that is known.
    """
    found: Any = next((m for m in (getattr(attention, n, None) for n in _OUT) if m), None)
    if not isinstance(found, nn.Module):
        raise ModelError(
            f"{type(attention).__name__} has no {_OUT[0]}, which this policy weighs values by; "
            "use 'snapkv', which reads attention alone"
        )
    project: Any = found
    heads, _, width = values.shape
    # The projection of unit vectors is its matrix, however it stores or adapts that.
    ones = torch.eye(project.in_features, dtype=values.dtype, device=values.device)
    matrix = (project(ones) - project(torch.zeros_like(ones[:1]))).float()
    blocks = matrix.view(heads, -1, width, matrix.shape[-1])  # [H, G, d, D]
    lengths = [
        torch.stack([(mine @ block).abs().sum(-1) for block in group]).mean(0)
        for mine, group in zip(values.float(), blocks, strict=True)
    ]
    return torch.stack(lengths)
