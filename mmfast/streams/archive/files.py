"""Trees of tensors and plain values as safetensors files with checksums, whole or absent on disk.

The metadata of a file holds its tree without the tensors and one checksum per tensor; the header
has a checksum of its own. So any part of the tree can be read alone, and whatever is read is
what was written or an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.files import opened, synced_file

if sys.platform != "win32":  # there folders are not locked, and none is taken for abandoned
    import fcntl

T = TypeVar("T")
_KINDS = "dict, list, tuple, tensors, numbers, strings, True, False, None and files"
_LENGTH = struct.Struct("<Q")  # of the header, at the start of a safetensors file
_CHECK = re.compile(rb'"check":"([0-9a-f]{8})"')
_UNCHECKED = b'"check":"00000000"'
PART = ".part"  # suffix of a file that is not whole yet
_ALIGN = 64  # bytes; block sizes then do not depend on the digits of their numbers
_VALUES: dict[str, type] = {}


class TornFileError(MmfastError):
    """A file is not what was written: cut short, altered, or of another kind."""


@dataclass(frozen=True)
class File:
    """A finished file, synced to disk, that belongs to some state; saving links or copies it."""

    path: Path


def value(cls: type[T]) -> type[T]:
    """Register a dataclass whose objects may stand in a tree."""
    _VALUES[cls.__name__] = cls
    return cls


@dataclass(frozen=True)
class FlatTree:
    """A tree without its large parts, which stand in the order in which `skeleton` numbers them.

    The skeleton is fit for JSON: containers are one-entry dicts that name their kind.
    """

    skeleton: Any
    tensors: list[Tensor]
    files: list[File]


def flatten(tree: Any) -> FlatTree:
    """Take a tree apart; MmfastError names the place of what `unflatten` cannot give back."""
    flat = FlatTree(None, [], [])
    return FlatTree(_skeleton(tree, flat, "tree"), flat.tensors, flat.files)


def _skeleton(node: Any, flat: FlatTree, where: str) -> Any:
    if node is None or type(node) in (bool, int, float, str):
        return node
    if isinstance(node, Tensor):
        flat.tensors.append(node)
        return {"tensor": len(flat.tensors) - 1}
    if isinstance(node, File):
        flat.files.append(node)
        return {"file": len(flat.files) - 1}
    kind = type(node)
    if kind in (list, tuple):
        items = [_skeleton(v, flat, f"{where}[{i}]") for i, v in enumerate(node)]
        return {kind.__name__: items}
    if kind is dict and all(type(key) in (str, int) for key in node):
        return {"dict": [[k, _skeleton(v, flat, f"{where}[{k!r}]")] for k, v in node.items()]}
    if _VALUES.get(kind.__name__) is kind:
        names = [field.name for field in fields(node)]
        parts = [[n, _skeleton(getattr(node, n), flat, f"{where}.{n}")] for n in names]
        return {"value": [kind.__name__, parts]}
    raise MmfastError(
        f"cannot save {where}: a {kind.__name__} is none of {_KINDS} (keys: str or int)"
    )


def unflatten(skeleton: Any, tensor: Callable[[int], Tensor], files: Sequence[File] = ()) -> Any:
    """Put together a tree from its skeleton, or from a part of it.

    `tensor` gives the tensor of a number. TornFileError: the skeleton is not one that `flatten`
    made, or lacks parts.
    """
    try:
        return _tree(skeleton, tensor, files)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise TornFileError(
            f"saved state is malformed: {error!r}; it was not written here"
        ) from None


def _tree(node: Any, tensor: Callable[[int], Tensor], files: Sequence[File]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, held),) = node.items()
    if kind in ("list", "tuple"):
        items = [_tree(each, tensor, files) for each in held]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {key: _tree(each, tensor, files) for key, each in held}
    if kind == "value":
        return _VALUES[held[0]](**{name: _tree(each, tensor, files) for name, each in held[1]})
    return tensor(held) if kind == "tensor" else {"file": files}[kind][held]


def compact(x: Tensor) -> Tensor:
    """Return the same numbers, dense, in storage of their own: a view would keep its whole base."""
    x = x.detach()
    alone = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if alone and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def raw(dense: Tensor) -> memoryview:
    """Return the bytes of contiguous numbers on the CPU, without a copy."""
    if not dense.numel():
        return memoryview(b"")
    # What has one entry along a side is dense, and has there the stride of a wider whole.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data


def encode(tree: Any) -> list[bytes | memoryview]:
    """Lay out a tree without files as a file's buffers; MmfastError for what cannot be saved."""
    flat, rows = flatten(tree), list[tuple[str, str]]()
    named, seen = dict[str, Tensor](), set[int]()
    for i, tensor in enumerate(flat.tensors):
        dense = compact(tensor.cpu())
        if dense.data_ptr() in seen:  # safetensors refuses tensors that share memory
            dense = dense.clone()
        seen.add(dense.data_ptr())
        named[f"{i:06d}"] = dense
        data = raw(dense)
        rows.append((str(dense.dtype).removeprefix("torch."), f"{zlib.crc32(data):08x}"))
    body = json.dumps([flat.skeleton, rows], separators=(",", ":"))
    whole = memoryview(save(named, {"body": body, "check": "00000000"}))
    end = _LENGTH.size + _LENGTH.unpack(whole[: _LENGTH.size])[0]
    header = bytes(whole[_LENGTH.size : end])
    header += b" " * (-(end) % _ALIGN)
    check = b'"check":"%08x"' % zlib.crc32(header)
    header = header.replace(_UNCHECKED, check, 1)
    return [_LENGTH.pack(len(header)), header, whole[end:]]


def write(path: Path, buffers: Sequence[bytes | memoryview]) -> None:
    """Write buffers so that `path` is either absent or whole, whenever the process dies.

    OSError: the disk is full, read-only or gone; nothing is left behind. Processes and threads
    may write the same path at a time: the last one stays.
    """
    draft = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}{PART}")
    with synced_file(path, draft) as file:
        file.writelines(buffers)


def check_of(buffers: Sequence[bytes | memoryview]) -> str:
    """Return the checksum of the header, `TreeFile.check`, of the buffers of `encode`.

    The header holds the checksums of all tensors, so no other contents have the same.
    """
    found = _CHECK.search(buffers[1])
    assert found is not None
    return found[1].decode()


def open_file(path: str, flags: int) -> int:
    """Open a file to read (an `opener`); TornFileError for a pipe, which would wait for ever."""
    held = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(held).st_mode):
        os.close(held)
        raise TornFileError("is no plain file")
    return held


class TreeFile:
    """A file of `encode`, of which any part can be read.

    It is read with plain reads and not mapped: a mapped file that is cut or whose disk fails kills
    the process. TornFileError: it is not whole. OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb", opener=open_file) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(_LENGTH.size)
            if len(prefix) < _LENGTH.size:
                raise TornFileError(f"is cut short at {size} bytes")
            length = _LENGTH.unpack(prefix)[0]
            header = file.read(min(length, size))
        found = _CHECK.search(header)
        plain = header if found is None else header.replace(found[0], _UNCHECKED, 1)
        if found is None or len(header) != length or zlib.crc32(plain) != int(found[1], 16):
            raise TornFileError("has a damaged header")
        table = json.loads(header)
        metadata = table.pop("__metadata__")
        self.check: str = metadata["check"]
        self.skeleton, rows = json.loads(metadata["body"])
        base, named = _LENGTH.size + length, [table[name] for name in sorted(table)]
        # per tensor: type, checksum, shape, first byte and the one behind the last
        self.rows: list[tuple[str, int, list[int], int, int]] = [
            (dtype, int(check, 16), each["shape"], *(base + at for at in each["data_offsets"]))
            for (dtype, check), each in zip(rows, named, strict=True)
        ]
        if size != max((row[-1] for row in self.rows), default=base):
            raise TornFileError(f"is cut short at {size} bytes")

    def read(self, part: int | None = None) -> Any:
        """Return the tree, or one item of a list; TornFileError for a wrong checksum."""
        skeleton = self.skeleton if part is None else self.skeleton["list"][part]
        with open(self.path, "rb", buffering=0, opener=open_file) as file:
            return unflatten(skeleton, lambda number: self._tensor(file, number))

    def _tensor(self, file: Any, number: int) -> Tensor:
        dtype, check, shape, first, end = self.rows[number]
        data = bytearray(end - first)
        file.seek(first)
        rest = memoryview(data)
        while rest and (count := file.readinto(rest)):  # a system reads 2 GiB at most at a time
            rest = rest[count:]
        if rest or zlib.crc32(data) != check:
            raise TornFileError("does not match its checksum")
        kind: torch.dtype = getattr(torch, dtype)
        return (
            torch.frombuffer(data, dtype=kind).view(shape)
            if data
            else torch.empty(shape, dtype=kind)
        )


def lock(path: Path) -> int:
    """Create `path` and lock it until the returned descriptor is closed or the process ends.

    BlockingIOError: another process holds it. OSError: it cannot be made.
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
    """Tell whether a process holds the lock at `path`, or may be about to take it."""
    if sys.platform == "win32" or not path.exists():
        return True
    try:
        os.close(lock(path))
    except OSError:
        return True  # held, or not ours to judge
    return False


def link_or_copy(source: Path, target: Path) -> None:
    """Give a finished file a second name, or copy it where that is not possible."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
        with opened(target) as held:
            os.fsync(held)
