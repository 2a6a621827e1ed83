"""Keys and values of several streams: in place (`LayerSlot`), and as a value (`StreamKV`).

A slot holds one tensor per layer, each stream at its own length. New tokens are written at the
places of a `TokenPlaces` and attention reads views, so a token costs a copy of itself. Entries
behind the length of a stream are not valid, so taking tokens back costs nothing.

A `StreamKV` is never changed: steps make new ones. A place is a position in time. Several tokens
may share one (the two channels of a dialogue): a token sees all tokens of earlier places, and
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Angles = tuple[Tensor, Tensor]  # cos and sin, each [positions, rotated width]

_STEP = 64
_STRIP = 32  # widest pass whose mask is a view of a prepared strip


@dataclass(slots=True)
class TokenPlaces:
    """Places of the tokens of one pass, for all layers."""

    start: int  # position of the first new token; of the earliest stream where they differ
    stop: int  # behind the last new token, of the latest stream
    first: int  # the oldest position that is read
    n: int  # new tokens per stream
    turn: Angles  # cosines and signed sines `[.., n, 1, r]`: the first half of the sines negated
    angles: Angles  # cosines and sines `[1 or B, n, r]` as stock layers take them
    mask: Tensor | None  # added to scores, `[n, keys]` or `[B, 1, n, keys]`; None if all visible
    causal: bool  # the pass starts at the first key: plain causal attention
    at: tuple[Tensor, Tensor] | None  # streams `[B, 1]`, positions `[B, n]`, where they differ
    alone: bool = False  # every token sees itself and nothing else: there is nothing to keep


class LayerSlot:
    """Keys and values of one layer, `[2, B, H, capacity, d]`; None until tokens say its shape."""

    __slots__ = ("data", "reserve")

    def __init__(self, reserve: int = 0) -> None:
        self.data: Tensor | None = None
        self.reserve = reserve

    def put_two(self, keys: Tensor, values: Tensor, place: TokenPlaces) -> tuple[Tensor, Tensor]:
        """As `put`, of keys and values `[B, H, n, d]` that lie apart."""
        if keys.shape != values.shape or place.at is not None or self.data is None:
            return self.put(torch.stack((keys, values)), place)
        if place.stop > self.data.shape[3]:
            return self.put(torch.stack((keys, values)), place)
        new = self.data[:, :, :, place.start : place.stop]
        new[0].copy_(keys)
        new[1].copy_(values)
        keys, values = self.data[:, :, :, place.first : place.stop].unbind(0)
        return keys, values

    def put(self, both: Tensor, place: TokenPlaces) -> tuple[Tensor, Tensor]:
        """Write keys and values `[2, B, H, n, d]`; read all up to them, `[B, H, keys, d]`."""
        data = self.data
        if data is None or place.stop > data.shape[3]:
            data = self._room(both, place.stop)
        if place.at is None:
            data[:, :, :, place.start : place.stop].copy_(both)
        else:
            # Indices with a slice between them go to the front: [B, n, 2, H, d].
            data.permute(1, 3, 0, 2, 4)[place.at] = both.permute(1, 3, 0, 2, 4)
        keys, values = data[:, :, :, place.first : place.stop].unbind(0)
        return keys, values

    def _room(self, like: Tensor, needed: int) -> Tensor:
        two, batch, heads, _, width = like.shape
        have = 0 if self.data is None else self.data.shape[3]
        capacity = -(-max(needed, self.reserve, have + have // 2) // _STEP) * _STEP
        # Zeros, since masked places are multiplied by a weight of 0.
        data = like.new_zeros(two, batch, heads, capacity, width)
        if self.data is not None:
            data[:, :, :, :have].copy_(self.data)
        self.data = data
        return data

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, whether filled or not."""
        return 0 if self.data is None else self.data.numel() * self.data.element_size()


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
        self._tables: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
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
        cos, sin, cos4, sin4 = self._rotation(stop)
        causal = n > 1 and first == start and not (self.explicit or 0 < self.window < n)
        mask = None if causal or n == 1 else self._band(start - first, n)
        turn = (cos4[start:stop], sin4[start:stop])
        angles = (cos[None, start:stop], sin[None, start:stop])
        return TokenPlaces(
            start, stop, first, n, turn, angles, mask, causal, None, self.window == 1
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
        cos, sin, cos4, sin4 = (table[at] for table in self._rotation(stop))
        rows = torch.arange(len(starts), device=self._device)[:, None]
        turn, angles = (cos4, sin4), (cos, sin)
        alone = self.window == 1
        return TokenPlaces(
            min(starts), stop, 0, n, turn, angles, mask[:, None], False, (rows, at), alone
        )

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

    def _rotation(self, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tables = self._tables
        if tables is None or stop > len(tables[0]):
            with torch.inference_mode(False), torch.no_grad():  # training may use them too
                cos, sin = self._make(max(512, stop + stop // 2))
                half = sin.shape[-1] // 2
                signed = torch.cat((-sin[:, :half], sin[:, half:]), -1)
            tables = self._tables = (cos, sin, cos[:, None], signed[:, None])
        return tables

    def _band(self, past: int, n: int) -> Tensor:
        """`[n, past + n]`: token i sees the keys up to its own, no older than the window."""
        if n > _STRIP:
            return self._strip_of(past, n)
        strip = self._strip
        if strip is None or strip.shape[1] < past + 2 * _STRIP:
            strip = self._strip = self._strip_of(max(512, past + past // 2), _STRIP)
        origin = strip.shape[1] - _STRIP
        return strip[:n, origin - past : origin + n]

    def _strip_of(self, past: int, n: int) -> Tensor:
        with torch.inference_mode(False):
            own = torch.arange(n, device=self._device)[:, None]
            keys = torch.arange(-past, n, device=self._device)
            hidden = keys > own
            if self.window:
                hidden |= keys <= own - self.window
            strip = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            return strip.masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True, eq=False)
class StreamKV:
    """Memory of a decoder for B streams."""

    keys: tuple[Tensor, ...]  # per layer `[B, H, n, d]`; empty before the first step
    values: tuple[Tensor, ...]  # per layer `[B, H, n, d]`
    place: Tensor  # `[B, n]` int64 place of each entry, -1 where a stream has none
    seen: Tensor  # `[B]` int64 places so far

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


def empty(batch: int, device: torch.device | str | None = None) -> StreamKV:
    """The state of `batch` streams before their first step."""
    none = torch.zeros(batch, 0, dtype=torch.long, device=device)
    return StreamKV((), (), none, none.new_zeros(batch))


@dataclass(frozen=True, eq=False)
class StepPlaces:
    """Places of the tokens of one step, and the entries they see."""

    place: Tensor  # `[B, n]` of the new tokens
    known: Tensor  # `[B, N]` of all entries, -1 where there is none
    sees: Tensor  # `[B, n, N]` bool
    seen: Tensor  # `[B]` places behind the step


def advance(
    state: StreamKV, n: int, real: Tensor | None = None, window: int | None = None, width: int = 1
) -> StepPlaces:
    """Places of the next `n` tokens after `state`, `width` to a place; no token sees padding."""
    if real is None:
        real = state.place.new_ones(len(state.seen), n, dtype=torch.bool)
    place = state.seen[:, None] + (real.long().cumsum(1) - 1).div(width, rounding_mode="floor")
    known = torch.cat([state.place, place.masked_fill(~real, -1)], dim=1)
    key, query = known[:, None], place[..., None]  # [B, 1, N] and [B, n, 1]
    sees = (key >= 0) & (key < query)
    if window is not None:
        sees &= key > query - window
    own = torch.arange(n, device=place.device)
    sees[:, own, own + known.shape[1] - n] = True
    return StepPlaces(place, known, sees, state.seen + real.sum(1) // width)


def crop(state: StreamKV, seen: Tensor) -> StreamKV:
    """Keep the first `seen` places of each stream, `[B]`; what none of them has is dropped."""
    seen = torch.minimum(seen, state.seen)
    place = state.place.masked_fill(state.place >= seen[:, None], -1)
    used = (place >= 0).any(0).nonzero()
    end = int(used[-1]) + 1 if len(used) else 0
    keys = tuple(k[:, :, :end] for k in state.keys) if end else ()
    values = tuple(v[:, :, :end] for v in state.values) if end else ()
    return StreamKV(keys, values, place[:, :end], seen)


def stack(states: Sequence[StreamKV]) -> StreamKV:
    """Several states as one batch; shorter ones are padded on the left."""
    longest = max(s.place.shape[1] for s in states)
    place = [_grown(s.place, longest - s.place.shape[1], 1, -1) for s in states]
    seen = torch.cat([s.seen for s in states])
    like = next((s for s in states if s.keys), None)
    if like is None:
        return StreamKV((), (), torch.cat(place), seen)

    def join(which: str, layer: int) -> Tensor:
        rows = []
        for state in states:
            shape = like.keys[layer].shape
            blank = like.keys[layer].new_zeros(len(state.seen), shape[1], 0, shape[3])
            tensor = getattr(state, which)[layer] if state.keys else blank
            rows.append(_grown(tensor, longest - tensor.shape[2], 2, 0))
        return torch.cat(rows)

    layers = range(len(like.keys))
    keys = tuple(join("keys", layer) for layer in layers)
    return StreamKV(keys, tuple(join("values", layer) for layer in layers), torch.cat(place), seen)


def _grown(x: Tensor, count: int, dim: int, value: int) -> Tensor:
    """So many more entries in front along a dimension; the tensor itself for 0."""
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (count, 0), value=value) if count else x


def take(state: StreamKV, rows: Tensor) -> StreamKV:
    """Some streams of a batch, by number `[b]`; what none of them has is dropped in front."""
    place = state.place[rows]
    used = (place >= 0).any(0).nonzero()
    first = int(used[0]) if len(used) else place.shape[1]
    return StreamKV(
        tuple(k[rows, :, first:] for k in state.keys) if len(used) else (),
        tuple(v[rows, :, first:] for v in state.values) if len(used) else (),
        place[:, first:],
        state.seen[rows],
    )


def merge(old: StreamKV, new: StreamKV, rows: Tensor) -> StreamKV:
    """`new` for some streams (`[B]` bool), `old` for the others."""
    before, after = (~rows).nonzero()[:, 0], rows.nonzero()[:, 0]
    # Only what is wanted of either is copied.
    chosen = stack([take(old, before), take(new, after)])
    return take(chosen, torch.cat([before, after]).argsort())
