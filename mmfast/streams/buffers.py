"""Keys and values of live tokens: one tensor per layer that is filled, compacted and not replaced.

Attention reads the rotated keys and the values as views of the buffer, so a new token costs
a copy of itself and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from mmfast.core.errors import ModelError
from mmfast.models.raw import Raw

RAW, ROTATED, VALUES = range(3)
# Every head starts at the same alignment, whatever the capacity: some matrix products round by it.
_STEP = 64

Span = tuple[int, int]


class Buffer:
    """Tokens of one layer, in the order of time.

    Args:
        reserve: Tokens to make room for at once.
        bounded: It never holds more than `reserve` and one new piece, so it need not grow ahead.

    Attributes:
        data: `[3, H, capacity, d]`: keys before RoPE, rotated keys, values. None until the first
            token says which shape, dtype and device the layer has.
        length: Tokens that are there; what is written behind them is not there yet.
    """

    def __init__(self, reserve: int = 0, bounded: bool = False) -> None:
        self._reserve = reserve
        self._bounded = bounded
        self.data: Tensor | None = None
        self.length = 0

    def write(self, raw: Tensor, rotated: Tensor, values: Tensor) -> None:
        """Put tokens `[H, n, d]` behind the last one, without counting them in."""
        if raw.shape != values.shape:
            raise ModelError(
                f"keys of shape {list(raw.shape)} and values of shape {list(values.shape)} differ, "
                "which streams cannot keep; use a model whose heads are equally wide"
            )
        n = raw.shape[-2]
        data = self.room(n, raw)
        for plane, rows in ((RAW, raw), (ROTATED, rotated), (VALUES, values)):
            data[plane, :, self.length : self.length + n].copy_(rows)

    def room(self, n: int, like: Tensor) -> Tensor:
        """The data, large enough for `n` more tokens like `[H, n, d]`."""
        needed = self.length + n
        have = 0 if self.data is None else self.data.shape[2]
        if self.data is None or needed > have:
            ahead = 0 if self._bounded else have + have // 2
            wanted = max(needed, self._reserve + n, ahead)
            heads, _, width = like.shape
            capacity = -(-wanted // _STEP) * _STEP
            data = like.new_empty(3, heads, capacity, width)
            if self.data is not None:
                data[:, :, : self.length].copy_(self.data[:, :, : self.length])
            self.data = data
        return self.data

    def read(self, plane: int, start: int = 0, stop: int | None = None) -> Tensor:
        """A view `[H, stop - start, d]` of one plane; `stop` None is the end."""
        assert self.data is not None
        return self.data[plane, :, start : self.length if stop is None else stop]

    def read_all(self, start: int, stop: int) -> Tensor:
        """A view `[3, H, stop - start, d]` of all planes."""
        assert self.data is not None
        return self.data[:, :, start:stop]

    def keep(self, spans: Sequence[Span]) -> None:
        """Keep only these ranges, ascending, and close the gaps between them."""
        if self.data is None:
            return
        end = 0
        for start, stop in _joined(spans):
            if start != end:
                moved = self.data[:, :, start:stop]
                overlap = start < end + stop - start
                self.data[:, :, end : end + stop - start].copy_(moved.clone() if overlap else moved)
            end += stop - start
        self.length = end

    def select(self, index: Tensor, n: int) -> None:
        """Of the last `n` tokens written, which are not counted in, leave only `index` `[m]`."""
        assert self.data is not None
        tail = self.data[:, :, self.length : self.length + n]
        chosen = tail.index_select(2, index.to(tail.device))
        self.data[:, :, self.length : self.length + len(index)].copy_(chosen)

    def fork(self, reserve: int) -> Buffer:
        """A copy with room for `reserve` more tokens."""
        copy = Buffer(reserve)
        if self.data is not None:
            head = self.data[:, :, : self.length]
            copy.room(self.length, head[0])[:, :, : self.length].copy_(head)
            copy.length = self.length
        return copy

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, whether filled or not."""
        return 0 if self.data is None else self.data.numel() * self.data.element_size()


def _joined(spans: Sequence[Span]) -> list[Span]:
    """The same ranges, those that touch as one."""
    joined: list[Span] = []
    for start, stop in spans:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


class Slot(DynamicLayer):  # type: ignore[misc]
    """A buffer as one layer of a transformers cache, for one forward pass.

    Args:
        layer: The decoder layer.
        buffer: Where its tokens are.
        raw: Where the keys before RoPE arrive.
        recall: Called before the new tokens are written, with the queries known by then.
    """

    def __init__(
        self, layer: int, buffer: Buffer, raw: Raw, recall: Callable[[int], None] | None = None
    ) -> None:
        super().__init__()
        self.is_initialized = True
        self._layer = layer
        self._buffer = buffer
        self._raw = raw
        self._recall = recall

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write `[1, H, n, d]` behind what is there and give all of it to the attention."""
        if self._recall is not None:
            self._recall(self._layer)
        raw = self._raw.keys.pop(self._layer)
        self._buffer.write(raw[0], key_states[0], value_states[0])
        stop = self._buffer.length + key_states.shape[2]
        keys, values = (self._buffer.read(plane, 0, stop) for plane in (ROTATED, VALUES))
        return keys[None], values[None]

    def get_seq_length(self) -> int:
        """Tokens before this pass."""
        return self._buffer.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All tokens, the new ones too, and no offset."""
        return self._buffer.length + query_length, 0


def same_length(buffers: Sequence[Buffer]) -> bool:
    """Whether all layers hold equally many tokens, so that one mask serves them all."""
    return len({buffer.length for buffer in buffers}) < 2


def live_bytes(buffers: Sequence[Buffer]) -> int:
    """Bytes of all buffers."""
    return sum(buffer.nbytes for buffer in buffers)
