"""The disk tier: blocks in files within a quota, through all that can happen to a disk."""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from mmfast.streams.blockfile import TornBlockError, encode
from mmfast.streams.blockfolder import BlockFolder
from mmfast.streams.quotas import Quotas
from mmfast.streams.reports import Reports
from mmfast.streams.stored import Shared, Stored, StoredLayer
from mmfast.streams.tree import File

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_EPISODE = 100  # blocks that must be written before a full disk is news again


class DiskTier:
    """Files of blocks, the oldest first.

    Nothing here raises because of the disk. Full: the oldest blocks make room, and while that
    does not help new ones are lost. Folder gone: it is made again. Read-only or broken: nothing
    is written any more, and what can be read still is. Every loss is reported, and `lose` is
    called with the block's number.
    """

    def __init__(self, quotas: Quotas, reports: Reports, lose: Callable[[int], None]) -> None:
        self.sizes: OrderedDict[int, int] = OrderedDict()
        self.nbytes = 0
        self._limit = quotas.limit("disk")
        self._reports = reports
        self._lose = lose
        self._broken = False
        self._calm = float("inf")  # blocks written since the disk was full
        self._folder: BlockFolder | None = None
        if self._limit and quotas.folder is not None:
            try:
                self._folder = BlockFolder(quotas.folder)
            except OSError as error:
                self._fail(error)

    @property
    def on(self) -> bool:
        """Whether blocks can still be written."""
        return self._folder is not None and not self._broken

    def put(self, stored: Stored) -> bool:
        """Write a block; False if it is lost."""
        if not self.on:
            return False
        encoded = encode(stored.number, stored.to(torch.device("cpu")).sections())
        if encoded.nbytes > self._limit:
            return False
        self._shrink(self._limit - encoded.nbytes)
        if not self._write(lambda folder: folder.write(stored.number, encoded), encoded.nbytes):
            return False
        self._add(stored.number, encoded.nbytes)
        return True

    def adopt(self, number: int, nbytes: int, file: File) -> bool:
        """Take over a file of a saved session; False if it is lost."""
        if not self.on or nbytes > self._limit or not file.path.exists():
            return False
        self._shrink(self._limit - nbytes)
        if not self._write(lambda folder: folder.adopt(number, file), nbytes):
            return False
        self._add(number, nbytes)
        return True

    def _add(self, number: int, nbytes: int) -> None:
        self.sizes[number] = nbytes
        self.nbytes += nbytes

    def _write(self, write: Callable[[BlockFolder], None], nbytes: int) -> bool:
        """Try, mend what can be mended, try again."""
        for last in (False, True):
            try:
                assert self._folder is not None
                write(self._folder)
            except OSError as error:
                if last or not self._mend(error, nbytes):
                    self._fail(error)
                    return False
            else:
                self._calm += 1
                return True
        return False

    def _mend(self, error: OSError, nbytes: int) -> bool:
        if error.errno in _FULL and self.sizes:
            self._tell_full(error)
            self._shrink(self.nbytes - 2 * nbytes)
            return True
        return error.errno == errno.ENOENT and self._revive()

    def _revive(self) -> bool:
        assert self._folder is not None
        gone = [number for number in self.sizes if not self._folder.file(number).exists()]
        for number in gone:
            self.remove(number)
            self._lose(number)
        where = self._folder.path.parent
        self._reports.add("lost", f"{len(gone)} blocks on disk vanished from {where}", len(gone))
        try:
            self._folder.revive()
        except OSError:
            return False
        return True

    def _tell_full(self, error: OSError) -> None:
        line = f"disk full ({error.strerror}): the oldest blocks make room, else new ones are lost"
        self._reports.add("disk_errors", line if self._calm > _EPISODE else "")
        self._calm = 0

    def _fail(self, error: OSError) -> None:
        if error.errno in _FULL and self._folder is not None:
            self._tell_full(error)  # others may free some space: the next block tries again
            return
        self._broken = True
        why = error.strerror or type(error).__name__
        self._reports.add(
            "disk_errors", f"disk tier is off ({why}): blocks that leave main memory are lost"
        )

    def _shrink(self, limit: float) -> None:
        """Drop the oldest blocks until no more than `limit` bytes are left."""
        while self.sizes and self.nbytes > limit:
            number = next(iter(self.sizes))
            self.remove(number)
            self._lose(number)
            self._reports.once(
                "dropped", f"memory full: block {number} dropped, as all that follow"
            )

    def read(self, number: int, layer: int) -> tuple[Shared, StoredLayer] | None:
        """One layer of a block; None where it is damaged or gone, and then it is dropped."""
        try:
            assert self._folder is not None
            shared, tree = self._folder.read(number, layer)
            return Shared(**shared), StoredLayer.restore(tree)
        except TornBlockError as error:
            self._reports.add("corrupt", f"{error}; it is dropped")
        except OSError as error:
            self._reports.add("lost", f"block {number} cannot be read: {error.strerror}")
        self.remove(number)
        self._lose(number)
        return None

    def remove(self, number: int) -> None:
        """Delete a block."""
        self.nbytes -= self.sizes.pop(number)
        if self._folder is not None:
            self._folder.remove(number)

    def snapshot(self) -> list[dict[str, Any]]:
        """The files, for a saved session to link or copy."""
        if self._folder is None:
            return []
        folder = self._folder
        return [
            {"number": number, "nbytes": nbytes, "file": File(folder.file(number))}
            for number, nbytes in self.sizes.items()
        ]

    def close(self) -> None:
        """Remove all files."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        self.sizes.clear()
        self.nbytes = 0
