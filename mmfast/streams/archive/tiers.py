"""Stored blocks on three tiers: beside the model, in main memory, on disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from mmfast.core.errors import MmfastError
from mmfast.core.kv import KVBlock, Numbers
from mmfast.core.sizes import parse_bytes
from mmfast.ops.quantisation import PackedTensor, Quantiser
from mmfast.streams.archive import files

TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class TierQuotas:
    """Bytes per tier; 0 leaves a tier out, None sets no limit.

    `device` is beside the model, read without a copy over the bus; `host` in main memory, with
    `blocks` at most, however small they are; `disk` in files, in a folder of its own in `folder`.
    """

    device: int | None = 0
    host: int | None = 10**9
    disk: int | None = 0
    folder: Path | None = None
    blocks: int | None = None

    @classmethod
    def of(
        cls,
        device: str | int | None = 0,
        host: str | int | None = "1GB",
        disk: str | int | None = 0,
        folder: str | Path | None = None,
        blocks: int | None = None,
    ) -> TierQuotas:
        """Quotas from sizes as people write them; MmfastError where they make no sense."""
        if blocks is not None and (type(blocks) is not int or blocks < 1):
            raise MmfastError(f"{blocks!r} is no number of blocks; give 1 or more, or None")
        on_disk = parse_bytes(disk)
        if on_disk != 0 and folder is None:
            raise MmfastError(f"a disk quota of {disk!r} needs a folder; name one, or drop it")
        if not isinstance(folder, str | PathLike | None):
            raise MmfastError(f"folder={folder!r} is not allowed; give the path of a folder")
        where = None if folder is None else Path(folder)
        return cls(parse_bytes(device), parse_bytes(host), on_disk, where, blocks)

    def options(self) -> dict[str, Any]:
        """Return the arguments of `VideoStream.open` that give these quotas, as plain values."""
        return {
            "device_bytes": self.device,
            "host_bytes": self.host,
            "host_blocks": self.blocks,
            "disk_bytes": self.disk,
            "folder": None if self.folder is None else str(self.folder.absolute()),
        }

    def limit(self, tier: str) -> float:
        """Bytes that a tier may hold."""
        size: int | None = getattr(self, tier)
        return float("inf") if size is None else size

    def full(self, tier: str, blocks: int, used: int) -> bool:
        """Tell whether a number of blocks of `used` bytes in all exceeds a tier."""
        most = self.blocks if tier == "host" else None
        return used > self.limit(tier) or (most is not None and blocks > most)


files.value(PackedTensor)
files.value(KVBlock)


def stored(block: KVBlock) -> KVBlock:
    """The block in storage of its own, keys and values on the device they are on."""
    return replace(
        block.each(lambda part, _: files.compact(part)),
        relative=files.compact(block.relative.cpu()),
        advance=files.compact(block.advance.cpu()),
        kept=tuple(None if kept is None else files.compact(kept.cpu()) for kept in block.kept),
    )


def stored_bytes(block: KVBlock) -> int:
    """Bytes of keys, values and places, which count against a quota."""
    kept = sum(each.nbytes for each in block.kept if each is not None)
    return block.nbytes + kept + block.relative.nbytes + block.advance.nbytes


def packed(block: KVBlock, store: Quantiser | None) -> KVBlock:
    """In fewer bits; as it is where it is already, has no tokens or no finite numbers."""
    return block if store is None else block.each(partial(_pack, store))


def _pack(store: Quantiser, part: Numbers, keys: bool) -> Numbers:
    if isinstance(part, PackedTensor) or not part.numel():
        return part
    try:
        return store.pack(part, keys=keys)
    except MmfastError:  # not finite: kept as it is, so that it shows where it is read
        return part


def parts_of(block: KVBlock) -> list[Any]:
    """Return what a file keeps apart: the number, what all layers share, and each layer."""
    kept = block.kept or (None,) * len(block.keys)
    shared = replace(block, keys=(), values=(), kept=())
    return [block.number, shared, *zip(block.keys, block.values, kept, strict=True)]


def block_of(number: int, shared: KVBlock, *layers: Any) -> KVBlock:
    """Return the block of such parts, with some layers or all."""
    keys, values, kept = zip(*layers, strict=True)
    return replace(shared, number=number, keys=keys, values=values, kept=kept)


CPU = torch.device("cpu")
_FOLDER_PREFIX = "blocks-"
_OPEN = 256  # blocks whose table of contents stays in memory; a question reads fewer per layer


class BlockFolder:
    """Block files in a folder of its own below `parent`.

    One file per block, not segments of many: blocks leave one by one and a quota holds to the
    byte. It costs 0.4 ms more per block of 300 kB, nothing per block of 10 MB.

    The folder is removed with the object. Folders that a killed process left behind are removed
    when the next one starts there: no process holds their lock.
    """

    def __init__(self, parent: Path) -> None:
        """Make the folder; OSError where that fails."""
        parent.mkdir(parents=True, exist_ok=True)
        _clean(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent))
        self._open: OrderedDict[int, tuple[files.TreeFile, KVBlock]] = OrderedDict()
        self._close = weakref.finalize(self, _remove, self.path, files.lock(self.path / "lock"))

    def file(self, number: int) -> Path:
        """Path of block `number`."""
        return self.path / f"{number:09d}.block"

    def read(self, number: int, check: str, layer: int) -> KVBlock:
        """Return a block with one layer alone; TornFileError for a file of another `check`."""
        if number not in self._open:
            file = files.TreeFile(self.file(number))
            held = file.read(0)
            if held != number:
                raise files.TornFileError(f"holds block {held}")
            if file.check != check:  # whole, and of the same shape
                raise files.TornFileError("is of another session")
            self._open[number] = file, file.read(1)
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        file, shared = self._open[number]
        return block_of(number, shared, file.read(2 + layer))

    def remove(self, number: int) -> None:
        """Delete a block's file, if it can be."""
        self._open.pop(number, None)
        with contextlib.suppress(OSError):  # a read-only disk keeps it; it is not read again
            self.file(number).unlink(missing_ok=True)

    def revive(self) -> None:
        """Make the folder again after it was removed; OSError where that fails."""
        if not (self.path / "lock").exists():
            self._open.clear()
            self.path.mkdir(parents=True, exist_ok=True)
            dead = self._close.detach()
            if dead is not None:
                os.close(dead[2][1])  # the lock of the folder that is gone
            self._close = weakref.finalize(self, _remove, self.path, files.lock(self.path / "lock"))

    def close(self) -> None:
        """Remove the folder."""
        self._close()


def _clean(parent: Path) -> None:
    for folder in parent.glob(f"{_FOLDER_PREFIX}*"):
        if folder.is_dir() and not files.locked(folder / "lock"):
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
        """Count an event, and report its line if there is one."""
        self.counts[kind] += times
        if line:
            self.lines.append(line)

    def once(self, kind: str, line: str) -> None:
        """Count an event, and report it the first time."""
        self.add(kind, "" if self.counts[kind] else line)

    def snapshot(self) -> dict[str, Any]:
        """Plain data."""
        return {"lines": list(self.lines), "counts": dict(self.counts)}

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over earlier reports."""
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
        self._checks: dict[int, str] = {}  # tell the files of this session from all others
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
        """Blocks can still be written."""
        return self._folder is not None and not self._broken

    def put(self, block: KVBlock) -> bool:
        """Write a block; False if it is lost."""
        if not self.on:
            return False
        buffers = files.encode(parts_of(block.to(CPU)))
        number, nbytes, check = block.number, sum(map(len, buffers)), files.check_of(buffers)
        return self._add(number, nbytes, check, lambda path: files.write(path, buffers))

    def adopt(self, number: int, nbytes: int, check: str, file: files.File) -> bool:
        """Take over a file of a saved session, which stays as it is; False if it is lost."""
        if not self.on or not file.path.exists():
            return False
        return self._add(number, nbytes, check, lambda path: files.link_or_copy(file.path, path))

    def _add(self, number: int, nbytes: int, check: str, make: Callable[[Path], None]) -> bool:
        if nbytes > self._limit:
            return False
        self._shrink(self._limit - nbytes)
        if not self._write(number, nbytes, make):
            return False
        self.sizes[number], self._checks[number] = nbytes, check
        self.nbytes += nbytes
        return True

    def _write(self, number: int, nbytes: int, make: Callable[[Path], None]) -> bool:
        for last in (False, True):
            try:
                assert self._folder is not None
                make(self._folder.file(number))
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
            self._report_full(error)
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

    def _report_full(self, error: OSError) -> None:
        line = f"disk full ({error.strerror}): the oldest blocks make room, else new ones are lost"
        self._reports.add("disk_errors", line if self._calm > _EPISODE else "")
        self._calm = 0

    def _fail(self, error: OSError) -> None:
        if error.errno in _FULL and self._folder is not None:
            self._report_full(error)  # others may free some space: the next block tries again
            return
        self._broken = True
        why = error.strerror or type(error).__name__
        self._reports.add(
            "disk_errors", f"disk tier is off ({why}): blocks that leave main memory are lost"
        )

    def _shrink(self, limit: float) -> None:
        while self.sizes and self.nbytes > limit:
            number = next(iter(self.sizes))
            self.remove(number)
            self.drop(number)

    def drop(self, number: int) -> None:
        """Report a block for which no tier has room."""
        self._reports.once("dropped", f"memory full: block {number} dropped, as all that follow")
        self._lose(number)

    def read(self, number: int, layer: int) -> KVBlock | None:
        """A block with one layer alone; None where it is damaged or gone: then it is dropped."""
        try:
            assert self._folder is not None
            return self._folder.read(number, self._checks[number], layer)
        except files.TornFileError as error:
            self._reports.add("corrupt", f"block {number} {error}; it is dropped")
        except OSError as error:
            self._reports.add("lost", f"block {number} cannot be read: {error.strerror}")
        self.remove(number)
        self._lose(number)
        return None

    def remove(self, number: int) -> None:
        """Delete a block."""
        self.nbytes -= self.sizes.pop(number)
        del self._checks[number]
        if self._folder is not None:
            self._folder.remove(number)

    def snapshot(self) -> list[dict[str, Any]]:
        """The files, for a saved session to link or copy."""
        if self._folder is None:
            return []
        return [
            {
                "number": number,
                "nbytes": nbytes,
                "check": self._checks[number],
                "file": files.File(self._folder.file(number)),
            }
            for number, nbytes in self.sizes.items()
        ]

    def close(self) -> None:
        """Remove all files."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        self.sizes.clear()
        self._checks.clear()
        self.nbytes = 0


def give_back() -> bool:
    """Return free pages of the heap; takes milliseconds. False: the C library is not glibc."""
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


_TIDY = 64  # blocks that leave main memory between two times of giving back what they left


class Tiers:
    """Blocks within quotas.

    A block that finds its tier full pushes that tier's oldest down to the next one, and what
    leaves the last tier is dropped. Age decides, not use: reading a block for a question must not
    change what the stream remembers afterwards.
    """

    def __init__(
        self,
        quotas: TierQuotas,
        store: Quantiser | None,
        reports: Reports,
        lose: Callable[[int], None],
    ) -> None:
        self._quotas = quotas
        self._store = store
        self._memory: dict[str, OrderedDict[int, KVBlock]] = {
            "device": OrderedDict(),
            "host": OrderedDict(),
        }
        self._used = {"device": 0, "host": 0}
        self._left = 0  # blocks that left main memory
        self.disk = DiskTier(quotas, reports, lose)

    def __len__(self) -> int:
        return len(self.disk.sizes) + sum(map(len, self._memory.values()))

    def __iter__(self) -> Iterator[int]:
        yield from self.disk.sizes
        yield from self._memory["host"]
        yield from self._memory["device"]

    def __contains__(self, number: int) -> bool:
        return number in self.disk.sizes or any(number in tier for tier in self._memory.values())

    @property
    def blocks(self) -> dict[str, int]:
        """Blocks per tier."""
        return {**{t: len(held) for t, held in self._memory.items()}, "disk": len(self.disk.sizes)}

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes per tier."""
        return {**self._used, "disk": self.disk.nbytes}

    def put(self, block: KVBlock, tier: str = "device") -> None:
        """Add the newest block, in storage of its own."""
        if tier == "device" and not self._fits(block, tier):
            tier = "host"
        if tier == "host":
            block = packed(block, self._store).to(CPU)
            tier = tier if self._fits(block, tier) else "disk"
        if tier == "disk":
            if not self.disk.put(block):
                self.disk.drop(block.number)
            return
        self._memory[tier][block.number] = block
        self._used[tier] += stored_bytes(block)
        self._settle(tier)

    def _fits(self, block: KVBlock, tier: str) -> bool:
        return stored_bytes(block) <= self._quotas.limit(tier)

    def _settle(self, tier: str) -> None:
        held = self._memory[tier]
        while self._quotas.full(tier, len(held), self._used[tier]):
            number = next(iter(held))
            self._left += tier == "host"
            self.put(self._take(number, tier), "host" if tier == "device" else "disk")
        if self._left >= _TIDY:
            self._left = 0
            give_back()

    def _take(self, number: int, tier: str) -> KVBlock:
        block = self._memory[tier].pop(number)
        self._used[tier] -= stored_bytes(block)
        return block

    def read(self, number: int, layer: int) -> KVBlock | None:
        """A block with one layer alone; None where it is not, or no longer, there."""
        for tier in self._memory.values():
            if number in tier:
                return tier[number].layer(layer)
        return self.disk.read(number, layer) if number in self.disk.sizes else None

    def remove(self, number: int) -> None:
        """Forget a block, if it is there."""
        for name, tier in self._memory.items():
            if number in tier:
                self._take(number, name)
        if number in self.disk.sizes:
            self.disk.remove(number)

    def snapshot(self) -> dict[str, Any]:
        """Plain data, and the files of the disk tier."""
        rows = {
            name: [parts_of(block) for block in tier.values()]
            for name, tier in self._memory.items()
        }
        return {**rows, "disk": self.disk.snapshot()}

    def restore(self, tree: dict[str, Any], device: torch.device) -> None:
        """Take over a snapshot, the oldest first; what exceeds the quotas moves down."""
        for row in tree["disk"]:
            if not self.disk.adopt(**row):
                self.disk.drop(row["number"])
        for tier, where in (("host", CPU), ("device", device)):
            for row in tree[tier]:
                self.put(block_of(*row).to(where), tier)

    def close(self) -> None:
        """Release all blocks and files."""
        for tier in self._memory:
            self._memory[tier].clear()
            self._used[tier] = 0
        self.disk.close()
