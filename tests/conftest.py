"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.register_assert_rewrite("reducer_checks")

from media_factory import write_video  # noqa: E402


@pytest.fixture(scope="session")
def clip_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty-eight numbered frames, 30 per second, H.264 with B-frames in mp4."""
    return write_video(tmp_path_factory.mktemp("clips") / "clip.mp4")
