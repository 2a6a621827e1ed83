"""Keys and values of several streams as a value: steps make new ones, old ones stay as they were.

A place is a position in time. Several tokens may share one (the two channels of a dialogue): a
token sees all tokens of earlier places, and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, eq=False)
class StreamKV:
    """What a decoder remembers of B streams.

    Attributes:
        keys: Per layer `[B, H, n, d]`; empty before the first step.
        values: Per layer `[B, H, n, d]`.
        place: `[B, n]` int64 place of each entry, -1 where a stream has none.
        seen: `[B]` int64 places so far.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    place: Tensor
    seen: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


def empty(batch: int, device: torch.device | str | None = None) -> StreamKV:
    """The state of `batch` streams before their first step."""
    none = torch.zeros(batch, 0, dtype=torch.long, device=device)
    return StreamKV((), (), none, none.new_zeros(batch))


@dataclass(frozen=True, eq=False)
class Step:
    """Where the tokens of one step stand, and what they see.

    Attributes:
        place: `[B, n]` of the new tokens.
        known: `[B, N]` of all entries, -1 where there is none.
        sees: `[B, n, N]` bool.
        seen: `[B]` places behind the step.
    """

    place: Tensor
    known: Tensor
    sees: Tensor
    seen: Tensor


def advance(
    state: StreamKV, n: int, real: Tensor | None = None, window: int | None = None, width: int = 1
) -> Step:
    """Places of the next n tokens.

    Args:
        state: Of the step before.
        n: New entries.
        real: `[B, n]` bool where shorter streams are padded; padding is seen by nobody.
        window: Places that a token looks back to, its own included; None for all.
        width: Tokens per place.
    """
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
    return Step(place, known, sees, state.seen + real.sum(1) // width)


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
    """So many more entries in front along a dimension; the tensor itself where there are none."""
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
