"""Keys and values of one layer after a policy, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.kv import KVBlock
from mmfast.core.reduction import Reduction
from mmfast.ops.pages import selected


@dataclass(frozen=True)
class Left:
    """Entries `[B, H, m, d]` and notes of one cache layer; uneven rows have `gaps` in front."""

    kv: KVBlock
    notes: dict[str, Tensor]
    gaps: tuple[int, ...]

    @property
    def width(self) -> int:
        """Entries per row and head, padding included."""
        return int(self.kv.keys[0].shape[2])

    @property
    def valid(self) -> Tensor | None:
        """`[B, m]` False at padding; None where there is none."""
        if not any(self.gaps):
            return None
        start = torch.tensor(self.gaps, device=self.kv.keys[0].device)[:, None]
        return torch.arange(self.width, device=start.device) >= start


def leave(
    keys: Tensor,
    values: Tensor,
    notes: Mapping[str, Tensor],
    where: Sequence[Tensor],
    reductions: Sequence[Reduction],
) -> Left:
    """Evict and merge entries `[B, H, n, d]`.

    `where` has per row the entries `[n_b]` that are no padding, `reductions` their fate, leading
    dims `[H]`. A merged entry keeps the note of the one it stands for.
    """
    # Heads that agree share their notes.
    alike = all(torch.equal(r.keep[0], each) for r in reductions for each in r.keep[1:])
    rows = [
        _row(alike, keys[b], values[b], {name: note[b] for name, note in notes.items()}, *pair)
        for b, pair in enumerate(zip(where, reductions, strict=True))
    ]
    length = max(1, *(key.shape[1] for key, _, _ in rows))
    gaps = tuple(length - key.shape[1] for key, _, _ in rows)
    fillers = {"kind": -1}  # a kind of -1 is padding
    return Left(
        KVBlock(
            (_together([row[0] for row in rows], gaps),),
            (_together([row[1] for row in rows], gaps),),
        ),
        {
            name: _together([row[2][name] for row in rows], gaps, fillers.get(name, 0))
            for name in rows[0][2]
        },
        gaps,
    )


def _row(
    alike: bool,
    keys: Tensor,
    values: Tensor,
    notes: dict[str, Tensor],
    where: Tensor,
    reduction: Reduction,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    if where.shape[0] != keys.shape[1]:
        keys, values = keys.index_select(1, where), values.index_select(1, where)
        notes = {name: note.index_select(-1, where) for name, note in notes.items()}
    keep = reduction.keep
    kept = {
        name: _of_note(note, keep[:1] if alike and len(note) == 1 else keep)
        for name, note in notes.items()
    }
    if reduction.m == reduction.n and reduction.pure:
        return keys, values, kept
    if reduction.pure:  # rows of both lie alike, and are found once
        keys, values = selected(keys[None], values[None], keep[None])
        return keys[0], values[0], kept
    return reduction.apply(keys), reduction.apply(values), kept


def _of_note(note: Tensor, keep: Tensor) -> Tensor:
    """The part `[H, m]` of a note `[1 or H, n]`; one that says the same of all is not read."""
    if note.stride(-1) == 0:
        return note[:, :1].expand(len(keep), keep.shape[-1])
    return note.expand(len(keep), -1).gather(-1, keep)


def _together(rows: Sequence[Tensor], gaps: Sequence[int], value: int = 0) -> Tensor:
    """Rows `[H, m_b, ...]` with padding in front; one row without any is not copied."""
    padded = [
        F.pad(row, (0, 0) * (row.ndim - 2) + (gap, 0), value=value) if gap else row
        for row, gap in zip(rows, gaps, strict=True)
    ]
    return padded[0][None] if len(padded) == 1 else torch.stack(padded)


def beside(reduction: Reduction, tail: int) -> Reduction:
    """The same with `tail` more entries behind, which all stay."""
    if tail == 0:
        return reduction
    keep, owner, n, m = reduction.keep, reduction.owner, reduction.n, reduction.m
    more = torch.arange(tail, device=keep.device).expand(*keep.shape[:-1], tail)
    weight = reduction.weight
    if weight is not None:
        weight = torch.cat([weight, torch.ones_like(more, dtype=weight.dtype)], -1)
    return Reduction(
        torch.cat([keep, more + n], -1),
        torch.cat([owner, more + m], -1),
        weight,
        pure=reduction.pure,
    )
