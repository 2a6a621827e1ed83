"""Keys and values of conversations: in place (`RowBuffer`), and as a value (`core.kv.KVBlock`).

A buffer holds one tensor of a layer, each stream of a batch at its own length. New tokens are
written behind the others, or at the places of a `TokenPlaces`, and attention reads views, so a
token costs a copy of itself. Rows behind the length of a stream are not valid, so taking tokens
back costs nothing.

Of a `KVBlock` steps make new ones. A place is a position in time. Several tokens may share one (the
two channels of a dialogue): a token sees all tokens of earlier places, and itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.core.kv import KVBlock

Angles = tuple[Tensor, Tensor]  # cos and sin, each [positions, rotated width]
Span = tuple[int, int]

# Every head starts at the same alignment, whatever the capacity: some matrix products round by it.
_STEP = 64
_STRIP = 32  # widest pass whose mask is a view of a prepared strip


@dataclass(slots=True)
class TokenPlaces:
    """Places of the tokens of one pass, for all layers."""

    start: int  # position of the first new token; of the earliest stream where they differ
    stop: int  # behind the last new token, of the latest stream
    first: int  # the oldest position that is read
    n: int  # new tokens per stream
    turn: Tensor  # cosines and sines as complex numbers `[.., n, r / 2]`, a pair each
    angles: Angles  # cosines and sines `[1 or B, n, r]` as stock layers take them
    mask: Tensor | None  # added to scores, `[n, keys]` or `[B, 1, n, keys]`; None if all visible
    causal: bool  # the pass starts at the first key: plain causal attention
    at: tuple[Tensor, Tensor] | None  # streams `[B, 1]`, positions `[B, n]`, where they differ
    alone: bool = False  # every token sees itself and nothing else: there is nothing to keep


class RowBuffer:
    """Rows of one layer, `[P, .., H, capacity, d]`: in one tensor, written in place, grown if full.

    The P planes are keys and values, in a stream of frames also keys before RoPE; between planes
    and heads stand the streams of a batch. `data` is None until rows tell its shape, dtype and
    device. `length` counts the rows of one conversation; what is written behind it is not there
    yet. Rows of a batch, each as long as its owner says, are written at their own places.

    There is room for `reserve` rows at once. A `bounded` buffer never holds more than that and one
    new piece, so it need not grow ahead.

    The buffers that `fork` makes of one have its tensor, each with rows of its own behind those
    that all share. Who reads or writes first puts back what others have overwritten of it, and they
    keep aside what it overwrites: a few rows of a question, not the window. Rows are given up
    (`keep`) in another tensor, so that those of a fork stay where they are. They take turns, one
    thread at a time, until a buffer is `alone`.
    """

    __slots__ = ("__weakref__", "_aside", "_users", "bounded", "data", "length", "reserve")

    def __init__(
        self, reserve: int = 0, *, bounded: bool = False, data: Tensor | None = None
    ) -> None:
        self.reserve, self.bounded, self.data = reserve, bounded, data
        self.length = 0
        self._aside: list[tuple[int, Tensor]] = []  # own rows that are overwritten, by place
        self._users: WeakSet[RowBuffer] | None = None  # of the tensor, once it is forked

    @property
    def alone(self) -> bool:
        """Nobody else has this tensor, nor ever will unless this buffer is forked."""
        return self._users is None or len(self._users) < 2

    def fork(self, room: int) -> RowBuffer:
        """Another buffer with the same rows in the same tensor, and room for as many more."""
        branch = RowBuffer(self.length + room)
        if self.data is not None:
            if self.length + room > self.data.shape[-2]:
                self._grow(self.data, self.data.shape[:-2], self.length, room)
            self.claim(0, 0)
            self._users = self._users or WeakSet([self])
            branch.data, branch.length, branch._users = self.data, self.length, self._users
            self._users.add(branch)
        return branch

    def write(self, *planes: Tensor, at: int | None = None) -> None:
        """Put rows `[.., H, n, d]` of every plane at a place, without counting them in.

        None is behind the last one. ModelError where planes differ in shape.
        """
        first = planes[0]
        start, n = self.length if at is None else at, first.shape[-2]
        if self.data is None or start + n > self.data.shape[-2]:
            if any(plane.shape != first.shape for plane in planes):
                raise ModelError(
                    f"keys and values of shapes {[list(plane.shape) for plane in planes]} cannot "
                    "lie side by side; use a model whose heads are equally wide"
                )
            self._grow(first, (len(planes), *first.shape[:-2]), start, n)
        assert self.data is not None
        if self._users is not None or self._aside:
            self.claim(start, start + n)
        for own, plane in zip(self.data.narrow(-2, start, n).unbind(0), planes, strict=True):
            own.copy_(plane)

    def put(self, both: Tensor, place: TokenPlaces) -> tuple[Tensor, Tensor]:
        """Write keys and values `[2, B, H, n, d]`; read all up to them, `[B, H, keys, d]`."""
        if self.data is None or place.stop > self.data.shape[3]:
            self._grow(both, both.shape[:-2], place.start, place.stop - place.start)
        assert self.data is not None
        if place.at is None:
            self.data.narrow(3, place.start, place.n).copy_(both)
        else:
            self.scatter(both, place.at)
        keys, values = self.data.narrow(3, place.first, place.stop - place.first).unbind(0)
        return keys, values

    def put_two(self, keys: Tensor, values: Tensor, place: TokenPlaces) -> tuple[Tensor, Tensor]:
        """As `put`, of keys and values `[B, H, n, d]` that lie apart."""
        if place.at is not None:
            return self.put(torch.stack((keys, values)), place)
        self.write(keys, values, at=place.start)
        return self.read(0, place.first, place.stop), self.read(1, place.first, place.stop)

    def scatter(self, both: Tensor, at: tuple[Tensor, Tensor]) -> None:
        """Write `[2, B, H, n, d]` to the streams `[B, 1]` and places `[B, n]` that `at` names."""
        assert self.data is not None
        # Indices with a slice between them go to the front: [B, n, 2, H, d].
        self.data.permute(1, 3, 0, 2, 4)[at] = both.permute(1, 3, 0, 2, 4)

    def read(self, plane: int | slice, start: int = 0, stop: int | None = None) -> Tensor:
        """A view `[.., H, stop - start, d]` of one plane, or of several; `stop` None is the end.

        Of a forked buffer it holds until another one of the tensor is used.
        """
        assert self.data is not None
        if self._aside:
            self.claim(0, 0)
        return self.data[plane].narrow(-2, start, (self.length if stop is None else stop) - start)

    def keep(self, spans: Sequence[Span]) -> None:
        """Keep only these ranges, ascending, and close the gaps between them."""
        if self.data is None:
            return
        if not self.alone:
            return self._keep_apart(spans)
        end = 0
        for start, stop in _joined(spans):
            n = stop - start
            if start != end:
                moved = self.data.narrow(-2, start, n)
                target = self.data.narrow(-2, end, n)
                target.copy_(moved.clone() if start < end + n else moved)
            end += n
        self.length = end

    def _keep_apart(self, spans: Sequence[Span]) -> None:
        assert self.data is not None
        self.claim(0, 0)
        data, end = torch.empty_like(self.data), 0
        for start, stop in spans:
            n = stop - start
            data.narrow(-2, end, n).copy_(self.data.narrow(-2, start, n))
            end += n
        self.length = end
        self._alone_with(data)  # last: who is alone with the old tensor now writes without a turn

    def pick(self, index: Tensor) -> None:
        """Keep only the rows `index` `[m]`, ascending; they may stand behind those counted in."""
        assert self.data is not None
        self.claim(0, 0)
        rows = self.data.index_select(-2, index)
        if self.bounded and self.data.shape[-2] > 2 * max(self.reserve, len(index), _STEP):
            # One long piece does not hold its room for ever.
            capacity = -(-max(self.reserve, len(index)) // _STEP) * _STEP
            shape = (*rows.shape[:-2], capacity, rows.shape[-1])
            self._alone_with(rows.new_empty(shape))
        elif not self.alone:
            self._alone_with(torch.empty_like(self.data))
        self.data.narrow(-2, 0, len(index)).copy_(rows)
        self.length = len(index)

    def revise(self, plane: int, rows: Tensor, at: int) -> None:
        """Overwrite one plane of rows `[H, n, d]` that are there."""
        self.claim(at, at + rows.shape[-2])
        self.read(plane, at, at + rows.shape[-2]).copy_(rows)

    def select(self, index: Tensor, n: int) -> None:
        """Of the last `n` rows written, which are not counted in, leave only `index` `[m]`."""
        assert self.data is not None
        tail = self.data.narrow(-2, self.length, n)
        chosen = tail.index_select(-2, index.to(tail.device))
        self.data.narrow(-2, self.length, len(index)).copy_(chosen)

    def _grow(self, like: Tensor, lead: tuple[int, ...], start: int, n: int) -> None:
        """Make the tensor `[*lead, capacity, d]` hold `n` rows from `start` on."""
        have = 0 if self.data is None else self.data.shape[-2]
        wanted = self.reserve + n if self.bounded else max(self.reserve, have + have // 2)
        capacity = -(-max(start + n, wanted) // _STEP) * _STEP
        data = like.new_empty(*lead, capacity, like.shape[-1])
        if self.data is not None:
            data.narrow(-2, 0, have).copy_(self.data)
        if len(lead) > 2:  # streams of a batch read rows behind their own, at a weight of 0
            data.narrow(-2, have, capacity - have).zero_()
        self._alone_with(data)

    def _alone_with(self, data: Tensor) -> None:
        if self._users is not None:
            self._users.discard(self)
        self.data, self._users = data, None

    def claim(self, start: int, stop: int) -> None:
        """Have all own rows in the tensor, and rows `start:stop` to be overwritten."""
        if self.data is None or (self.alone and not self._aside):
            return
        mine = [(at, at + rows.shape[-2]) for at, rows in self._aside]
        for other in list(self._users or ()):
            if other is not self:
                for span in (*mine, (start, stop)):
                    other._set_aside(*span)
        for at, rows in self._aside:
            self.data.narrow(-2, at, rows.shape[-2]).copy_(rows)
        self._aside.clear()

    def _set_aside(self, start: int, stop: int) -> None:
        """Copy own rows of a range, but for those that are aside already."""
        assert self.data is not None
        stop = min(stop, self.length)
        gaps = []
        for at, rows in sorted(self._aside, key=lambda each: each[0]):
            if start < at + rows.shape[-2] and at < stop:
                gaps.append((start, at))
                start = at + rows.shape[-2]
        for first, end in (*gaps, (start, stop)):
            if first < end:
                self._aside.append((first, self.data.narrow(-2, first, end - first).clone()))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, whether filled or not."""
        return 0 if self.data is None else self.data.nbytes


def _joined(spans: Sequence[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start != stop:
            joined.append((start, stop))
    return joined


class Placer:
    """Makes places: rotary tables and masks are prepared once and sliced.

    `angles(n)` gives cosines and sines of the positions `0..n-1`, each `[n, r]`. A token sees
    `window` positions, 0 is all. `explicit` masks also where `causal` says the same.
    """

    def __init__(
        self,
        angles: Callable[[int], Angles],
        device: torch.device,
        dtype: torch.dtype,
        window: int = 0,
        explicit: bool = False,
    ) -> None:
        self._make, self._device, self._dtype = angles, device, dtype
        self.window, self.explicit = window, explicit
        self._tables: tuple[Tensor, Tensor, Tensor] | None = None
        self._strip: Tensor | None = None

    def with_window(self, window: int) -> Placer:
        """The same positions, seen through another window."""
        twin = Placer(self._make, self._device, self._dtype, window, self.explicit)
        twin._tables = self._tables
        return twin

    def even(self, start: int, n: int, first: int = 0) -> TokenPlaces:
        """`n` tokens of all streams at the same position, reading from position `first` on."""
        stop = start + n
        if self.window:
            first = max(first, start - self.window + 1)
        cos, sin, pairs = self._rotation(stop)
        causal = n > 1 and first == start and not (self.explicit or 0 < self.window < n)
        mask = None if causal or n == 1 else self._band(start - first, n)
        angles = (cos[None, start:stop], sin[None, start:stop])
        alone = self.window == 1
        return TokenPlaces(
            start, stop, first, n, pairs[start:stop], angles, mask, causal, None, alone
        )

    def uneven(
        self, starts: Sequence[int], n: int, firsts: Sequence[int] | None = None
    ) -> TokenPlaces:
        """Every stream at its own position, from its own first one; `n` is that of the longest."""
        begins = torch.tensor(starts, device=self._device)[:, None]  # [B, 1]
        at = begins + torch.arange(n, device=self._device)  # [B, n]
        stop = max(starts) + n
        keys = torch.arange(stop, device=self._device)
        seen = keys <= at[..., None]  # [B, n, keys]
        if firsts is not None and any(firsts):
            seen &= keys >= torch.tensor(firsts, device=self._device)[:, None, None]
        if self.window:
            seen &= keys > at[..., None] - self.window
        seen |= keys == at[..., None]
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(~seen, -torch.inf)
        cos, sin, pairs = (table[at] for table in self._rotation(stop))
        rows = torch.arange(len(starts), device=self._device)[:, None]
        return TokenPlaces(
            min(starts), stop, 0, n, pairs, (cos, sin), mask[:, None], False, (rows, at),
            self.window == 1,
        )  # fmt: skip

    def place(
        self, starts: Sequence[int], n: int, firsts: Sequence[int] | None = None
    ) -> TokenPlaces:
        """`even` where all streams are at one position, else `uneven`."""
        start, first = starts[0], firsts[0] if firsts is not None else 0
        if len(starts) == 1:
            return self.even(start, n, first)
        same = all(s == start for s in starts) and (
            firsts is None or all(f == first for f in firsts)
        )
        return self.even(start, n, first) if same else self.uneven(starts, n, firsts)

    def _rotation(self, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        tables = self._tables
        if tables is None or stop > len(tables[0]):
            with torch.inference_mode(False), torch.no_grad():  # training may use them too
                cos, sin = self._make(max(512, stop + stop // 2))
                half = sin.shape[-1] // 2
                double = (
                    each[:, :half].to(torch.promote_types(each.dtype, torch.float32))
                    for each in (cos, sin)
                )
            tables = self._tables = (cos, sin, torch.complex(*double))
        return tables

    def _band(self, past: int, n: int) -> Tensor:
        """`[n, past + n]`: token i sees the keys up to its own, no older than the window."""
        if n > _STRIP:
            return self._strip_of(past, n)
        strip = self._strip
        if strip is None or strip.shape[1] < past + 2 * _STRIP:
            strip = self._strip = self._strip_of(max(512, past + past // 2), _STRIP)
        origin = strip.shape[1] - _STRIP
        band = strip[:n, origin - past : origin + n]
        # Attention on CUDA reads masks as vectors, and a view may begin amid one.
        return band if self._device.type == "cpu" else band.contiguous()

    def _strip_of(self, past: int, n: int) -> Tensor:
        with torch.inference_mode(False):
            own = torch.arange(n, device=self._device)[:, None]
            keys = torch.arange(-past, n, device=self._device)
            hidden = keys > own
            if self.window:
                hidden |= keys <= own - self.window
            strip = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            return strip.masked_fill_(hidden, -torch.inf)


def empty(batch: int, device: torch.device | str | None = None) -> KVBlock:
    """The state of `batch` streams before their first step."""
    none = torch.zeros(batch, 0, dtype=torch.long, device=device)
    return KVBlock(relative=none, advance=none.new_zeros(batch))


@dataclass(frozen=True, eq=False)
class StepPlaces:
    """Places of the tokens of one step, and the entries they see."""

    place: Tensor  # `[B, n]` of the new tokens
    known: Tensor  # `[B, N]` of all entries, -1 where there is none
    sees: Tensor  # `[B, n, N]` bool
    seen: Tensor  # `[B]` places behind the step


def advance(
    state: KVBlock, n: int, real: Tensor | None = None, window: int | None = None, width: int = 1
) -> StepPlaces:
    """Places of the next `n` tokens after `state`, `width` to a place; no token sees padding."""
    if real is None:
        real = state.relative.new_ones(len(state.advance), n, dtype=torch.bool)
    place = state.advance[:, None] + (real.long().cumsum(1) - 1).div(width, rounding_mode="floor")
    known = torch.cat([state.relative, place.masked_fill(~real, -1)], dim=1)
    key, query = known[:, None], place[..., None]  # [B, 1, N] and [B, n, 1]
    sees = (key >= 0) & (key < query)
    if window is not None:
        sees &= key > query - window
    own = torch.arange(n, device=place.device)
    sees[:, own, own + known.shape[1] - n] = True
    return StepPlaces(place, known, sees, state.advance + real.sum(1) // width)


def within(state: KVBlock, window: int | None, width: int = 1) -> KVBlock:
    """All that the next step may see, of the last `window` - 1 places of `width` tokens."""
    start = 0 if window is None else max(0, state.n - (window - 1) * width)
    if not start:
        return state
    kept = state.each(lambda x, _: x.narrow(2, start, state.n - start))
    return replace(kept, relative=state.relative[:, start:])


def crop(state: KVBlock, seen: Tensor) -> KVBlock:
    """Keep the first `seen` places of each stream, `[B]`; what none of them has is dropped."""
    seen = torch.minimum(seen, state.advance)
    place = state.relative.masked_fill(state.relative >= seen[:, None], -1)
    used = (place >= 0).any(0).nonzero()
    end = int(used[-1]) + 1 if len(used) else 0
    kept = state.each(lambda x, _: x[:, :, :end]) if end else KVBlock()
    return replace(kept, relative=place[:, :end], advance=seen)


def stack(states: Sequence[KVBlock]) -> KVBlock:
    """Several states as one batch; shorter ones are padded on the left."""
    longest = max(s.n for s in states)
    place = torch.cat([_grown(s.relative, longest - s.n, 1, -1) for s in states])
    seen = torch.cat([s.advance for s in states])
    like = next((s for s in states if s.keys), KVBlock())

    def join(which: str, layer: int) -> Tensor:
        rows = []
        for state in states:
            _, heads, _, width = like.keys[layer].shape
            blank = like.keys[layer].new_zeros(len(state.advance), heads, 0, width)
            tensor = getattr(state, which)[layer] if state.keys else blank
            rows.append(_grown(tensor, longest - tensor.shape[2], 2, 0))
        return torch.cat(rows)

    layers = range(len(like.keys))
    keys, values = (tuple(join(each, layer) for layer in layers) for each in ("keys", "values"))
    return KVBlock(keys, values, place, seen)


def _grown(x: Tensor, count: int, dim: int, value: int) -> Tensor:
    """So many more entries in front along a dimension; the tensor itself for 0."""
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (count, 0), value=value) if count else x


def take(state: KVBlock, rows: Tensor) -> KVBlock:
    """Some streams of a batch, by number `[b]`; what none of them has is dropped in front."""
    place = state.relative[rows]
    used = (place >= 0).any(0).nonzero()
    first = int(used[0]) if len(used) else place.shape[1]
    taken = state.each(lambda x, _: x[rows, :, first:]) if len(used) else KVBlock()
    return replace(taken, relative=place[:, first:], advance=state.advance[rows])


def merge(old: KVBlock, new: KVBlock, rows: Tensor) -> KVBlock:
    """`new` for some streams (`[B]` bool), `old` for the others."""
    before, after = (~rows).nonzero()[:, 0], rows.nonzero()[:, 0]
    # Only what is wanted of either is copied.
    chosen = stack([take(old, before), take(new, after)])
    return take(chosen, torch.cat([before, after]).argsort())
