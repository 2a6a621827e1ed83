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

from mmfast.core.kv import KVBlock
from mmfast.models.reduction.cache_layers import Pair, cache_over
from mmfast.ops.stream_cache import RowBuffer, Span
from mmfast.planner.target import parse_bytes
from mmfast.serve.engine.base import Media, Request, SamplingOptions

STEP = 64  # tokens; rows grow in steps of these


class CacheSlots:
    """Keys and values `[2, rows, H, room, d]` of all layers; rows `0..count-1` are answers.

    Values beyond the length of a row are finite and never read. The rows in use take memory, each
    as wide as the widest answer may become; `needed` computes it in advance. `reserved` is the most
    tokens that each row may hold, `lengths` the tokens it holds.
    """

    def __init__(self, layers: int, most: int) -> None:
        self.most = most
        self.layers = [RowBuffer() for _ in range(layers)]
        self.lengths: list[int] = []
        self.reserved: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(each.nbytes for each in self.layers)

    def shape(self, reserved: Sequence[int]) -> tuple[int, int]:
        """Return rows, and tokens per row, of tensors that hold answers of these lengths."""
        rows = min(self.most, 1 << (len(reserved) - 1).bit_length()) if reserved else 0
        return rows, -(-max(reserved, default=0) // STEP) * STEP

    def needed(self, more: Sequence[int] = ()) -> int:
        """Return the tokens of memory with answers of these lengths beside the running ones."""
        rows, room = self.shape([*self.reserved, *more])
        return rows * room

    def add(self, kv: KVBlock, reserve: int) -> int:
        """Copy the keys and values `[H, m, d]` of a prompt into a row and return its number."""
        row, length = len(self.lengths), int(kv.keys[0].shape[1])
        self.lengths.append(length)
        self.reserved.append(max(reserve, length + 1))
        try:
            self._fit(kv.keys)
        except BaseException:  # out of memory: nothing was added
            self.lengths.pop()
            self.reserved.pop()
            raise
        for own, keys, values in zip(self._data, kv.keys, kv.values, strict=True):
            own[0, row, :, :length], own[1, row, :, :length] = keys, values
            # An earlier row may have left infinities, and 0 * inf is NaN.
            own[:, row, :, length:] = 0
        return row

    def remove(self, row: int) -> int | None:
        """Free a row; the last row takes its number and is returned, None if it was the last."""
        last = len(self.lengths) - 1
        if row != last:
            length = self.lengths[last]
            for own in self._data:
                own[:, row] = own[:, last]
            self.lengths[row], self.reserved[row] = length, self.reserved[last]
        self.lengths.pop()
        self.reserved.pop()
        self._fit(())
        return None if row == last else last

    def row(self, number: int) -> KVBlock:
        """Return a copy of the keys and values `[H, m, d]` of a row."""
        rows = [own[:, number, :, : self.lengths[number]].clone() for own in self._data]
        return KVBlock(tuple(row[0] for row in rows), tuple(row[1] for row in rows))

    def cache(self) -> tuple[Cache, Tensor | None]:
        """Return the cache of one decoding step over the rows, a new token each, and its mask."""
        count, stop = len(self.lengths), max(self.lengths) + 1
        first = self._data[0]
        rows = torch.arange(count, device=first.device)[:, None]
        at = torch.tensor(self.lengths, device=first.device)[:, None]

        def write(layer: int, keys: Tensor, values: Tensor) -> Pair:
            own = self.layers[layer]
            own.scatter(torch.stack((keys, values)), (rows, at))
            return own.read(0, 0, stop)[:count], own.read(1, 0, stop)[:count]

        even = min(self.lengths) == max(self.lengths)
        mask = None if even else rows_mask(at, stop, first.dtype)
        return cache_over(len(self.layers), write, lambda _: stop - 1), mask

    @property
    def _data(self) -> list[Tensor]:
        return [own.data for own in self.layers if own.data is not None]

    def _fit(self, like: Sequence[Tensor]) -> None:
        rows, room = self.shape(self.reserved)
        made: list[tuple[RowBuffer, Tensor | None]] = []
        for i, own in enumerate(self.layers):
            old, new = own.data, None
            if old is not None and old.shape[1] == rows and old.shape[3] == room:
                continue
            if rows:
                source = like[i] if old is None else old
                new = source.new_zeros(2, rows, source.shape[-3], room, source.shape[-1])
                if old is not None:
                    r, c = min(rows, old.shape[1]), min(room, old.shape[3])
                    new[:, :r, :, :c] = old[:, :r, :, :c]
            made.append((own, new))
        for own, new in made:  # all or nothing
            own.data = new


def rows_mask(at: Tensor, stop: int, dtype: torch.dtype) -> Tensor:
    """Return the mask `[B, 1, 1, keys]` of rows that attend up to their own `at` `[B, 1]`."""
    hidden = torch.arange(stop, device=at.device) > at
    mask = torch.zeros(hidden.shape, dtype=dtype, device=at.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None, None]


def prompts_mask(spans: Sequence[Span], dtype: torch.dtype) -> Tensor:
    """Return the mask `[1, 1, n, keys]` of parts of several prompts, causal inside each.

    `spans` are the tokens `(start, stop)` of this pass per prompt.
    """
    count, keys = sum(stop - start for start, stop in spans), sum(stop for _, stop in spans)
    mask = torch.full((count, keys), torch.finfo(dtype).min, dtype=dtype)
    row = column = 0
    for start, stop in spans:
        n = stop - start
        mask[row : row + n, column : column + stop].triu_(start + 1)
        row, column = row + n, column + stop
    return mask[None, None]


def prompts_cache(
    layers: int, buffers: Sequence[list[RowBuffer]], spans: Sequence[Span], room: Sequence[int]
) -> Cache:
    """Return the cache of a pass over parts of several prompts in one row, each with its own past.

    `buffers` are those of the layers per prompt, made at the first pass for `room` tokens.
    """

    def write(layer: int, keys: Tensor, values: Tensor) -> Pair:
        row, parts = 0, []
        _, heads, _, width = keys.shape
        for own, (start, stop), most in zip(buffers, spans, room, strict=True):
            if len(own) <= layer:
                own.append(RowBuffer(data=keys.new_zeros(2, heads, most, width)))
            new = slice(row, row + stop - start)
            own[layer].write(keys[0, :, new], values[0, :, new], at=start)
            row = new.stop
            parts.append(own[layer].read(slice(None), 0, stop))
        both = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return both[0][None], both[1][None]

    return cache_over(layers, write, lambda _: sum(start for start, _ in spans))


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

    kv: KVBlock  # keys and values per decoder layer, `[H, m, d]`
    position: Tensor  # `[A]` int64 of the first token of the answer
    logits: Tensor  # `[V]` float32 at the end of the prompt
    reused: int = 0  # tokens of the prompt whose keys and values were reused
    # distinct token ids of prompt, for repetition penalties; None where there is none
    seen: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens m."""
        return int(self.kv.keys[0].shape[1])


@dataclass(frozen=True)
class Draw:
    """Options of choosing one token of one answer."""

    sampling: SamplingOptions
    step: int = 0  # number of the token in the answer, from 0
