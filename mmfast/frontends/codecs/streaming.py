"""Stages of a codec: sound to codes and codes to sound, in pieces of any size.

All rows of a batch share one grid of frames. A row can begin anew while the others go on: where
every layer is in step, in place. Where a layer waits for samples (mirrored padding, look-ahead),
that row becomes a group of its own, whose output comes late by `lag` frames, blanks before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mmfast.core.errors import MediaError
from mmfast.frontends.codecs.layers import Layer, join
from mmfast.frontends.codecs.tree import take_rows, where_rows

BLOCK = 32  # frames worked on at once, which bounds the memory of a long chunk


class Group(NamedTuple):
    """Rows that began at the same time."""

    rows: Tensor  # [b] which of the batch
    inner: Any  # state of the layers
    due: Tensor | None  # [b, ..., p] output that waits for its turn, in a row that began late
    frames: int  # since it began


class Frames(NamedTuple):
    """State of a stage."""

    batch: int
    waiting: Tensor  # [B, ..., r] input that does not fill a frame
    frames: int  # of the oldest stream
    groups: tuple[Group, ...]


class FrameStage:
    """A stage over layers that turn frames of input into output.

    Args:
        layers: The layers, with what is before and behind them.
        check: Raises on bad input; given the input and the number of streams.
        unit: Inputs per frame: samples, or 1 for codes.
        yields: Outputs per frame.
        blank: What a row that began late gives until its output comes: -1 of codes, 0.0 of sound.
        shape: Dimensions of the output between the batch and time.
        whole: Fill the last frame with zeros (else the layers see what there is of it).
        device: Where the layers are.

    Attributes:
        lookahead: Outputs that come late once a stream runs.
        startup: Frames that must come before the first output.
    """

    def __init__(
        self,
        layers: Layer,
        check: Callable[[Any, int | None], Tensor],
        unit: int,
        yields: int,
        blank: float,
        shape: tuple[int, ...] = (),
        whole: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.layers, self.check, self.unit, self.yields = layers, check, unit, yields
        self.blank, self.shape, self.whole, self.device = blank, shape, whole, device
        counts = [layers.count(m * unit) for m in range(257)]
        owed = [m * yields - n for m, n in enumerate(counts)]
        self.lookahead, self._lag = owed[-1], max(owed)
        self.startup = sum(n == 0 for n in counts)

    def start(self, batch: int = 1) -> Frames:
        """The state of `batch` streams before their first chunk."""
        if batch < 1:
            raise MediaError(f"batch is {batch}; give 1 or more streams")
        rows = torch.arange(batch, device=self.device)
        group = Group(rows, self.layers.start(batch), None, 0)
        return Frames(batch, torch.zeros(batch, 0, device=self.device), 0, (group,))

    @torch.no_grad()
    def step(self, state: Frames, chunk: Tensor) -> tuple[Frames, Tensor]:
        """A chunk of any length to what it makes certain; the state given stays as it was.

        Raises:
            MediaError: The chunk is not what this stage takes.
        """
        chunk = self.check(chunk, state.batch).to(self.device)
        if state.waiting.numel():
            chunk = torch.cat([state.waiting.to(chunk), chunk], -1)
        whole = chunk.shape[-1] // self.unit * self.unit
        state = state._replace(waiting=chunk[..., whole:].clone())
        if not whole:
            return state, self._blanks(state.batch, 0)
        outs = []
        for piece in chunk[..., :whole].split(BLOCK * self.unit, -1):
            state, out = self._advance(state, piece)
            outs.append(out)
        return state, outs[0] if len(outs) == 1 else torch.cat(outs, -1)

    @torch.no_grad()
    def finish(self, state: Frames) -> Tensor:
        """The rest of every stream; rows that have less are filled with blanks behind it."""
        rest = state.waiting
        part = -(-rest.shape[-1] // self.unit)
        if self.whole:
            rest = functional.pad(rest, (0, part * self.unit - rest.shape[-1]))
        tails = []
        for group in state.groups:
            inner, out = self.layers.step(group.inner, self._of(rest, group, state))
            tail = join(out, self.layers.finish(inner))
            assert tail is not None
            given = self.layers.count(group.frames * self.unit)
            missing = (group.frames + part) * self.yields - given - tail.shape[-1]
            tail = self._fill(tail, tail.shape[-1] + max(0, missing))
            tails.append(tail if group.due is None else torch.cat([group.due, tail], -1))
        longest = max(tail.shape[-1] for tail in tails)
        return self._gather(state, [self._fill(tail, longest) for tail in tails])

    def reset(self, state: Frames, rows: Tensor) -> Frames:
        """The state with some streams (`[B]` bool) started anew.

        Samples that wait for a frame of theirs to fill are silence then: rows share frames.

        Raises:
            MediaError: `rows` has another shape or type.
        """
        if rows.dtype != torch.bool or rows.shape != (state.batch,):
            raise MediaError(
                f"rows are {rows.dtype} {list(rows.shape)}; give torch.bool [{state.batch}]"
            )
        rows = rows.to(self.device)
        if rows.all():
            return self.start(state.batch)
        if not rows.any():
            return state
        waiting = where_rows(rows, torch.zeros_like(state.waiting), state.waiting)
        groups = self._split(state, rows)
        if self.layers.in_step:
            group = state.groups[0]
            inner = where_rows(rows, self.layers.start(state.batch), group.inner)
            groups = (group._replace(inner=inner),)
        return state._replace(waiting=waiting, groups=groups)

    def _advance(self, state: Frames, piece: Tensor) -> tuple[Frames, Tensor]:
        """Whole frames through the layers of every group; each gives as much as the oldest."""
        new, before = piece.shape[-1] // self.unit, self.layers.count(state.frames * self.unit)
        frames = state.frames + new
        n = self.layers.count(frames * self.unit) - before
        groups, outs = [], []
        for group in state.groups:
            inner, out = self.layers.step(group.inner, self._of(piece, group, state))
            due = None
            if group.due is not None:
                out = torch.cat([group.due, out], -1)
                out, due = out[..., :n], out[..., n:]
            groups.append(Group(group.rows, inner, due, group.frames + new))
            outs.append(out)
        state = state._replace(frames=frames, groups=tuple(groups))
        return state, self._gather(state, outs)

    def _split(self, state: Frames, rows: Tensor) -> tuple[Group, ...]:
        """Groups without the rows, and one of them alone at its start, late by the lag."""
        kept = []
        for group in state.groups:
            stay = (~rows[group.rows]).nonzero().flatten()
            if len(stay):
                kept.append(take_rows(group, stay)._replace(frames=group.frames))
        new = rows.nonzero().flatten()
        due = self._blanks(len(new), self._lag)
        return (*kept, Group(new, self.layers.start(len(new)), due, 0))

    def _blanks(self, rows: int, n: int) -> Tensor:
        kind = torch.long if isinstance(self.blank, int) else torch.float32
        shape = (rows, *self.shape, n)
        return torch.full(shape, self.blank, dtype=kind, device=self.device)

    def _of(self, x: Tensor, group: Group, state: Frames) -> Tensor:
        return x if len(state.groups) == 1 else x.index_select(0, group.rows)

    def _gather(self, state: Frames, outs: list[Tensor]) -> Tensor:
        """The rows of all groups back in their places."""
        if len(outs) == 1 and len(outs[0]) == state.batch:
            return outs[0]
        back = torch.argsort(torch.cat([group.rows for group in state.groups]))
        return torch.cat(outs, 0).index_select(0, back)

    def _fill(self, x: Tensor, n: int) -> Tensor:
        return x if x.shape[-1] == n else functional.pad(x, (0, n - x.shape[-1]), value=self.blank)


def run(stage: Any, x: Tensor) -> Tensor:
    """All of a stream at once, in bounded memory.

    Args:
        stage: A `core.speech.Stage`.
        x: `[B, ..., n]`.
    """
    state, out = stage.step(stage.start(x.shape[0]), x)
    return torch.cat([out, stage.finish(state)], dim=-1)
