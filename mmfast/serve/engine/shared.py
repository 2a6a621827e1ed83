"""Tensors between processes of one machine: in shared memory, the rest of a message beside them.

A message is pickled without its tensors; those lie in one segment of shared memory, each named by
an `EmbedRef`. Who takes a message copies them out and frees the segment. A segment whose taker
died first is freed by whoever sent it the name (`free`), and by Python's resource tracker should
the whole family of processes be killed.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from mmfast.serve.engine.base import BusyError
from mmfast.serve.engine.pickling import EmbedRef, Packer, Unpacker, fill

__all__ = ["EmbedRef", "Names", "Packet", "Parcel", "free", "pack", "unpack", "unwrap", "wrap"]

_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EFBIG)
SMALL = 1 << 15  # bytes that travel with the message: a pipe is quicker than a new segment


@dataclass(frozen=True)
class Packet:
    """A message on its way.

    Attributes:
        body: Pickle of everything but tensors, with an `EmbedRef` for each.
        name: Segment of the tensors; "" without one.
        size: Bytes of all tensors.
        inline: The tensors themselves, where they are small.
    """

    body: bytes
    name: str = ""
    size: int = 0
    inline: bytes = b""

    def to_bytes(self) -> bytes:
        """For a pipe."""
        return pickle.dumps((self.body, self.name, self.size, self.inline), protocol=5)

    @staticmethod
    def from_bytes(data: bytes) -> Packet:
        """The opposite of `to_bytes`."""
        return Packet(*pickle.loads(data))


@dataclass(frozen=True, eq=False)
class Parcel:
    """A message for those who carry arrays without copying them, such as Ray.

    Attributes:
        body: Pickle of everything but tensors, with an `EmbedRef` for each.
        data: `[bytes]` uint8 of all tensors.
    """

    body: bytes
    data: np.ndarray[Any, Any]


class Names:
    """Names of the segments that one process makes, in an order that its parent knows, too.

    Args:
        prefix: Of all its names.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix, self.count = prefix, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.count += 1
        return f"{self.prefix}-{self.count}"


def pack(value: Any, names: Names) -> Packet:
    """Pickle a value, its tensors and arrays in shared memory.

    Tensors of a device come to the CPU; the taker moves them where it wants them.

    Args:
        value: Anything that can be pickled.
        names: Where the next segment gets its name.

    Raises:
        BusyError: There is no room in shared memory.
    """
    file = io.BytesIO()
    packer = Packer(file)
    packer.dump(value)
    if packer.size <= SMALL:
        inline = bytearray(packer.size)
        fill(inline, packer)
        return Packet(file.getvalue(), size=packer.size, inline=bytes(inline))
    segment = _reserved(next(names), packer.size)
    try:
        fill(_bytes(segment), packer)
    except BaseException:
        segment.unlink()
        raise
    finally:
        segment.close()
    return Packet(file.getvalue(), segment.name, packer.size)


def _reserved(name: str, size: int) -> SharedMemory:
    """A segment whose bytes are there: a page that is not kills whoever writes to it."""
    try:
        segment = SharedMemory(name, create=True, size=size)
    except OSError as error:
        raise _full(size, error) from None
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(segment._fd, 0, size)  # type: ignore[attr-defined]
    except OSError as error:
        if error.errno in _FULL:  # else this system cannot say beforehand
            segment.unlink()
            segment.close()
            raise _full(size, error) from None
    return segment


def _full(size: int, error: OSError) -> Exception:
    if error.errno not in _FULL:
        return error
    return BusyError(
        f"shared memory has no room for {size:,} bytes ({error.strerror}); try again in a second, "
        "or give /dev/shm more"
    )


def wrap(value: Any) -> Parcel:
    """As `pack`, without shared memory."""
    file = io.BytesIO()
    packer = Packer(file)
    packer.dump(value)
    data = np.zeros(packer.size, np.uint8)
    fill(data.data, packer)
    return Parcel(file.getvalue(), data)


def unwrap(parcel: Parcel) -> Any:
    """The value of a parcel; its tensors are copies."""
    return Unpacker(parcel.body, parcel.data.data).load()


def unpack(packet: Packet) -> Any:
    """The value of a packet; its segment is freed, so a packet can be taken once.

    Raises:
        FileNotFoundError: Its segment is gone.
    """
    if not packet.name:
        return Unpacker(packet.body, packet.inline).load()
    segment = SharedMemory(packet.name)
    try:
        return Unpacker(packet.body, _bytes(segment)).load()
    finally:
        segment.unlink()
        segment.close()


def _bytes(segment: SharedMemory) -> memoryview:
    assert segment.buf is not None
    return segment.buf


def free(name: str) -> bool:
    """Free a segment that nobody took.

    Returns:
        Whether it was there.
    """
    if not name:
        return False
    try:
        segment = SharedMemory(name)
    except FileNotFoundError:
        return False
    segment.unlink()
    segment.close()
    return True
