"""Memory of running answers: rows of keys and values, and the data between the stages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mmfast.planner.target import parse_bytes
from mmfast.serve.engine.base import Media, Request, SamplingOptions

STEP = 64  # tokens; rows grow in steps of these


class CacheSlots:
    """Keys and values `[2, rows, H, room, d]` per layer; rows `0..count-1` are answers.

    Values beyond the length of a row are finite and never read. The rows in use take memory, each
    as wide as the widest answer may become; `needed` computes it in advance. `reserved` is the most
    tokens that each row may hold, `lengths` the tokens it holds.
    """

    def __init__(self, layers: int, most: int) -> None:
        self.most = most
        self.data: list[Tensor | None] = [None] * layers
        self.lengths: list[int] = []
        self.reserved: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(each.nbytes for each in self.data if each is not None)

    def shape(self, reserved: Sequence[int]) -> tuple[int, int]:
        """Return rows, and tokens per row, of tensors that hold answers of these lengths."""
        rows = min(self.most, 1 << (len(reserved) - 1).bit_length()) if reserved else 0
        return rows, -(-max(reserved, default=0) // STEP) * STEP

    def needed(self, more: Sequence[int] = ()) -> int:
        """Return the tokens of memory with answers of these lengths beside the running ones."""
        rows, room = self.shape([*self.reserved, *more])
        return rows * room

    def add(self, kv: Sequence[Tensor], reserve: int) -> int:
        """Copy keys and values `[2, H, m, d]` per layer into a row and return its number."""
        row, length = len(self.lengths), int(kv[0].shape[2])
        self.lengths.append(length)
        self.reserved.append(max(reserve, length + 1))
        try:
            self._fit(kv)
        except BaseException:  # out of memory: nothing was added
            self.lengths.pop()
            self.reserved.pop()
            raise
        for own, new in zip(self.data, kv, strict=True):
            assert own is not None
            own[:, row, :, :length] = new
            # An earlier row may have left infinities, and 0 * inf is NaN.
            own[:, row, :, length:] = 0
        return row

    def remove(self, row: int) -> int | None:
        """Free a row; the last row takes its number and is returned, None if it was the last."""
        last = len(self.lengths) - 1
        if row != last:
            length = self.lengths[last]
            for own in self.data:
                assert own is not None
                own[:, row] = own[:, last]
            self.lengths[row], self.reserved[row] = length, self.reserved[last]
        self.lengths.pop()
        self.reserved.pop()
        self._fit(())
        return None if row == last else last

    def row(self, number: int) -> tuple[Tensor, ...]:
        """Return a copy of the keys and values `[2, H, m, d]` of a row per layer."""
        length = self.lengths[number]
        return tuple(own[:, number, :, :length].clone() for own in self.data if own is not None)

    def _fit(self, like: Sequence[Tensor]) -> None:
        rows, room = self.shape(self.reserved)
        made: list[tuple[int, Tensor]] = []
        for i, own in enumerate(self.data):
            if own is not None and own.shape[1] == rows and own.shape[3] == room:
                continue
            if not rows:
                self.data[i] = None
                continue
            source = like[i] if own is None else own
            heads, width = source.shape[-3], source.shape[-1]
            new = source.new_zeros(2, rows, heads, room, width)
            if own is not None:
                r, c = min(rows, own.shape[1]), min(room, own.shape[3])
                new[:, :r, :, :c] = own[:, :r, :, :c]
            made.append((i, new))
        for i, new in made:  # all or nothing
            self.data[i] = new


class RowCache(Cache):  # type: ignore[misc]  # transformers has no types
    """Cache of one decoding step over the rows: one new token per row."""

    def __init__(self, slots: CacheSlots) -> None:
        super().__init__(layers=[])
        self._data, lengths = slots.data, slots.lengths
        first = self._data[0]
        assert first is not None
        self._count, self._stop = len(lengths), max(lengths) + 1
        self._rows = torch.arange(self._count, device=first.device)
        self._at = torch.tensor(lengths, device=first.device)
        even = min(lengths) == max(lengths)
        self.mask = None if even else self._seen(first.dtype)

    def _seen(self, dtype: torch.dtype) -> Tensor:
        """Return the mask `[B, 1, 1, keys]` by which a row attends to its own tokens."""
        keys = torch.arange(self._stop, device=self._at.device)
        hidden = keys > self._at[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self._at.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new token of every row; return keys and values up to the longest row."""
        data = self._data[layer_idx]
        assert data is not None
        keys, values = data[0], data[1]
        keys[self._rows, :, self._at] = key_states[:, :, 0]
        values[self._rows, :, self._at] = value_states[:, :, 0]
        return keys[: self._count, :, : self._stop], values[: self._count, :, : self._stop]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of the longest row."""
        return self._stop - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """See `get_seq_length`."""
        return self._stop - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys, and the first of them."""
        return self._stop, 0


class PackCache(Cache):  # type: ignore[misc]
    """Cache of parts of several prompts in one row, each with its own past.

    `kv` holds `[2, H, m, d]` per layer and prompt, `room` each m; empty lists are filled. `spans`
    are the tokens `(start, stop)` of this pass per prompt.
    """

    def __init__(
        self,
        kv: Sequence[list[Tensor]],
        spans: Sequence[tuple[int, int]],
        room: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layers=[])
        self._kv, self._spans, self._room = kv, spans, room
        self._count = sum(stop - start for start, stop in spans)
        self._keys = sum(stop for _, stop in spans)
        causal = len(spans) == 1 and spans[0][0] == 0
        self.mask = None if causal else self._blocks(dtype, device)

    def _blocks(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the mask `[1, 1, n, keys]`, causal inside each prompt."""
        mask = torch.full((self._count, self._keys), torch.finfo(dtype).min, dtype=dtype)
        row = column = 0
        for start, stop in self._spans:
            n = stop - start
            mask[row : row + n, column : column + stop].triu_(start + 1)
            row, column = row + n, column + stop
        return mask[None, None].to(device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens of every prompt; return keys and values of all of them."""
        row, parts = 0, []
        heads, width = key_states.shape[1], key_states.shape[3]
        for own, (start, stop), room in zip(self._kv, self._spans, self._room, strict=True):
            if len(own) <= layer_idx:
                own.append(key_states.new_zeros(2, heads, room, width))
            held = own[layer_idx]
            held[0, :, start:stop] = key_states[0, :, row : row + stop - start]
            held[1, :, start:stop] = value_states[0, :, row : row + stop - start]
            row += stop - start
            parts.append(held[:, :, :stop])
        both = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return both[0][None], both[1][None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of earlier tokens."""
        return self._keys - self._count

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """See `get_seq_length`."""
        return self._keys - self._count

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys, and the first of them."""
        return self._keys, 0


_SHARE = {"cuda": 0.8, "cpu": 0.25}  # of the free memory; other programs use the CPU's, too
_FALLBACK = 2 << 30


def kv_limit(memory: str | int | None, device: torch.device, sharing: int = 1) -> int:
    """Return the bytes for keys and values: `"2GB"`, or by default a share of the free memory.

    `sharing` counts the workers that share the device, this one included.
    """
    given = parse_bytes(memory)
    if given is not None:
        return given
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE["cuda"] / sharing)
    return int(_free() * _SHARE["cpu"] / sharing)


def _free() -> int:
    """Return the free bytes of this machine, or of the container it runs in."""
    free = _FALLBACK
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        known = dict(line.split(":", 1) for line in lines)
        free = int(known["MemAvailable"].split()[0]) * 1024
        group = Path("/sys/fs/cgroup")
        most = (group / "memory.max").read_text(encoding="ascii").strip()
        if most != "max":
            used = int((group / "memory.current").read_text(encoding="ascii"))
            free = min(free, max(0, int(most) - used))
    except (OSError, ValueError, KeyError):
        pass  # not Linux, or no control group
    return free


T = TypeVar("T")


def moved(value: T, device: torch.device) -> T:
    """Return the value with all its tensors on a device; on the CPU, unchanged.

    Tensors are found in dictionaries, lists, tuples and dataclasses.
    """
    return value if device.type == "cpu" else _moved(value, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(each, device) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(each, device) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: _moved(getattr(value, each.name), device) for each in fields(value)}
        return replace(value, **parts)
    return value


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request after the processor of the model."""

    request: Request
    inputs: dict[str, Any]  # outputs of the processor: ids `[1, L]`, pixels, grids
    media: dict[str, tuple[Media, ...]]  # images and clips by kind, in the order of their pixels
    reduce: str | None  # spec string of reducers at site `pre`; None reduces nothing
    ms: float = 0.0  # milliseconds of the processor

    @property
    def length(self) -> int:
        """Tokens of the prompt before reduction."""
        return int(self.inputs["input_ids"].shape[1])


@dataclass(frozen=True, eq=False)
class Embedded:
    """A prompt of m tokens as the language model reads it."""

    embeds: Tensor
    positions: Tensor  # `[A, m]` int64, the original ones; A is 1, or 3 under M-RoPE
    # hash of everything up to the end of each block of `BLOCK` tokens
    blocks: tuple[bytes, ...] = ()
    visual: Tensor | None = None  # `[m]` bool where there are DeepStack planes; None elsewhere
    planes: tuple[Tensor, ...] = ()  # DeepStack features `[visual tokens, D]` each
    # token ids `[L]` of the prompt before it was reduced, as `generate` would get it
    whole: Tensor | None = None
    reused: int = 0  # tokens of `whole` whose encoding was reused
    visual_tokens: int = 0
    kept_tokens: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    reductions: list[dict[str, Any]] = field(default_factory=list)  # of `Trace.to_dict()`

    @property
    def length(self) -> int:
        """Tokens m."""
        return int(self.embeds.shape[0])

    @property
    def whole_length(self) -> int:
        """Tokens before it was reduced."""
        return self.length if self.whole is None else len(self.whole)

    @property
    def trace(self) -> dict[str, Any]:
        """Entries of the trace, without tensors."""
        names = ("rows", "reductions", "visual_tokens", "kept_tokens")
        return {**{name: getattr(self, name) for name in names}, "prompt": self.length}


@dataclass(frozen=True, eq=False)
class Filled:
    """A prompt after prefill."""

    kv: tuple[Tensor, ...]  # keys and values per decoder layer, `[2, H, m, d]`
    position: Tensor  # `[A]` int64 of the first token of the answer
    logits: Tensor  # `[V]` float32 at the end of the prompt
    reused: int = 0  # tokens of the prompt whose keys and values were reused
    # distinct token ids of prompt, for repetition penalties; None where there is none
    seen: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens m."""
        return int(self.kv[0].shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(each.nbytes for each in self.kv)


@dataclass(frozen=True)
class Draw:
    """Options of choosing one token of one answer."""

    sampling: SamplingOptions
    step: int = 0  # number of the token in the answer, from 0
