"""One pass of a frame cache: which patches of its frames are computed, and what they attend to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.kv import KVBlock
from mmfast.frontends.changes import Refresh, changes, global_shift
from mmfast.models.vision.frames.motion import (
    MOST,
    SCENE,
    Move,
    PatchRaster,
    Reuse,
    compared,
)
from mmfast.models.vision.frames.state import (
    STEP,
    FrameCacheState,
    FramePlan,
    Group,
    ReferenceFrame,
    groups,
)

# (query, key, value) `[K, H, d]` of chosen rows and the scale -> what they attend to, `[K, H, d]`
Attend = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
# A block on rows `[K, D]`, whose attention is the function given.
RowsRun = Callable[[Tensor, Attend], Tensor]


@dataclass
class _PassFrame:
    """One frame: its base, and the patches to compute (`[k]` ascending; None: all)."""

    base: int | None  # a frame of this pass; None where that is the state's reference
    rows: Tensor | None
    patches: Tensor  # [n, D] as in ReferenceFrame
    key: Tensor | None = None  # as in ReferenceFrame
    placed: tuple[int, int] = (0, 0)
    reuse: Reuse | None = None  # under a goal: taken, or of a whole frame only measured


class FramePass:
    """The frames of one pass, and what its blocks leave behind.

    Under `stock` every frame is computed whole: the stock blocks run and are only watched.
    """

    def __init__(
        self,
        plan: FramePlan,
        states: Sequence[FrameCacheState],
        fixed: bool,
        goal: float | None = None,
        lumas: Sequence[Tensor] = (),
    ) -> None:
        self.plan = plan
        self.stock = True
        self.moved: set[int] = set()  # streams whose picture moved, of which no flat one is known
        self._states = states
        self._fixed = fixed
        self._goal = goal
        self._lumas = lumas  # [H, W] by frame, or none
        self.measured: list[int] = []  # frames computed whole whose reuse is measured
        # By block, outputs [S, D] of all frames where those measured were not computed.
        self.would: dict[int, Tensor] = {}
        self._errors: dict[int, float] = {}  # by frame
        self._exact: Sequence[Tensor] = ()
        self._frames: list[_PassFrame] = []
        self._last: dict[int, int] = {}  # by stream, the frame that becomes the reference
        self._since: dict[int, int] = {}  # by stream, frames since one was computed whole
        # By block, of keys and of values, and by frame: [n, H, d].
        self._attended: list[list[dict[int, Tensor]]] = []
        self._outputs: dict[int, dict[int, Tensor]] = {}
        self._groups: dict[int, tuple[Any, list[Group]]] = {}

    def begin(self, flat: Tensor, rule: Refresh | None) -> None:
        """Choose patches by the input `[S, D]` of the first block; all of them without a rule."""
        parts = flat.split(self.plan.sizes)
        for index, x in enumerate(parts):
            self._add(index, self._choose(index, x, rule))
        chosen = sum(
            len(x if f.rows is None else f.rows) for f, x in zip(self._frames, parts, strict=True)
        )
        if self._goal is not None and chosen > MOST * len(flat):
            self._compute_all(parts)
        picked, start = [], 0
        for frame, x in zip(self._frames, parts, strict=True):
            rows = torch.arange(len(x), device=x.device) if frame.rows is None else frame.rows
            picked.append(rows + start)
            start += len(x)
        self.stock = all(frame.rows is None for frame in self._frames)
        for number, frame in enumerate(self._frames):
            known = frame.rows is None and frame.reuse is not None
            if known and frame.reuse.change < SCENE:  # type: ignore[union-attr]
                self.measured.append(number)
        self._counts = [len(rows) for rows in picked]
        self.rows = torch.cat(picked)  # [K]
        self._hidden = flat if self.stock else flat[self.rows]  # [K, D]

    def _add(self, index: int, frame: _PassFrame) -> None:
        stream = self.plan.streams[index]
        self._since[stream] = 0 if frame.rows is None else self._since[stream] + 1
        if frame.rows is None or not self._fixed:
            self._last[stream] = index
        self._frames.append(frame)

    def _compute_all(self, parts: Sequence[Tensor]) -> None:
        """Compute all frames whole: so many patches would be chosen that reuse saves nothing.

        Errors are measured against bases that stay what they were.
        """
        chosen, self._frames = self._frames, []
        for index, (frame, x) in enumerate(zip(chosen, parts, strict=True)):
            luma = self._lumas[index] if self._lumas else None
            kept = frame.base is None or chosen[frame.base].rows is None
            whole = _PassFrame(frame.base, None, x, luma, (0, 0), frame.reuse if kept else None)
            self._add(index, whole)

    def _choose(self, index: int, x: Tensor, rule: Refresh | None) -> _PassFrame:
        stream, layout = self.plan.streams[index], self.plan.layouts[index]
        before = self._last.get(stream)
        base: _PassFrame | ReferenceFrame | None
        if before is None:
            base = self._reference(stream, layout)
        else:
            base = self._frames[before] if self.plan.layouts[before] == layout else None
        luma = self._lumas[index] if self._lumas else None
        if base is None or rule is None:
            return _PassFrame(None, None, x, luma)
        classes, age = self._class_rows(layout, x), self._since[stream] + 1
        if self._goal is not None:
            reuse = self._reuse(stream, base, luma, x, classes, rule)
            return self._judged(stream, reuse, rule, _PassFrame(before, None, x, luma))
        known = base.patches.to(x)
        content = torch.ones_like(x[:, 0], dtype=torch.bool).index_fill(0, classes, False)
        rows = rule.choose(changes(x[content], known[content]), age)
        if rows is None:
            return _PassFrame(None, None, x)
        if len(rows):  # class tokens sum a frame up: with any patch, or not at all
            rows = torch.cat([classes, content.nonzero()[rows, 0]]).sort().values
        return _PassFrame(before, rows, known.index_copy(0, rows, x[rows]))

    def _reuse(
        self,
        stream: int,
        base: _PassFrame | ReferenceFrame,
        luma: Tensor | None,
        x: Tensor,
        classes: Tensor,
        rule: Refresh,
    ) -> Reuse:
        """Reuse of the base as it lies, or as the picture moved where less changes that way."""
        age, none = self._since[stream] + 1, torch.arange(0, device=x.device)
        still = Move(None, none, base.placed)
        found = compared(x, classes, base.patches.to(x), None, still, rule, age)
        raster = None if luma is None else PatchRaster.of(luma, len(x), self.plan.prefix)
        if found.change <= STEP or luma is None or raster is None or base.key is None:
            return found
        shift = global_shift(luma, base.key.to(luma))
        down, right = (round(pixels / raster.side) for pixels in shift)
        steps = (down - base.placed[0], right - base.placed[1])
        flat = self._states[stream].flat
        if steps == (0, 0):
            return found
        if flat is None or len(flat.patches) != len(x):
            self.moved.add(stream)
            return found
        move = raster.move(*steps, (down, right), x.device)
        moved = compared(x, classes, base.patches.to(x), flat.patches, move, rule, age)
        return moved if moved.change < found.change else found

    def _judged(self, stream: int, reuse: Reuse, rule: Refresh, whole: _PassFrame) -> _PassFrame:
        """The frame computed in part where the limits of its stream allow it, else `whole`."""
        x, age = whole.patches, reuse.age
        within = self._states[stream].limits.allow(age, reuse.change) and reuse.change < SCENE
        often = rule.every is not None and age >= rule.every
        if not reuse.same and (often or not within or len(reuse.rows) > MOST * len(x)):
            return replace(whole, reuse=reuse)
        before: _PassFrame | ReferenceFrame | None = self._states[stream].reference
        before = before if whole.base is None else self._frames[whole.base]
        assert before is not None
        patches = reuse.known.index_copy(0, reuse.rows, x[reuse.rows])
        return _PassFrame(whole.base, reuse.rows, patches, before.key, reuse.move.placed, reuse)

    def _class_rows(self, layout: tuple[int, ...], x: Tensor) -> Tensor:
        n, prefix = layout[0], torch.arange(self.plan.prefix, device=x.device)
        tiles = layout[1] if self.plan.prefix else 1
        return (torch.arange(tiles, device=x.device)[:, None] * (n // tiles) + prefix).flatten()

    def _reference(self, stream: int, layout: tuple[int, ...]) -> ReferenceFrame | None:
        """The state's reference, where it is of use."""
        known = self._states[stream].reference
        if known is None or known.layout != layout or not self.plan.taps <= {*known.outputs}:
            return None
        self._since[stream] = known.since
        return known

    def watch(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Note keys and values `[B, H, n, d]` of a block that runs as stock, call by call."""
        pair = []
        for calls in (keys, values):
            flat = torch.cat([rearrange(call, "b h n d -> (b n) h d") for call in calls])
            pair.append(self._lasting(flat.split(self.plan.sizes)))
        self._attended.append(pair)

    def note(self, index: int, flat: Tensor) -> None:
        """Note the output `[S, D]` of a block that ran as stock."""
        if index in self.plan.taps:
            parts = flat.split(self.plan.sizes)
            self._outputs[index] = self._lasting(parts)
            self._foresee(index, parts)

    def _lasting(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Those of the frames that become references, none of them a view of all frames."""
        views = len(parts) > 1
        return {
            i: parts[i].clone() if views and self._frames[i].rows is None else parts[i]
            for i in self._last.values()
        }

    def step(self, index: int, run: RowsRun, hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        """Run one block on the chosen rows of its stock input, `[B, N, D]` or `[S, D]`.

        Returns the input itself, or a new tensor with the block's output where that is read.
        """
        if len(self.rows):
            attend = partial(self._attend, index, kwargs.get("cu_seqlens"), hidden)
            self._hidden = run(self._hidden, attend)
        else:
            self._known(index, self._hidden, self._hidden)
        if index not in self.plan.taps:
            return hidden
        full = self._mixed(self._hidden, lambda known: known.outputs[index])
        self._outputs[index] = self._lasting(full)
        self._foresee(index, full)
        return torch.cat(full).reshape(hidden.shape)

    def _foresee(self, index: int, parts: Sequence[Tensor]) -> None:
        """Note what reuse would have made of the outputs of frames that are computed whole."""
        if not self.measured:
            return
        would = list(parts)
        for number in self.measured:
            frame, state = self._frames[number], self._states[self.plan.streams[number]]
            assert frame.reuse is not None
            if frame.base is None:
                assert state.reference is not None
                old = state.reference.outputs[index]
            else:
                old = parts[frame.base]
            flat = None if state.flat is None else state.flat.outputs[index]
            would[number] = frame.reuse.outputs(old, flat, parts[number])
        self.would[index], self._exact = torch.cat(would), parts

    def learn(self, exact: Sequence[Tensor], would: Sequence[Tensor]) -> None:
        """Take the errors from features `[k, D]` of each frame, and what reuse would have made."""
        for number in self.measured:
            a, b = exact[number].float(), would[number].float()
            error = 1.0 - float(torch.cosine_similarity(a, b, dim=-1).mean())
            self._errors[number] = error

    def last(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Outputs of the last block by frame, and what reuse would have made of them."""
        would = self.would[max(self.would)].split(self.plan.sizes)
        return self._exact, would

    def _attend(
        self,
        index: int,
        bounds: Tensor | None,
        hidden: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
    ) -> Tensor:
        """Attend from chosen rows `[K, H, d]` to all keys of their segments, old and new ones."""
        keys, values = self._known(index, key, value)
        attended = torch.empty_like(query)
        for rows, frame, span in self._grouped(bounds, hidden):
            q, k, v = query[rows], keys[frame][span], values[frame][span]  # [k or n, H, d]
            q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
            found = F.scaled_dot_product_attention(q, k, v, scale=scale)  # [1, H, k, d]
            attended[rows] = found[0].transpose(0, 1)
        return attended

    def _known(self, index: int, key: Tensor, value: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of each frame, with those of the chosen rows `[K, H, d]` put in."""
        keys = self._mixed(key, lambda known: known.kv.keys[index])
        values = self._mixed(value, lambda known: known.kv.values[index])
        self._attended.append([self._lasting(keys), self._lasting(values)])
        return keys, values

    def _mixed(self, new: Tensor, old: Callable[[ReferenceFrame], Tensor]) -> list[Tensor]:
        """Chosen rows `[K, ...]` put into what each frame builds on, `[n, ...]` per frame."""
        done: list[Tensor] = []
        for number, part in enumerate(new.split(self._counts)):
            frame = self._frames[number]
            if frame.rows is None:
                done.append(part)
                continue
            state = self._states[self.plan.streams[number]]
            if frame.base is None:
                known = state.reference
                assert known is not None  # or all of its patches were chosen
                base = old(known).to(part)
            else:
                base = done[frame.base]
            if frame.reuse is not None and frame.reuse.move.sources is not None:
                assert state.flat is not None  # or there would be no move
                base = frame.reuse.move.carried(base, old(state.flat))
            done.append(base.index_copy(0, frame.rows, part) if len(part) else base)
        return done

    def _grouped(self, bounds: Tensor | None, hidden: Tensor) -> list[Group]:
        """Chosen rows that attend to the same keys: those of their frame, tile or window.

        Segments lie between `bounds` `[W + 1]`; None stands for a batch `[B, N, D]` of equal ones.
        """
        name = id(bounds)
        if name not in self._groups:
            batch, length = hidden.shape[:2]
            ends = torch.arange(batch + 1) * length if bounds is None else bounds.cpu().long()
            self._groups[name] = (
                bounds,
                groups(self.rows, self.plan.sizes, ends),
            )  # held, so that its id stays its own
        return self._groups[name][1]

    def commit(self) -> None:
        """Put the new references into the states, now that the pass has succeeded."""
        for stream, state in enumerate(self._states):
            mine = [i for i, each in enumerate(self.plan.streams) if each == stream]
            if not mine:
                continue
            if stream in self._last:
                i = self._last[stream]
                pairs = zip(*self._attended, strict=True)
                keys, values = (tuple(block[i] for block in blocks) for blocks in pairs)
                state.reference = ReferenceFrame(
                    self.plan.layouts[i],
                    self._frames[i].patches.clone(),
                    KVBlock(keys, values),
                    {block: rows[i] for block, rows in self._outputs.items()},
                    self._since[stream],
                    self._frames[i].key,
                    self._frames[i].placed,
                )
            elif state.reference is not None:
                state.reference = replace(state.reference, since=self._since[stream])
            whole = sum(self._frames[i].rows is None for i in mine)
            patches, computed = (
                sum(each[i] for i in mine) for each in (self.plan.sizes, self._counts)
            )
            state.count(patches, computed, len(mine), whole)
            self._learn(stream, state)

    def _learn(self, stream: int, state: FrameCacheState) -> None:
        """Put the limits that follow from the measured errors into the state."""
        pairs = zip(self.plan.streams, self._frames, strict=True)
        taken = [frame.reuse for owner, frame in pairs if owner == stream]
        if any(reuse is not None and reuse.change >= SCENE for reuse in taken):
            state.flat = None  # its colour was that of another scene
        for number, error in self._errors.items():
            reuse = self._frames[number].reuse
            if self.plan.streams[number] == stream and reuse is not None and self._goal is not None:
                state.limits = state.limits.measured(error, reuse.age, reuse.change, self._goal)
        tried = [reuse for reuse in taken if reuse is not None and reuse.change < SCENE]
        if self._goal is not None and tried:
            state.limits = state.limits.after(saved=not self.stock)
        if state.limits.pause:
            state.reference = None
