"""The gate before the encoder: what it skips, what it lets through, and what it remembers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmfast.core.errors import MmfastError
from mmfast.frontends.changes import FrameGate, GateState, Pixels, cell_means


def picture(height: int = 120, width: int = 160, seed: int = 0) -> Pixels:
    coarse = np.random.default_rng(seed).integers(40, 200, (6, 8, 3))
    return np.kron(coarse, np.ones((height // 6, width // 8, 1))).astype(np.uint8)


def judged(frames: list[Pixels], gate: FrameGate | None = None) -> list[bool]:
    gate = gate or FrameGate()
    state, found = gate.start(), []
    for frame in frames:
        state, passed = gate.step(state, frame)
        found.append(passed)
    assert state.seen == len(frames) and state.skipped == found.count(False)
    return found


def test_equal_frames_are_skipped_and_cuts_are_not() -> None:
    a, b = picture(), picture(seed=1)
    assert judged([a, a, a, b, b, a]) == [True, False, False, True, False, True]


def test_noise_of_a_sensor_is_no_change() -> None:
    rng, a = np.random.default_rng(2), picture(480, 640)
    noisy = [(a + rng.normal(0, 6, a.shape)).clip(0, 255).astype(np.uint8) for _ in range(4)]
    assert judged(noisy) == [True, False, False, False]


def test_a_small_thing_that_moves_is_seen() -> None:
    frames = []
    for place in (20, 60, 100):
        frame = picture(240, 320)
        frame[place : place + 14, place : place + 14] = 255  # 0.26 % of the picture
        frames.append(frame)
    assert judged(frames) == [True, True, True]


def test_slow_drift_is_noticed_against_the_last_frame_let_through() -> None:
    frames = [np.full((64, 64, 3), 60 + step, np.uint8) for step in range(24)]  # 0.4 % a frame
    found = judged(frames)
    assert found[1] is False
    assert 2 <= found.count(True) <= 4


def test_no_more_than_the_longest_run_is_skipped() -> None:
    found = judged([picture()] * 7, FrameGate(longest=2))
    assert found == [True, False, False, True, False, False, True]


def test_another_size_passes_and_small_frames_work() -> None:
    assert judged([picture(), picture()[:60], picture()[:60]]) == [True, True, False]
    tiny = np.zeros((5, 3, 3), np.uint8)
    assert judged([tiny, tiny, tiny + 255]) == [True, False, True]


def test_tensors_equal_arrays_and_means_are_right() -> None:
    frame = picture(70, 90)
    state, _ = FrameGate().step(GateState(), torch.from_numpy(frame))
    assert state.cells is not None
    assert torch.equal(state.cells, cell_means(frame))
    flat = cell_means(np.full((333, 517, 3), 51, np.uint8))
    assert flat.shape == (32, 32, 3)
    assert torch.allclose(flat, torch.tensor(0.2))


def test_the_state_is_a_value() -> None:
    gate, a, b = FrameGate(), picture(), picture(seed=1)
    state, _ = gate.step(gate.start(), a)
    again = GateState.restore(state.snapshot())
    assert gate.step(state, b)[1] and gate.step(again, b)[1]
    assert not gate.step(state, a)[1] and not gate.step(again, a)[1]


@pytest.mark.parametrize("frame", [np.zeros((4, 4)), np.zeros((4, 4, 3)), np.zeros((0, 4, 3))])
def test_wrong_frames_are_refused(frame: Pixels) -> None:
    with pytest.raises(MmfastError, match="uint8"):
        FrameGate().step(GateState(), frame)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(MmfastError, match="threshold"):
        FrameGate(1.5)
    with pytest.raises(MmfastError, match="longest"):
        FrameGate(longest=0)
