"""One stored block as one file: sections that are read alone, each with its checksum.

Layout: magic, length and CRC-32 of the header, the header (JSON), then one section per layer
behind one for what all layers share. Little-endian; tensors start at multiples of 64 bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.streams.tree import from_plain, to_plain

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
