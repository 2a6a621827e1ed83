"""A file that one process at a time holds."""

from __future__ import annotations

import os
from pathlib import Path


def lock(file: Path) -> int:
    """Hold a file for this process alone; the system lets go of it when the process dies.

    Its folder is made where there is none.

    Returns:
        A handle; closing it lets go.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: It cannot be made.
    """
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:  # a system without such locks: two runs at once are the user's to avoid
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(file, os.O_CREAT | os.O_RDWR)
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o644)
        except FileNotFoundError:
            continue  # another run has just removed the folder
        try:
            flock(handle, LOCK_EX | LOCK_NB)
            if file.exists() and file.stat().st_ino == os.fstat(handle).st_ino:
                return handle  # and not one that another run has just removed
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
