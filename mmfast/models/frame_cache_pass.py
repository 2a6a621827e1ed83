"""One pass of a vision tower that computes the changed patches of consecutive frames only.

What changed is decided once, on the embedded patches. In every block the chosen rows alone are
projected, attend to all keys of their frame (those of the other patches come from the frame's
reference) and go through the MLP. The first published cache of this kind (STC, arXiv 2512.00891)
projects fresh keys of all tokens and chooses anew in every layer: on the embedded clips features
are no nearer for it, and it costs a third more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.frontends.frame_cache import Refresh, changes
from mmfast.models.frame_cache_blocks import Block, Rotary
from mmfast.models.frame_cache_groups import Group, groups
from mmfast.models.frame_cache_plan import Plan
from mmfast.models.frame_cache_state import FrameCacheState, Reference


@dataclass
class _Frame:
    """One frame: what it builds on, and the patches to compute (`[k]` ascending; None: all)."""

    base: int | None  # a frame of this pass; None where that is the state's reference
    rows: Tensor | None
    patches: Tensor  # [n, D] as in Reference


class Pass:
    """The frames of one pass, and what its blocks leave behind.

    Attributes:
        stock: Every frame is computed whole: the stock blocks run and are only watched.
    """

    def __init__(self, plan: Plan, states: Sequence[FrameCacheState], fixed: bool) -> None:
        self.plan = plan
        self.stock = True
        self._states = states
        self._fixed = fixed
        self._frames: list[_Frame] = []
        self._last: dict[int, int] = {}  # by stream, the frame that becomes the reference
        self._since: dict[int, int] = {}  # by stream, frames since one was computed whole
        self._keys: list[dict[int, Tensor]] = []  # by block and frame, [n, H, d]
        self._values: list[dict[int, Tensor]] = []
        self._outputs: dict[int, dict[int, Tensor]] = {}
        self._rotary: Rotary | None = None
        self._groups: dict[int, tuple[Any, list[Group]]] = {}

    def begin(self, flat: Tensor, rule: Refresh | None) -> None:
        """Choose the patches of every frame from the input `[S, D]` of the first block.

        Args:
            flat: Embedded patches, frame after frame.
            rule: None computes all.
        """
        picked, start = [], 0
        for index, x in enumerate(flat.split(self.plan.sizes)):
            frame = self._choose(index, x, rule)
            self._frames.append(frame)
            stream = self.plan.streams[index]
            self._since[stream] = 0 if frame.rows is None else self._since[stream] + 1
            if frame.rows is None or not self._fixed:
                self._last[stream] = index
            rows = torch.arange(len(x), device=x.device) if frame.rows is None else frame.rows
            picked.append(rows + start)
            start += len(x)
        self.stock = all(frame.rows is None for frame in self._frames)
        self._counts = [len(rows) for rows in picked]
        self._rows = torch.cat(picked)  # [K]
        self._hidden = flat if self.stock else flat[self._rows]  # [K, D]

    def _choose(self, index: int, x: Tensor, rule: Refresh | None) -> _Frame:
        stream, layout = self.plan.streams[index], self.plan.layouts[index]
        before = self._last.get(stream)
        if before is None:
            known = self._reference(stream, layout)
        else:
            same = self.plan.layouts[before] == layout
            known = self._frames[before].patches if same else None
        if known is None or rule is None:
            return _Frame(None, None, x)
        known, classes = known.to(x), self._class_rows(layout, x)
        content = torch.ones_like(x[:, 0], dtype=torch.bool).index_fill(0, classes, False)
        rows = rule.choose(changes(x[content], known[content]), self._since[stream] + 1)
        if rows is None:
            return _Frame(None, None, x)
        if len(rows):  # class tokens sum a frame up: with any patch, or not at all
            rows = torch.cat([classes, content.nonzero()[rows, 0]]).sort().values
        return _Frame(before, rows, known.index_copy(0, rows, x[rows]))

    def _class_rows(self, layout: tuple[int, ...], x: Tensor) -> Tensor:
        """Rows of the class tokens of a frame, one per tile."""
        n, tiles = layout[0], layout[1] if self.plan.class_token else 0
        return torch.arange(tiles, device=x.device) * (n // max(1, tiles))

    def _reference(self, stream: int, layout: tuple[int, ...]) -> Tensor | None:
        """Patches `[n, D]` of the state's reference, where it is of use."""
        known = self._states[stream].reference
        if known is None or known.layout != layout or not self.plan.taps <= {*known.outputs}:
            return None
        self._since[stream] = known.since
        return known.patches

    def watch(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Note keys and values `[B, H, n, d]` of a block that runs as stock, call by call."""
        for kept, calls in ((self._keys, keys), (self._values, values)):
            flat = torch.cat([call.transpose(1, 2).flatten(0, 1) for call in calls])  # [S, H, d]
            kept.append(self._lasting(flat.split(self.plan.sizes)))

    def note(self, index: int, flat: Tensor) -> None:
        """Note the output `[S, D]` of a block that ran as stock."""
        if index in self.plan.taps:
            self._outputs[index] = self._lasting(flat.split(self.plan.sizes))

    def _lasting(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Those of the frames that become references, none of them a view of all frames."""
        views = len(parts) > 1
        return {
            i: parts[i].clone() if views and self._frames[i].rows is None else parts[i]
            for i in self._last.values()
        }

    def step(self, index: int, block: Block, hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        """Run one block on the chosen rows.

        Args:
            index: Of the block.
            block: The block.
            hidden: `[B, N, D]` or `[S, D]`, its stock input.
            kwargs: Further arguments of the stock block.

        Returns:
            `hidden` itself, or a new one with the block's output where that is read.
        """
        rotary = kwargs.get("position_embeddings")
        if rotary is not None and self._rotary is None:
            self._rotary = (rotary[0][self._rows], rotary[1][self._rows])
        query, key, value = block.project(self._hidden, self._rotary)
        keys = self._mixed(key, lambda known: known.keys[index])
        values = self._mixed(value, lambda known: known.values[index])
        self._keys.append(self._lasting(keys))
        self._values.append(self._lasting(values))
        attended = torch.empty_like(query)
        for rows, frame, span in self._grouped(kwargs.get("cu_seqlens"), hidden):
            q, k, v = query[rows], keys[frame][span], values[frame][span]  # [k or n, H, d]
            q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
            found = F.scaled_dot_product_attention(q, k, v, scale=block.scale)  # [1, H, k, d]
            attended[rows] = found[0].transpose(0, 1)
        self._hidden = block.finish(self._hidden, attended)
        if index not in self.plan.taps:
            return hidden
        full = self._mixed(self._hidden, lambda known: known.outputs[index])
        self._outputs[index] = self._lasting(full)
        return torch.cat(full).reshape(hidden.shape)

    def _mixed(self, new: Tensor, old: Callable[[Reference], Tensor]) -> list[Tensor]:
        """Chosen rows `[K, ...]` put into what each frame builds on, `[n, ...]` per frame."""
        done: list[Tensor] = []
        for number, part in enumerate(new.split(self._counts)):
            frame = self._frames[number]
            if frame.rows is None:
                done.append(part)
                continue
            if frame.base is None:
                known = self._states[self.plan.streams[number]].reference
                assert known is not None  # or all of its patches were chosen
                base = old(known).to(part)
            else:
                base = done[frame.base]
            done.append(base.index_copy(0, frame.rows, part) if len(part) else base)
        return done

    def _grouped(self, bounds: Tensor | None, hidden: Tensor) -> list[Group]:
        """Chosen rows that attend to the same keys: those of their frame, tile or window.

        Args:
            bounds: `[W + 1]` where segments begin and end, None for a batch of equal ones.
            hidden: `[B, N, D]` where there are no bounds.
        """
        name = id(bounds)
        if name not in self._groups:
            batch, length = hidden.shape[:2]
            ends = torch.arange(batch + 1) * length if bounds is None else bounds.cpu().long()
            self._groups[name] = (
                bounds,
                groups(self._rows, self.plan.sizes, ends),
            )  # held, so that its id stays its own
        return self._groups[name][1]

    def commit(self) -> None:
        """Put the new references into the states, now that the pass has succeeded."""
        blocks = range(len(self._keys))
        for stream, state in enumerate(self._states):
            mine = [i for i, each in enumerate(self.plan.streams) if each == stream]
            if not mine:
                continue
            if stream in self._last:
                i = self._last[stream]
                state.reference = Reference(
                    self.plan.layouts[i],
                    self._frames[i].patches.clone(),
                    tuple(self._keys[block][i] for block in blocks),
                    tuple(self._values[block][i] for block in blocks),
                    {block: rows[i] for block, rows in self._outputs.items()},
                    self._since[stream],
                )
            elif state.reference is not None:
                state.reference = replace(state.reference, since=self._since[stream])
            state.frames += len(mine)
            state.whole += sum(self._frames[i].rows is None for i in mine)
            state.patches += sum(self.plan.sizes[i] for i in mine)
            state.computed += sum(self._counts[i] for i in mine)
