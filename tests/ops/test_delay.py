"""The delay pattern of codebooks: there and back, whole and step by step."""

from __future__ import annotations

import pytest
import torch
from oracles_ops import undelay

from mmfast.core.errors import SpecError
from mmfast.ops.codebooks import DelayRing, delay


@pytest.mark.parametrize("delays", [(0, 1, 1), (0, 1, 2), (2, 0, 1), (0, 0, 0)])
def test_codes_move_by_their_delay_and_back(delays: tuple[int, ...]) -> None:
    codes = torch.arange(2 * 3 * 5).view(2, 3, 5)
    steps = delay(codes, delays, fill=-1)
    assert steps.shape == (2, 3, 5 + max(delays))
    for book, lag in enumerate(delays):
        for step in range(steps.shape[2]):
            there = 0 <= step - lag < 5
            want = codes[:, book, step - lag] if there else torch.tensor([-1, -1])
            assert torch.equal(steps[:, book, step], want)
    assert torch.equal(undelay(steps, delays), codes)


@pytest.mark.parametrize("delays", [(0, 1, 1), (0, 1, 2), (2, 0, 1)])
def test_a_ring_is_the_same_step_by_step(delays: tuple[int, ...]) -> None:
    codes = torch.arange(2 * 3 * 6).view(2, 3, 6)
    ring, longest = DelayRing(delays, fill=-1), max(delays)
    steps = delay(codes, delays, fill=-1)
    there, back, frames = ring.start(2), ring.start(2), []
    for step in range(6):
        old = there.ring.clone()
        after, spread = ring.spread(there, codes[:, :, step])
        assert torch.equal(there.ring, old)  # the state is a value
        there = after
        assert torch.equal(spread, steps[:, :, step])
        back, frame, whole = ring.gather(back, spread)
        assert bool(whole.all()) == (step >= longest)
        if step >= longest:
            frames.append(frame)
    assert torch.equal(torch.stack(frames, dim=2), codes[:, :, : 6 - longest])


def test_delays_that_do_not_fit_are_named() -> None:
    with pytest.raises(SpecError, match=r"\[0, 1\] do not fit 3 codebooks"):
        delay(torch.zeros(1, 3, 2, dtype=torch.long), [0, 1], 0)
    with pytest.raises(SpecError, match="-1"):
        DelayRing((0, -1), 0)
