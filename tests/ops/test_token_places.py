"""Places of tokens for all layers: what attention is given as a mask."""

from __future__ import annotations

import pytest
import torch

from mmfast.ops.stream_cache import Placer


def _placer(device: str, window: int) -> Placer:
    place = torch.device(device)
    return Placer(lambda n: (torch.zeros(n, 4, device=place),) * 2, place, torch.float32, window)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("start", [1, 13, 500, 700])
def test_a_mask_begins_where_vectors_do_except_on_the_cpu(start: int, window: int) -> None:
    n = 5
    mask = _placer("cpu", window).even(start, n).mask
    assert mask is not None
    at, keys = torch.arange(start, start + n)[:, None], torch.arange(start + n)[-mask.shape[1] :]
    seen = (keys <= at) & (keys > at - (window or 1 << 20))
    assert torch.equal(mask == 0, seen) and bool((mask[~seen] == -torch.inf).all())
    there = _placer("meta", window).even(start, n).mask
    assert there is not None and there.shape == mask.shape
    assert there.is_contiguous() and there.storage_offset() == 0
