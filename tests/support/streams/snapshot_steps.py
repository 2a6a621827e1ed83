"""Sessions that keep what they archive on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stream_tools import seconds, shared_pipe, watcher

FAMILY = "llava_onevision"
MEMORY = "sink:8+window:40+retrieve:3"
FRAMES = 40


def options(folder: Path) -> dict[str, Any]:
    """Nothing stays in main memory: all that leaves the window is on disk."""
    return {"host_bytes": 0, "disk_bytes": "1GB", "folder": folder}


def opened(folder: Path) -> Any:
    return shared_pipe(FAMILY).open(MEMORY, **options(folder))


def feed(session: Any, start: int, end: int) -> None:
    clip = watcher(FAMILY).clip(FRAMES)
    session.push(
        [clip[n % FRAMES] for n in range(start, end)], seconds(end - start, 2.0, start / 2)
    )
