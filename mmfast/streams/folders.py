"""Locks, links and durable writes of folders."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

if sys.platform != "win32":  # there folders are not locked, and none is taken for abandoned
    import fcntl


def lock(path: Path) -> int:
    """Create `path` and lock it until the returned descriptor is closed or the process ends.

    Raises:
        BlockingIOError: Another holds it.
        OSError: It cannot be made.
    """
    held = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        if sys.platform != "win32":
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held


def locked(path: Path) -> bool:
    """Whether somebody holds the lock at `path`, or may be about to take it."""
    if sys.platform == "win32":
        return True
    try:
        held = os.open(path, os.O_RDWR)
    except OSError:
        return True  # no lock file yet, or not ours to judge
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(held)
    return False


def sync_file(path: Path) -> None:
    """Make the contents of a file survive a power cut.

    Raises:
        OSError: The disk fails.
    """
    held = os.open(path, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def sync_folder(path: Path) -> None:
    """Make names in a folder survive a power cut, where the system can."""
    try:
        held = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(held)
    except OSError:
        pass  # some file systems refuse folders
    finally:
        os.close(held)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a finished file a second name, or copy it where that is not possible.

    Raises:
        OSError: The source is gone, or the disk is full.
    """
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
        sync_file(target)
