"""Prediction of image patches from their neighbours, and the tiles that cover an overview."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_PARTS = 8  # of a picture on a CPU, whose cache holds one of them
METRICS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda difference: difference.abs_().amax(-1).double(),
    "mae": lambda difference: difference.abs_().mean(-1, dtype=torch.float64),
    "rmse": lambda difference: difference.square_().mean(-1, dtype=torch.float64).sqrt(),
}


def surprise(image: Tensor, metric: str) -> Tensor:
    """Distance of every patch `[..., h, w, P]` from its prediction, `[..., h, w]` float64.

    With A on the left, B above and C above A: if C is closer to A than to B, an edge runs between
    the rows' pasts and the prediction is B, else it is A. The first row is predicted from the left,
    the first column from above; the first patch has no prediction and is infinitely far.
    """
    distance, (*lead, height, width, _) = METRICS[metric], image.shape
    left = torch.empty(*lead, height, width - 1, dtype=torch.float64, device=image.device)
    above = torch.empty(*lead, height - 1, width, dtype=torch.float64, device=image.device)
    step = -(-height // _PARTS) if image.device.type == "cpu" else height
    for start in range(0, height, step):
        stop, second = min(start + step, height), max(start, 1)
        rows, lower = image[..., start:stop, :, :], image[..., second:stop, :, :]
        left[..., start:stop, :] = distance(rows[..., 1:, :] - rows[..., :-1, :])
        upper = image[..., second - 1 : stop - 1, :, :]
        above[..., second - 1 : stop - 1, :] = distance(lower - upper)
    result = above.new_full(image.shape[:-1], torch.inf)
    result[..., 0, 1:] = left[..., 0, :]
    result[..., 1:, 0] = above[..., 0]
    # C to B is a step along the row above, C to A one down the column on the left.
    edge = above[..., :-1] < left[..., :-1, :]
    result[..., 1:, 1:] = torch.where(edge, above[..., 1:], left[..., 1:, :])
    return result


def unpredicted(image: Tensor, metric: str, threshold: float, *, anchored: bool) -> Tensor:
    """Mark the patches of `[..., h, w, P]` that do not match their prediction, and the first one.

    Two patches match if their distance is at most `threshold`. The prediction is B if C matches A
    and not B, else A. `anchored` predicts from the picture that a decoder would restore, where a
    dropped patch equals its prediction; errors then cannot add up along a slow gradient.
    """
    place = torch.ones(image.shape[-3:-1], dtype=torch.bool, device=image.device).nonzero()[1:]
    diagonal = place.sum(-1)
    # Only anchored prediction needs an order; patches of a diagonal are independent.
    steps, seen = (place,), image
    if anchored:
        steps = place[diagonal.argsort(stable=True)].split(diagonal.bincount()[1:].tolist())
        seen = image.clone()
    kept = torch.zeros(image.shape[:-1], dtype=torch.bool, device=image.device)
    kept[..., 0, 0] = True
    for step in steps:
        y, x = step.unbind(-1)
        guess = _prediction(seen, y, x, metric, threshold)
        new = METRICS[metric](image[..., y, x, :] - guess) > threshold
        kept[..., y, x] = new
        if anchored:
            seen[..., y, x, :] = torch.where(new[..., None], image[..., y, x, :], guess)
    return kept


def _prediction(seen: Tensor, y: Tensor, x: Tensor, metric: str, threshold: float) -> Tensor:
    """Predictions `[..., L, P]` for patches at rows `y` and columns `x`."""
    up, back = (y - 1).clamp_min(0), (x - 1).clamp_min(0)
    a, b, c = seen[..., y, back, :], seen[..., up, x, :], seen[..., up, back, :]
    to_a, to_b = METRICS[metric](c - a) <= threshold, METRICS[metric](c - b) <= threshold
    from_above = ((to_a & ~to_b) | (x == 0)) & (y > 0)
    return torch.where(from_above[..., None], b, a)


def tile_cover(tile: Tensor, place: Tensor | None) -> Tensor:
    """The tile that covers each overview token, `[n0]`; -1 where no tile does.

    `tile` `[N]` int64 is 0 for the overview. With places (`[N, 3]`: frame, row and column), the
    tiles lie in one mosaic over the whole image and the overview is scaled onto it. Without, or
    where the places of two tiles overlap (each counts from its own corner), the overview is cut
    into as many consecutive runs as there are tiles.
    """
    overview = tile == 0
    numbers = tile[~overview].unique()
    if place is not None:
        boxes = torch.stack([_box(place[tile == number]) for number in numbers])
        if not _overlapping(boxes):
            return _by_place(place[overview], boxes, numbers)
    n = int(overview.sum())
    run = torch.arange(n, device=tile.device) * len(numbers) // max(n, 1)
    covering: Tensor = numbers[run]
    return covering


def _box(place: Tensor) -> Tensor:
    """Rows and columns that places `[n, 3]` span: `[top, left, bottom + 1, right + 1]`."""
    return torch.cat([place.amin(0)[1:], place.amax(0)[1:] + 1])


def _overlapping(boxes: Tensor) -> bool:
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = (low < high).all(-1).fill_diagonal_(False)
    return bool(shared.any())


def _by_place(overview: Tensor, boxes: Tensor, numbers: Tensor) -> Tensor:
    if not len(overview):
        return numbers[:0]
    own = _box(overview)
    corner, end = boxes[:, :2].amin(0), boxes[:, 2:].amax(0)
    # Twice the centre of each token, scaled in whole numbers: no rounding at the seams.
    size = own[2:] - own[:2]
    centre = (2 * (overview[:, 1:] - own[:2]) + 1) * (end - corner)  # [n0, 2]
    low = 2 * (boxes[None, :, :2] - corner) * size  # [1, P, 2]
    high = 2 * (boxes[None, :, 2:] - corner) * size
    inside = ((low <= centre[:, None]) & (centre[:, None] < high)).all(-1)  # [n0, P]
    return numbers[inside.byte().argmax(-1)].masked_fill(~inside.any(-1), -1)
