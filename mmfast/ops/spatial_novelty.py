"""How little a token resembles its neighbours in the picture."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.ops.paired_cosine import paired_cosine


def spatial_novelty(frame: Tensor, rows: int, columns: int) -> Tensor:
    """One minus the larger cosine with the token on the left and the one above.

    Args:
        frame: `[..., rows * columns, D]`.
        rows: Rows of the raster.
        columns: Tokens in a row.

    Returns:
        `[..., rows * columns]` float64; infinite for the first token, which has no such neighbour.
    """
    image = frame.unflatten(-2, (rows, columns))
    alike = torch.full(image.shape[:-1], -torch.inf, dtype=torch.float64, device=image.device)
    alike[..., 1:] = paired_cosine(image[..., 1:, :], image[..., :-1, :])
    above = paired_cosine(image[..., 1:, :, :], image[..., :-1, :, :])
    alike[..., 1:, :] = torch.maximum(alike[..., 1:, :], above)
    return 1.0 - alike.flatten(-2)
