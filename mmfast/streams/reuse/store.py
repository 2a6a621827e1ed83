"""A store of values that requests share, found by content, in device, host and disk tiers.

A value is a tree of tensors and plain data (`streams.archive.files`). Its key is a hash of all that
it follows from: weights, processor, reduction and content. A file holds its key, and checksums of
everything, so a damaged file or one of another model is never taken for what was asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError, an, warn
from mmfast.core.locks import WholeLock
from mmfast.streams.archive import files
from mmfast.streams.archive.tiers import CPU, Reports, TierQuotas
from mmfast.streams.reuse.coding import BITS, has_coded, with_coded, with_decoded
from mmfast.streams.reuse.levels import FetchClock

_SUFFIX = ".media"
FOLDER_BYTES = "10GB"  # quota of a folder that is given without one


def key_of(*parts: str | bytes) -> str:
    """Hash parts to a key; their order and their borders count."""
    whole = hashlib.blake2b(digest_size=20)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        whole.update(len(data).to_bytes(8, "little"))
        whole.update(data)
    return whole.hexdigest()


def digest(tensor: Tensor) -> bytes:
    """Hash type, shape and contents of a tensor."""
    dense = tensor.detach().cpu().contiguous()
    whole = hashlib.blake2b(f"{dense.dtype} {tuple(dense.shape)}".encode(), digest_size=20)
    whole.update(files.raw(dense))
    return whole.digest()


class _MemoryTier:
    """Flat trees within bytes, the least recently used first."""

    def __init__(self, limit: float, push: Callable[[str, files.FlatTree], None]) -> None:
        self.limit, self._push = limit, push
        self.held: OrderedDict[str, files.FlatTree] = OrderedDict()
        self.nbytes = 0

    def get(self, key: str) -> files.FlatTree | None:
        found = self.held.get(key)
        if found is not None:
            self.held.move_to_end(key)
        return found

    def put(self, key: str, value: files.FlatTree) -> None:
        self.remove(key)
        if _size(value) > self.limit:
            return self._push(key, value)
        self.held[key] = value
        self.nbytes += _size(value)
        while self.nbytes > self.limit:
            oldest = next(iter(self.held))
            self._push(oldest, self.remove(oldest))

    def remove(self, key: str) -> Any:
        found = self.held.pop(key, None)
        self.nbytes -= 0 if found is None else _size(found)
        return found


def _size(value: files.FlatTree) -> int:
    """Bytes of a value; its skeleton and its place in a table are taken for a few hundred."""
    return 500 + sum(tensor.nbytes for tensor in value.tensors)


def _placed(value: files.FlatTree, device: torch.device) -> files.FlatTree:
    moved = [files.compact(tensor.to(device)) for tensor in value.tensors]
    return files.FlatTree(value.skeleton, moved, [])


class MediaFolder:
    """Files of values in a folder that several processes may share, the least recently used first.

    OSError where the folder cannot be made.
    """

    def __init__(self, folder: Path, limit: float) -> None:
        self.path, self._limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True)

    def file(self, key: str) -> Path:
        """Path of a value's file."""
        return self.path / f"{key}{_SUFFIX}"

    def sizes(self) -> dict[Path, tuple[float, int]]:
        """Time of the last use and bytes of every file, those that a killed process left too."""
        found = {}
        for path in self.path.iterdir():
            with contextlib.suppress(OSError):  # another process may drop it meanwhile
                if path.suffix in (_SUFFIX, files.PART):
                    state = path.stat()
                    found[path] = state.st_mtime, state.st_size
        return found

    def write(self, key: str, tree: Any, anew: bool = False) -> None:
        """Write a value; the oldest files make room. OSError: the disk is full or gone.

        A value that is there stays as it is, unless it is written `anew`.
        """
        if self.file(key).exists() and not anew:
            return
        buffers = files.encode([key, tree])
        need, known = sum(map(len, buffers)), self.sizes()
        if need > self._limit:
            return
        used = sum(size for _, size in known.values())
        for path in sorted(known, key=lambda path: known[path][0]):
            if used + need <= self._limit:
                break
            path.unlink(missing_ok=True)
            used -= known[path][1]
        files.write(self.file(key), buffers)

    def read(self, key: str) -> Any:
        """Return a value; TornFileError where the file is damaged or of another key."""
        path = self.file(key)
        file = files.TreeFile(path)
        if file.read(0) != key:
            raise files.TornFileError("holds another value")
        tree = file.read(1)
        with contextlib.suppress(OSError):  # of another user, or in a folder that is read alone
            os.utime(path)
        return tree


class ReuseStore:
    """Encoder outputs, keys and values of media that were seen, for later requests.

    Any number of pipelines, threads and models may share one; no model reads what another wrote.
    The least recently used values move from the device to main memory and are dropped there; with a
    folder, everything is written there, too, and other processes find it. What is damaged on disk
    is warned of once, and computed anew.

    Args:
        device: Bytes beside the model, such as `"2GB"`; None sets no limit.
        host: Bytes in main memory.
        disk: Bytes of files; needs a folder. Absent: 10 GB where a folder is given.
        folder: Where the files lie.
        bits: 3 to 8, of keys and values in files (`reuse.coding`); the first layers get up to two
            more. None writes them as they are. Stores of other bits do not read these files. Of
            several, such as `(3, 4, 8)`, each is written, and the finest is read.
        deadline_ms: Within which a prompt takes its keys and values from files: each comes in the
            bits that the measured bandwidth leaves time for, or its text is read again (CacheGen).
            Needs several `bits`.

    Raises:
        MmfastError: Sizes that make no sense, or a folder that cannot be made.
    """

    def __init__(
        self,
        device: str | int | None = 0,
        host: str | int | None = "1GB",
        disk: str | int | None = None,
        folder: str | Path | None = None,
        bits: int | Sequence[int] | None = None,
        deadline_ms: float | None = None,
    ) -> None:
        self.levels = _levels(bits, folder)
        self.bits = self.levels[-1] if self.levels else None
        if deadline_ms is not None and (len(self.levels) < 2 or not 0 < deadline_ms < math.inf):
            raise MmfastError(
                f"deadline_ms={deadline_ms!r} of bits={bits!r}: give milliseconds above 0, and "
                "several bits to choose from, such as bits=(3, 4, 8)"
            )
        self.deadline_ms, self.clock = deadline_ms, FetchClock()
        if disk is None:
            disk = 0 if folder is None else FOLDER_BYTES
        self.quotas = TierQuotas.of(device, host, disk, folder)
        self.reports = Reports()
        self.hits, self.misses = 0, 0
        self._lock = WholeLock()
        self._host = _MemoryTier(self.quotas.limit("host"), lambda key, value: None)
        self._device = _MemoryTier(
            self.quotas.limit("device"), lambda key, value: self._host.put(key, _placed(value, CPU))
        )
        self._due: OrderedDict[str, files.FlatTree] = OrderedDict()  # not on disk yet
        self._writing = WholeLock()  # so that no older value takes the place of a newer one
        self._changed: set[str] = set()  # of these, those that replace a file
        self._folder: MediaFolder | None = None
        if self.quotas.folder is not None and self.quotas.disk != 0:
            try:
                self._folder = MediaFolder(self.quotas.folder, self.quotas.limit("disk"))
            except OSError as error:
                raise MmfastError(
                    f"cannot make the folder {str(folder)!r} of a reuse store: {error.strerror}; "
                    "name one that can be written"
                ) from None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a reuse store belongs to its process: open its folder in the other one, with "
            "ReuseStore(folder=…)"
        )

    def get(self, key: str, device: torch.device = CPU, bits: int | None = None) -> Any:
        """Return a value on a device, not to be written to; None where it is not there.

        From a file it comes in `bits`, the finest if None.
        """
        with self._lock:
            found = self._device.get(key)
            below = None
            if found is None:
                below = self._host.get(key) or self._due.get(key)
                below = below or self._from_disk(key, bits or self.bits)
            if below is not None:
                found = _placed(below, device)
                if self._device.limit:
                    self._host.remove(key)
                    self._device.put(key, found)
            self.hits, self.misses = self.hits + (found is not None), self.misses + (found is None)
            if found is None:
                return None
            tensors = [tensor.to(device) for tensor in found.tensors]
        return files.unflatten(found.skeleton, tensors.__getitem__)

    def put(self, key: str, tree: Any, anew: bool = False) -> None:
        """Keep a value; `flush` writes it to the disk, in the place of an older one if `anew`."""
        flat = files.flatten(tree)
        own = files.FlatTree(flat.skeleton, [files.compact(x) for x in flat.tensors], [])
        with self._lock:
            self._device.put(key, own)
            if self._folder is not None:
                self._due[key] = own
                self._changed |= {key} if anew else set()

    def sizes(self, key: str) -> dict[int, int] | None:
        """Bytes of a value's files by bits; None where memory has it."""
        with self._lock:
            held = (self._device.held, self._host.held, self._due)
            if self._folder is None or any(key in each for each in held):
                return None
            found = {}
            for bits in self.levels:
                with contextlib.suppress(OSError):  # another process may drop it meanwhile
                    found[bits] = self._folder.file(self._name(key, bits)).stat().st_size
            return found

    def _from_disk(self, key: str, bits: int | None) -> files.FlatTree | None:
        if self._folder is None:
            return None
        start = self.now()
        try:
            name = self._name(key, bits)
            flat = files.flatten(with_decoded(self._folder.read(name)))
            size = self._folder.file(name).stat().st_size
        except FileNotFoundError:
            return None
        except (files.TornFileError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            path = self._folder.file(self._name(key, bits))
            self._warn("corrupt", f"{path.name} {why}; it is computed anew")
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        self.clock.fetched(size, (self.now() - start) * 1e3)
        self._host.put(key, flat)
        return flat

    def _name(self, key: str, bits: int | None) -> str:
        """Name of a value's file: what was rounded is never taken for what was not."""
        return key if bits is None else key_of(key, f"{bits} bits")

    def flush(self) -> None:
        """Write what is not on disk yet: after an answer, so that none waits for the disk."""
        with self._writing:
            with self._lock:
                due = [(key, flat, key in self._changed) for key, flat in self._due.items()]
            for key, flat, anew in due:
                try:
                    self._write(key, flat, anew)
                except OSError as error:
                    why = f"cannot write ({error.strerror}); nothing is kept there"
                    self._warn("disk_errors", why)
                finally:  # found here until then
                    with self._lock:
                        if self._due.get(key) is flat:
                            del self._due[key]
                            self._changed.discard(key)

    def _write(self, key: str, flat: files.FlatTree, anew: bool) -> None:
        assert self._folder is not None
        tree = files.unflatten(flat.skeleton, flat.tensors.__getitem__)
        for bits in self.levels or (None,):
            own = tree if bits is None else with_coded(tree, bits)
            if bits == self.bits or has_coded(own):  # the rest is the same in all bits
                self._folder.write(self._name(key, bits), own, anew)

    def _warn(self, kind: str, line: str) -> None:
        first = not self.reports.counts[kind]
        self.reports.add(kind, line)
        if first:
            warn(f"reuse store in {str(self.quotas.folder)!r}: {line}")

    now = staticmethod(time.perf_counter)

    @property
    def nbytes(self) -> int:
        """Bytes on the device and in main memory."""
        return self._device.nbytes + self._host.nbytes

    def stats(self) -> dict[str, Any]:
        """Values and bytes per tier, hits and misses, damaged files and latest reports."""
        with self._lock:
            disk = {} if self._folder is None else self._folder.sizes()
            tiers = {"device": self._device, "host": self._host}
            counts = {name: len(tier.held) for name, tier in tiers.items()}
            sizes = {name: tier.nbytes for name, tier in tiers.items()}
            return {
                "values": {**counts, "disk": sum(path.suffix == _SUFFIX for path in disk)},
                "bytes": {**sizes, "disk": sum(size for _, size in disk.values())},
                "hits": self.hits,
                "misses": self.misses,
                "corrupt": self.reports.counts["corrupt"],
                "disk_errors": self.reports.counts["disk_errors"],
                "reports": list(self.reports.lines),
            }


def _levels(bits: Any, folder: Any) -> tuple[int, ...]:
    """Bits of files, ascending; MmfastError where they make no sense."""
    each = (bits,) if bits is None or isinstance(bits, int) else tuple(bits)
    if bits is None:
        return ()
    if not each or len({*each}) < len(each) or folder is None or any(b not in BITS for b in each):
        raise MmfastError(
            f"bits={bits!r} of folder={folder!r}: files of a folder are written with "
            f"{BITS[0]} to {BITS[-1]} bits, or None as they are; memory holds them as they are"
        )
    return tuple(sorted(each))


def store_of(given: Any) -> ReuseStore:
    """Return the store that an option names: one, a folder of one, or None for main memory."""
    if given is None or isinstance(given, str | Path):
        return ReuseStore(folder=given)
    if not isinstance(given, ReuseStore):
        raise MmfastError(
            f"store is {an(type(given).__name__)}; give a ReuseStore, a folder, or leave it out"
        )
    return given
