"""Keys and values of one layer after a policy, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.kv import KVBlock
from mmfast.core.reduction import Reduction
from mmfast.ops.eviction import mixed_beside
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
    alike = all(_agree(r.keep) for r in reductions)  # heads that agree share their notes
    if len(where) == 1 and reductions[0].m:
        k, v, kept = _row(alike, keys, values, notes, where[0], reductions[0])
        return Left(KVBlock((k,), (v,)), kept, (0,))
    rows = []
    for b, pair in enumerate(zip(where, reductions, strict=True)):
        k, v, *noted = (x[b : b + 1] for x in (keys, values, *notes.values()))
        rows.append(_row(alike, k, v, dict(zip(notes, noted, strict=True)), *pair))
    length = max(1, *(key.shape[2] for key, _, _ in rows))
    gaps = tuple(length - key.shape[2] for key, _, _ in rows)
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


def _agree(keep: Tensor) -> bool:
    """All heads keep the same entries `[H, m]`."""
    if keep.shape[0] == 1 or keep.stride(0) == 0:
        return True
    if not keep.is_cpu:
        return bool((keep == keep[:1]).all())
    first, *rest = keep.numpy()
    one = first.tobytes()
    return all(one == each.tobytes() for each in rest)


def _row(
    alike: bool,
    keys: Tensor,
    values: Tensor,
    notes: Mapping[str, Tensor],
    where: Tensor,
    reduction: Reduction,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Keys, values and notes `[1, 1 or H, m]` that are left of one row `[1, H, n, d]`."""
    if where.shape[0] != keys.shape[2]:
        keys, values = keys.index_select(2, where), values.index_select(2, where)
        notes = {name: note.index_select(-1, where) for name, note in notes.items()}
    keep = reduction.keep[None]
    once = keep[:, :1] if alike else keep
    kept = {
        name: _of_note(note, once if note.shape[1] == 1 else keep, where)
        for name, note in notes.items()
    }
    if reduction.m == reduction.n and reduction.pure:
        return keys, values, kept
    if reduction.pure:  # rows of both lie alike, and are found once
        return *selected(keys, values, keep), kept
    return reduction.apply_keys(keys[0])[None], reduction.apply(values[0])[None], kept


def _of_note(note: Tensor, keep: Tensor, where: Tensor) -> Tensor:
    """The part `[1, H, m]` of a note `[1, 1 or H, n]`; one that says the same of all is not read.

    Nor is one that is the numbers `where` of all n entries themselves.
    """
    if note.stride(-1) == 0:
        heads = note.stride(1) if note.shape[1] > 1 else 0
        return note.as_strided(keep.shape, (0, heads, 0))
    if note.data_ptr() == where.data_ptr() and note.shape[1] == 1:
        return keep
    return note.expand(1, keep.shape[1], -1).gather(-1, keep)


def _together(rows: Sequence[Tensor], gaps: Sequence[int], value: int = 0) -> Tensor:
    """Rows `[1, H, m_b, ...]` with padding in front; one row without any is not copied."""
    padded = [
        F.pad(row, (0, 0) * (row.ndim - 3) + (gap, 0), value=value) if gap else row
        for row, gap in zip(rows, gaps, strict=True)
    ]
    return padded[0] if len(padded) == 1 else torch.cat(padded)


def beside(reduction: Reduction, tail: int) -> Reduction:
    """The same with `tail` more entries behind, which all stay."""
    if tail == 0:
        return reduction
    keep, owner, n, m = reduction.keep, reduction.owner, reduction.n, reduction.m
    more = torch.arange(tail, device=keep.device).expand(*keep.shape[:-1], tail)
    if reduction.mix is not None:
        where = torch.arange(n, device=keep.device).expand(owner.shape)
        return mixed_beside(reduction, more + n, where, n + tail)
    weight = reduction.weight
    if weight is not None:
        weight = torch.cat([weight, torch.ones_like(more, dtype=weight.dtype)], -1)
    return Reduction(
        torch.cat([keep, more + n], -1),
        torch.cat([owner, more + m], -1),
        weight,
        pure=reduction.pure,
    )
