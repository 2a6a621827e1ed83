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
    for similar in (1.0, -0.1, float("nan")):
        with pytest.raises(MmfastError, match="similar"):
            FrameGate(similar=similar)


def test_similar_frames_are_skipped_by_chance() -> None:
    """The share that is skipped is that of StreamDiffusion's filter, from the pixels themselves."""
    a, b = picture(96, 128), picture(96, 128, seed=1)
    for weight, eta in ((0.05, 0.98), (0.1, 0.98), (0.1, 0.9), (1.0, 0.98)):
        mixed = ((1 - weight) * a + weight * b).astype(np.uint8)
        x, y = (each.astype(np.float64).ravel() for each in (a, mixed))
        cosine = (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())
        wanted = max(0.0, (cosine - eta) / (1 - eta))
        gate, cells = FrameGate(0.0, similar=eta, seed=3), cell_means(a)
        states = [GateState(cells, (96, 128), seen=number) for number in range(400)]
        skipped = sum(not gate.step(state, mixed)[1] for state in states)
        assert abs(skipped / 400 - wanted) < 4 * (wanted * (1 - wanted) / 400) ** 0.5 + 0.01
        assert FrameGate(similar=eta, longest=5).step(GateState(cells, (96, 128), 5), mixed)[1]
    assert wanted == 0.0 == skipped  # another picture always passes
    assert judged([a, a, a], FrameGate(0.0, similar=0.5)) == [True, False, False]
    black = np.zeros((32, 32, 3), np.uint8)
    assert judged([black, black, black + 9], FrameGate(similar=0.9)) == [True, False, True]


def test_chance_does_not_depend_on_how_a_stream_is_cut() -> None:
    frames = [picture(seed=0) // 2 + picture(seed=s) // 8 for s in range(30)]
    gate = FrameGate(similar=0.97, seed=1)
    whole = judged(frames, gate)
    assert 3 < whole.count(True) < 27
    assert whole != judged(frames, FrameGate(similar=0.97, seed=2))
    state, found = gate.start(), []
    for frame in frames:
        state = GateState.restore(state.snapshot())
        state, passed = gate.step(state, frame)
        found.append(passed)
    assert found == whole
    assert FrameGate().settings == [0.03, None]  # sessions saved without it can be restored
    assert gate.settings == [0.03, None, 0.97, 1]
