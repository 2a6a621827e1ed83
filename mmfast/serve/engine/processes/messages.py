"""Messages between processes: values pickled without their tensors, which travel as bytes.

The tensors of a message lie in one segment of shared memory, each named by an `EmbedRef`. The
receiver copies them and frees the segment. If the receiver died first, the sender frees it
(`free`); if all processes are killed, Python's resource tracker does.
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
import torch
from torch import Tensor

from mmfast.serve.engine.base import BusyError

ALIGN = 64


@dataclass(frozen=True)
class EmbedRef:
    """A tensor or array in a segment of shared memory."""

    name: str  # the segment; "" where the bytes travel with the message
    offset: int
    shape: tuple[int, ...]
    dtype: str  # name in torch, such as `bfloat16`; of an array the numpy code, such as `<f4`
    array: bool = False


class Packer(pickle.Pickler):
    """Pickles a value without its tensors; a tensor that occurs twice travels once.

    `found` holds the reference, bytes and object of each tensor, `size` the bytes of all.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.found: dict[int, tuple[EmbedRef, Any, Any]] = {}
        self.size = 0

    def persistent_id(self, value: Any) -> EmbedRef | None:
        """See `pickle.Pickler`."""
        known = self.found.get(id(value))
        if known is not None:
            return known[0]
        if type(value) is Tensor or type(value) is torch.nn.Parameter:
            data, ref = _of_tensor(value, self.size)
        elif type(value) is np.ndarray and not value.dtype.hasobject:
            # reshape: ascontiguousarray makes a vector of a scalar
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            ref = EmbedRef("", self.size, value.shape, value.dtype.str, True)
        else:
            return None
        self.found[id(value)] = (ref, data, value)
        self.size += -(-data.nbytes // ALIGN) * ALIGN
        return ref


def _of_tensor(value: Tensor, offset: int) -> tuple[Any, EmbedRef]:
    flat = value.detach().cpu().contiguous().reshape(-1)
    name = str(value.dtype).removeprefix("torch.")
    # numpy knows no bfloat16, so everything goes as bytes
    return flat.view(torch.uint8).numpy(), EmbedRef("", offset, tuple(value.shape), name)


class Unpacker(pickle.Unpickler):
    """Restores a value that `Packer` has pickled; its tensors are copies."""

    def __init__(self, body: bytes, data: memoryview | bytes) -> None:
        super().__init__(io.BytesIO(body))
        self._data, self._made = data, dict[EmbedRef, Any]()

    def persistent_load(self, ref: Any) -> Any:
        """See `pickle.Unpickler`."""
        if ref not in self._made:
            self._made[ref] = _made(ref, self._data)
        return self._made[ref]


def _made(ref: EmbedRef, data: memoryview | bytes) -> Any:
    kind: Any = np.dtype(ref.dtype) if ref.array else getattr(torch, ref.dtype)
    count = int(np.prod(ref.shape, dtype=np.int64)) * kind.itemsize
    own = bytearray(data[ref.offset : ref.offset + count])  # the segment will be freed
    if ref.array:
        return np.frombuffer(own, kind).reshape(ref.shape)
    if not count:
        return torch.empty(ref.shape, dtype=kind)
    return torch.frombuffer(own, dtype=kind).reshape(ref.shape)


def fill(target: memoryview | bytearray, packer: Packer) -> None:
    """Write the bytes of all tensors."""
    for ref, data, _ in packer.found.values():
        target[ref.offset : ref.offset + data.nbytes] = data.data


_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EFBIG)
SMALL = 1 << 15  # bytes up to which a pipe is faster than a new segment


@dataclass(frozen=True)
class SharedMessage:
    """A message between two processes."""

    body: bytes
    name: str = ""  # segment of the tensors; "" without one
    size: int = 0  # bytes of all tensors
    inline: bytes = b""  # the tensors themselves, where they are small


@dataclass(frozen=True, eq=False)
class Parcel:
    """A message without shared memory, for Ray, which carries arrays without copying."""

    body: bytes
    data: np.ndarray[Any, Any]


class SegmentNames:
    """Names of the segments of one process, numbered so that its parent can list them."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.count = prefix, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.count += 1
        return f"{self.prefix}-{self.count}"


def pack(value: Any, names: SegmentNames) -> SharedMessage:
    """Pickle a value, its tensors and arrays in shared memory.

    Tensors of a device are copied to the CPU; the receiver moves them (`moved`). Raises `BusyError`
    if there is no room in shared memory.
    """
    file = io.BytesIO()
    packer = Packer(file)
    packer.dump(value)
    if packer.size <= SMALL:
        inline = bytearray(packer.size)
        fill(inline, packer)
        return SharedMessage(file.getvalue(), size=packer.size, inline=bytes(inline))
    segment = _reserved(next(names), packer.size)
    try:
        fill(_bytes(segment), packer)
    except BaseException:
        segment.unlink()
        raise
    finally:
        segment.close()
    return SharedMessage(file.getvalue(), segment.name, packer.size)


def _reserved(name: str, size: int) -> SharedMemory:
    """Create a segment with all its pages: writing to a missing page would kill the process."""
    try:
        segment = SharedMemory(name, create=True, size=size)
    except OSError as error:
        raise _full(size, error) from None
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(segment._fd, 0, size)  # type: ignore[attr-defined]
    except OSError as error:
        if error.errno in _FULL:  # else this system cannot reserve pages
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
    """Pickle a value and its tensors without shared memory."""
    file = io.BytesIO()
    packer = Packer(file)
    packer.dump(value)
    data = np.zeros(packer.size, np.uint8)
    fill(data.data, packer)
    return Parcel(file.getvalue(), data)


def unwrap(parcel: Parcel) -> Any:
    """Return the value of a parcel; its tensors are copies."""
    return Unpacker(parcel.body, parcel.data.data).load()


def unpack(packet: SharedMessage) -> Any:
    """Return the value of a message and free its segment; works once.

    A missing segment raises `FileNotFoundError`.
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
    """Free a segment that was not taken; return True if it was there."""
    if not name:
        return False
    try:
        segment = SharedMemory(name)
    except FileNotFoundError:
        return False
    segment.unlink()
    segment.close()
    return True
