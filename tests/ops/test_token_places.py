"""Places of tokens for all layers, what attention is given as a mask, and room in buffers."""

from __future__ import annotations

import pytest
import torch

from mmfast.ops.stream_cache import Placer, RowBuffer


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


@pytest.mark.parametrize("forked", [False, True])
def test_a_bounded_buffer_gives_the_room_of_a_long_piece_back(forked: bool) -> None:
    buffer = RowBuffer(64, bounded=True)
    rows = torch.arange(500.0)[None, :, None].expand(2, -1, 3)
    buffer.write(rows, -rows)
    buffer.length = 500
    branch = buffer.fork(4) if forked else None
    buffer.pick(torch.tensor([0, 3, 499]))
    assert buffer.data is not None and buffer.data.untyped_storage().nbytes() == 2 * 2 * 64 * 3 * 4
    assert torch.equal(buffer.read(1), -rows[:, [0, 3, 499]])
    assert branch is None or torch.equal(branch.read(0), rows)
    buffer.write(rows[:, :90], rows[:, :90])  # and grows again
    assert torch.equal(buffer.read(0, 0, 93), torch.cat([rows[:, [0, 3, 499]], rows[:, :90]], 1))
