"""The disk tier: blocks in files within a quota, through all that can happen to a disk.

One stored block as one file: sections that are read alone, each with its checksum.

Layout: magic, length and CRC-32 of the header, the header (JSON), then one section per layer
behind one for what all layers share. Little-endian; tensors start at multiples of 64 bytes.

Gives memory that is free inside the heap back to the system.

Stored blocks live for hours while everything around them comes and goes with every frame, so
they leave holes behind: a process would grow although what it holds does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import struct
import tempfile
import weakref
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.streams.archive.blocks import Shared, Stored, StoredLayer, TierQuotas
from mmfast.streams.saving import File, from_plain, link_or_copy, lock, locked, to_plain

_MAGIC = b"mmfblk1\n"
_PREFIX = struct.Struct("<8sII")
_ALIGN = 64


class TornBlockError(MmfastError):
    """A block on disk is not what was written: cut short, altered, or another block."""


@dataclass(frozen=True)
class Encoded:
    """A block ready to be written."""

    buffers: list[bytes | memoryview]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return sum(len(buffer) for buffer in self.buffers)


@dataclass(frozen=True)
class Section:
    """Where a section lies and what is in it."""

    start: int  # in the file
    nbytes: int
    crc: int
    skeleton: Any
    specs: list[tuple[str, list[int], int]]  # dtype, shape, offset in the section


def encode(number: int, trees: Sequence[Any]) -> Encoded:
    """Lay out the sections of block `number`, one tree of CPU tensors and numbers each."""
    payload: list[bytes | memoryview] = []
    rows: list[list[Any]] = []
    start = 0
    for tree in trees:
        row, buffers = _section(tree)
        rows.append([start, *row])
        payload += buffers
        start += row[0]
    header = json.dumps({"number": number, "sections": rows}, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + _PREFIX.size) % _ALIGN)
    prefix = _PREFIX.pack(_MAGIC, len(header), zlib.crc32(header))
    return Encoded([prefix, header, *payload])


def _section(tree: Any) -> tuple[list[Any], list[memoryview]]:
    """Size, checksum, skeleton and tensors of a section, and its bytes."""
    plain = to_plain(tree)
    specs: list[list[Any]] = []
    buffers: list[memoryview] = []
    size = crc = 0
    for tensor in plain.tensors:
        specs.append([str(tensor.dtype)[6:], list(tensor.shape), size])
        data = _bytes_of(tensor)
        for buffer in (data, memoryview(bytes(-len(data) % _ALIGN))):
            buffers.append(buffer)
            size += len(buffer)
            crc = zlib.crc32(buffer, crc)
    return [size, crc, plain.skeleton, specs], buffers


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def write(path: Path, encoded: Encoded) -> None:
    """Write a block so that `path` is either absent or whole, whenever the process dies.

    Raises:
        OSError: The disk is full, read-only or gone; nothing is left behind.
    """
    temporary = path.with_suffix(".part")
    try:
        with temporary.open("wb") as file:
            file.writelines(encoded.buffers)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_header(path: Path, number: int) -> list[Section]:
    """The table of contents of the file of block `number`.

    Raises:
        TornBlockError: It is not that block, or not whole.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size:
            raise TornBlockError(f"block {number} is cut short at {size} bytes")
        magic, length, crc = _PREFIX.unpack(prefix)
        header = file.read(min(length, size))
    if magic != _MAGIC or len(header) != length or zlib.crc32(header) != crc:
        raise TornBlockError(f"block {number} has a damaged header")
    table = json.loads(header)
    if table["number"] != number:
        raise TornBlockError(f"block {number} holds block {table['number']}")
    base = _PREFIX.size + length
    sections = [Section(base + row[0], *row[1:]) for row in table["sections"]]
    if size != max((s.start + s.nbytes for s in sections), default=base):
        raise TornBlockError(f"block {number} is cut short at {size} bytes")
    return sections


def read_section(path: Path, number: int, section: Section) -> Any:
    """One section, as the tree it was written from.

    Raises:
        TornBlockError: Its checksum does not match.
        OSError: It cannot be read.
    """
    data = bytearray(section.nbytes)
    with path.open("rb", buffering=0) as file:
        file.seek(section.start)
        got = file.readinto(data)
    if got != section.nbytes or zlib.crc32(data) != section.crc:
        raise TornBlockError(f"block {number} does not match its checksum")
    return from_plain(section.skeleton, [_tensor(data, *spec) for spec in section.specs])


def _tensor(data: bytearray, dtype: str, shape: list[int], offset: int) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind, count=count, offset=offset).view(shape)


_FOLDER_PREFIX = "blocks-"
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
        self.path = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent))
        self._open: OrderedDict[int, tuple[list[Section], Any]] = OrderedDict()
        self._close = weakref.finalize(self, _remove, self.path, lock(self.path / "lock"))

    def file(self, number: int) -> Path:
        """Where block `number` is."""
        return self.path / f"{number:09d}.block"

    def write(self, number: int, encoded: Encoded) -> None:
        """Add a block.

        Raises:
            OSError: Disk full, read-only, or the folder is gone.
        """
        write(self.file(number), encoded)

    def read(self, number: int, layer: int) -> tuple[Any, Any]:
        """What the layers of a block share, and one layer; the others are not read.

        Raises:
            TornBlockError: It is not what was written.
            OSError: It cannot be read.
        """
        path = self.file(number)
        if number not in self._open:
            sections = read_header(path, number)
            self._open[number] = sections, read_section(path, number, sections[0])
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        sections, shared = self._open[number]
        return shared, read_section(path, number, sections[1 + layer])

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
    for folder in parent.glob(f"{_FOLDER_PREFIX}*"):
        if folder.is_dir() and not locked(folder / "lock"):
            shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)


_KEPT = 64


class Reports:
    """The latest reports, one line each, and how often each kind of thing happened."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_KEPT)
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, line: str = "", times: int = 1) -> None:
        """Count something, and tell it if there is a line."""
        self.counts[kind] += times
        if line:
            self.lines.append(line)

    def once(self, kind: str, line: str) -> None:
        """Count something, and tell it the first time."""
        self.add(kind, "" if self.counts[kind] else line)

    def snapshot(self) -> dict[str, Any]:
        """Plain data."""
        return {"lines": list(self.lines), "counts": dict(self.counts)}

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over what was told before."""
        self.lines.extend(tree["lines"])
        self.counts.update(tree["counts"])


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_EPISODE = 100  # blocks that must be written before a full disk is news again


class DiskTier:
    """Files of blocks, the oldest first.

    Nothing here raises because of the disk. Full: the oldest blocks make room, and while that
    does not help new ones are lost. Folder gone: it is made again. Read-only or broken: nothing
    is written any more, and what can be read still is. Every loss is reported, and `lose` is
    called with the block's number.
    """

    def __init__(self, quotas: TierQuotas, reports: Reports, lose: Callable[[int], None]) -> None:
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


def give_back() -> bool:
    """Return free pages of the heap; takes milliseconds.

    Returns:
        Whether the C library can (glibc).
    """
    trim = _trim()
    if trim is None:
        return False
    trim(0)
    return True


@lru_cache(maxsize=1)
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return found
