"""Messages as a pickle and, apart from it, the bytes of their tensors and arrays."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGN = 64


@dataclass(frozen=True)
class EmbedRef:
    """A tensor or array in a segment of shared memory.

    Attributes:
        name: The segment; "" where the bytes travel with the message.
        offset: Where it starts, in bytes.
        shape: As of the tensor.
        dtype: Name in torch, such as `bfloat16`; of an array its numpy code, such as `<f4`.
        array: It is a numpy array.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    array: bool = False


class Packer(pickle.Pickler):
    """Takes tensors out of what it pickles; one that occurs twice travels once.

    Args:
        file: Gets everything but tensors, with an `EmbedRef` for each.

    Attributes:
        found: Per tensor its ref, its bytes, and itself.
        size: Bytes of all of them.
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
    """The opposite of `Packer`; its tensors are copies.

    Args:
        body: What was pickled.
        data: Bytes of all tensors.
    """

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
    own = bytearray(data[ref.offset : ref.offset + count])  # the segment is freed behind it
    if ref.array:
        return np.frombuffer(own, kind).reshape(ref.shape)
    if not count:
        return torch.empty(ref.shape, dtype=kind)
    return torch.frombuffer(own, dtype=kind).reshape(ref.shape)


def fill(target: memoryview | bytearray, packer: Packer) -> None:
    """Write the bytes of all tensors."""
    for ref, data, _ in packer.found.values():
        target[ref.offset : ref.offset + data.nbytes] = data.data
