"""A folder of block files that one archive owns for as long as it lives."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

from mmfast.streams import blockfile
from mmfast.streams.folders import link_or_copy, lock, locked
from mmfast.streams.tree import File

_PREFIX = "blocks-"
_OPEN = 256  # blocks whose table of contents stays in memory; a question reads fewer per layer


class BlockFolder:
    """Block files in a folder of its own below `parent`.

    One file per block, not segments of many: blocks leave one by one and a quota holds to the
    byte. It costs 0.4 ms more per block of 300 kB, nothing per block of 10 MB.

    The folder is removed with the object. Folders that a killed process left behind are removed
    when the next one starts there: nobody holds their lock.
    """

    def __init__(self, parent: Path) -> None:
        """Make the folder.

        Raises:
            OSError: It cannot be made.
        """
        parent.mkdir(parents=True, exist_ok=True)
        _clean(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._open: OrderedDict[int, tuple[list[blockfile.Section], Any]] = OrderedDict()
        self._close = weakref.finalize(self, _remove, self.path, lock(self.path / "lock"))

    def file(self, number: int) -> Path:
        """Where block `number` is."""
        return self.path / f"{number:09d}.block"

    def write(self, number: int, encoded: blockfile.Encoded) -> None:
        """Add a block.

        Raises:
            OSError: Disk full, read-only, or the folder is gone.
        """
        blockfile.write(self.file(number), encoded)

    def read(self, number: int, layer: int) -> tuple[Any, Any]:
        """What the layers of a block share, and one layer; the others are not read.

        Raises:
            TornBlockError: It is not what was written.
            OSError: It cannot be read.
        """
        path = self.file(number)
        if number not in self._open:
            sections = blockfile.read_header(path, number)
            self._open[number] = sections, blockfile.read_section(path, number, sections[0])
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        sections, shared = self._open[number]
        return shared, blockfile.read_section(path, number, sections[1 + layer])

    def remove(self, number: int) -> None:
        """Delete a block's file, if it can be."""
        self._open.pop(number, None)
        with contextlib.suppress(OSError):  # a read-only disk keeps it; it is not read again
            self.file(number).unlink(missing_ok=True)

    def adopt(self, number: int, file: File) -> None:
        """Take over a block of a saved session, which stays as it is.

        Raises:
            OSError: It is gone, or the disk is full.
        """
        link_or_copy(file.path, self.file(number))

    def revive(self) -> None:
        """Make the folder again after somebody removed it.

        Raises:
            OSError: It cannot be made.
        """
        if not (self.path / "lock").exists():
            self._open.clear()
            self.path.mkdir(parents=True, exist_ok=True)
            dead = self._close.detach()
            if dead is not None:
                os.close(dead[2][1])  # the lock of the folder that is gone
            self._close = weakref.finalize(self, _remove, self.path, lock(self.path / "lock"))

    def close(self) -> None:
        """Remove the folder."""
        self._close()


def _clean(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        if folder.is_dir() and not locked(folder / "lock"):
            shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)
