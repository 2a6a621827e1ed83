"""A file that one process at a time holds."""

from __future__ import annotations

import os
from pathlib import Path


def lock(file: Path) -> int:
    """Hold a file for this process alone; the system lets go of it when the process dies.

    Returns:
        A handle; closing it lets go.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: It cannot be made.
    """
    try:
        import fcntl
    except ImportError:  # a system without such locks: two runs at once are the user's to avoid
        return os.open(file, os.O_CREAT | os.O_RDWR)
    while True:
        handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.exists() and file.stat().st_ino == os.fstat(handle).st_ino:
                return handle  # and not one that another run has just removed
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
