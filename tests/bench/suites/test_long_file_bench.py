"""The benchmark of the reader: equal frames or no figure, on a clip made on the spot."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mmfast.bench.registry import quiet
from mmfast.bench.suites import stream
from mmfast.bench.suites.stream import ClipShape, write_clip
from mmfast.core.errors import MmfastError
from mmfast.frontends.video import threads
from mmfast.frontends.video.reader import read_video

SMALL = ClipShape(width=160, height=96, seconds=6, rate=12, gop=24)


@pytest.fixture(autouse=True)
def short_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_WORTH", 0)


def test_rows_of_a_small_clip() -> None:
    found = stream.reader(quiet, SMALL, rounds=2)
    assert [row["job"] for row in found] == ["PyAV, one thread", "PyAV, frame threads", "slices"]
    assert found[0]["speedup"] == 1 and found[0]["clip"] == "160x96, 6 s, 12/s, H.264, GOP 24"
    for row in found:
        assert row["frames"] == 6 and row["identical"] and row["n"] == 2
        assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"] and row["speedup"] > 0
        assert json.dumps(row, allow_nan=False)


def test_other_frames_give_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "iter_video", lambda *_, **__: [])
    with pytest.raises(MmfastError, match="'slices' reads other frames"):
        stream.reader(quiet, SMALL, rounds=1)


def test_the_scene_moves_and_is_textured(tmp_path: Path) -> None:
    clip = read_video(write_clip(tmp_path / "a.mp4", SMALL), frames=6)
    grey = clip.frames.astype(float).mean(-1)
    assert min(np.abs(a - b).mean() for a, b in pairwise(grey)) > 2
    assert min(frame.std() for frame in grey) > 15
    assert statistics.mean(np.abs(np.diff(frame, axis=1)).mean() for frame in grey) > 1
