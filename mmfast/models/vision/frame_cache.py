"""A vision tower that computes only the changed patches of a stream's frames.

`with cache.using(state):` overrides the stock `get_video_features` or `get_image_features`; nothing
of the model is replaced for longer, other threads see the stock tower, and the memory of a stream
lies in its state alone.

The changed patches are chosen once, on the embedded patches. In every block the chosen rows alone
are projected, attend to all keys of their frame (those of the other patches come from the frame's
reference) and go through the MLP. The first published cache of this kind (STC, arXiv 2512.00891)
projects fresh keys of all tokens and chooses anew in every layer: on the embedded clips features
are no nearer for it, and it costs a third more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.core.kv import KVBlock
from mmfast.frontends.changes import Refresh, changes
from mmfast.models.families.adapter import Call, adapter_for, tower_of
from mmfast.models.families.tower import Tower, attention_of, has_halves
from mmfast.models.patching import override
from mmfast.models.reduction.probe import AttentionCalls, intercepting
from mmfast.models.reduction.tower_signals import KEPT, MERGED
from mmfast.models.vision.frame_state import (
    FrameCacheState,
    FramePlan,
    Group,
    ReferenceFrame,
    groups,
    plan_pass,
)
from mmfast.models.vision.timm_attention import check_timm, on_rows

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


class FramePass:
    """The frames of one pass, and what its blocks leave behind.

    Under `stock` every frame is computed whole: the stock blocks run and are only watched.
    """

    def __init__(self, plan: FramePlan, states: Sequence[FrameCacheState], fixed: bool) -> None:
        self.plan = plan
        self.stock = True
        self._states = states
        self._fixed = fixed
        self._frames: list[_PassFrame] = []
        self._last: dict[int, int] = {}  # by stream, the frame that becomes the reference
        self._since: dict[int, int] = {}  # by stream, frames since one was computed whole
        # By block, of keys and of values, and by frame: [n, H, d].
        self._attended: list[list[dict[int, Tensor]]] = []
        self._outputs: dict[int, dict[int, Tensor]] = {}
        self._groups: dict[int, tuple[Any, list[Group]]] = {}

    def begin(self, flat: Tensor, rule: Refresh | None) -> None:
        """Choose patches by the input `[S, D]` of the first block; all of them without a rule."""
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
        self.rows = torch.cat(picked)  # [K]
        self._hidden = flat if self.stock else flat[self.rows]  # [K, D]

    def _choose(self, index: int, x: Tensor, rule: Refresh | None) -> _PassFrame:
        stream, layout = self.plan.streams[index], self.plan.layouts[index]
        before = self._last.get(stream)
        if before is None:
            known = self._reference(stream, layout)
        else:
            same = self.plan.layouts[before] == layout
            known = self._frames[before].patches if same else None
        if known is None or rule is None:
            return _PassFrame(None, None, x)
        known, classes = known.to(x), self._class_rows(layout, x)
        content = torch.ones_like(x[:, 0], dtype=torch.bool).index_fill(0, classes, False)
        rows = rule.choose(changes(x[content], known[content]), self._since[stream] + 1)
        if rows is None:
            return _PassFrame(None, None, x)
        if len(rows):  # class tokens sum a frame up: with any patch, or not at all
            rows = torch.cat([classes, content.nonzero()[rows, 0]]).sort().values
        return _PassFrame(before, rows, known.index_copy(0, rows, x[rows]))

    def _class_rows(self, layout: tuple[int, ...], x: Tensor) -> Tensor:
        n, prefix = layout[0], torch.arange(self.plan.prefix, device=x.device)
        tiles = layout[1] if self.plan.prefix else 1
        return (torch.arange(tiles, device=x.device)[:, None] * (n // tiles) + prefix).flatten()

    def _reference(self, stream: int, layout: tuple[int, ...]) -> Tensor | None:
        """Patches `[n, D]` of the state's reference, where it is of use."""
        known = self._states[stream].reference
        if known is None or known.layout != layout or not self.plan.taps <= {*known.outputs}:
            return None
        self._since[stream] = known.since
        return known.patches

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
            self._outputs[index] = self._lasting(flat.split(self.plan.sizes))

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
        return torch.cat(full).reshape(hidden.shape)

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
                )
            elif state.reference is not None:
                state.reference = replace(state.reference, since=self._since[stream])
            state.frames += len(mine)
            state.whole += sum(self._frames[i].rows is None for i in mine)
            state.patches += sum(self.plan.sizes[i] for i in mine)
            state.computed += sum(self._counts[i] for i in mine)


class FrameCache:
    """Frames of streams through a stock tower, recomputing only what changed.

    A patch that is not computed keeps the keys, values and outputs of when it was; it is compared
    with itself as it was then, so a slow change is noticed once it has added up. Towers: SigLIP,
    CLIP, InternVL's, Idefics3's, those of Qwen2-VL, 2.5 and 3, and encoders without a language
    model (ViTs of timm, SigLIP, CLIP, DINOv2), whose images are frames. For inference only.
    """

    def __init__(
        self,
        model: Any,
        refresh: float | None = None,
        *,
        threshold: float | None = None,
        cut: float | None = 0.05,
        every: int | None = 32,
        fixed: bool = False,
    ) -> None:
        """Prepare a cache; the model is not touched.

        Args:
            model: A stock model of a known family.
            refresh: Share of a frame's patches to compute, the most changed ones; 1.0 is the stock
                tower. 0.25 where neither it nor `threshold` is given.
            threshold: Instead, the change from which a patch is computed (see
                `mmfast.frontends.changes.changes`; 0.02 is a good start).
            cut: A frame whose other patches have changed by more than this on average (a scene cut)
                is computed whole. None never does so.
            every: A frame is computed whole at least this often; None for never.
            fixed: Compare with the last frame computed whole, not each patch with its last own
                state.
        """
        share = 0.25 if refresh is None and threshold is None else refresh
        self.rule = Refresh(share, threshold, cut, every)
        self._adapter = adapter_for(model)
        self._tower = tower_of(model)
        _check_blocks(self._tower, self._adapter.family)
        self._fixed = fixed
        self._local = threading.local()

    def start(self) -> FrameCacheState:
        """The state of a new stream."""
        return FrameCacheState()

    @contextmanager
    def using(self, states: FrameCacheState | Sequence[FrameCacheState]) -> Iterator[None]:
        """Encode with the cache what this thread encodes inside.

        The next frames of one stream come as one video, several in a row, or images; of several
        streams, videos or images come in the order of their states, equally many each (else
        ModelError). A state moves on when a call has succeeded, and stays where it is when one
        fails.
        """
        streams = [states] if isinstance(states, FrameCacheState) else list(states)
        if self.rule.whole or not streams:
            yield
            return
        tower, entered = self._tower, _entered()
        if id(tower.module) in entered:
            raise ModelError(
                "a frame cache is in use on this vision tower already; leave its `with` first, or "
                "hand one `using` the states of all streams"
            )
        with ExitStack() as stack:
            entered.add(id(tower.module))
            stack.callback(entered.discard, id(tower.module))
            self._local.streams = streams
            stack.callback(setattr, self._local, "streams", None)
            mine = partial(self._for, streams)
            for name, kind in tower.entries().items():
                around = mine(partial(self._encode, name, kind))
                stack.enter_context(override(tower.base, name, around))
            for index, block in enumerate(tower.blocks):
                stack.enter_context(override(block, "forward", mine(partial(self._block, index))))
            modules = [attention_of(block) for block in tower.blocks]
            around = mine(self._attend)
            if not tower.timm:
                stack.enter_context(intercepting(dict.fromkeys(modules, around), innermost=True))
            yield

    def _for(self, streams: Sequence[FrameCacheState], around: Callable[..., Any]) -> Any:
        """`around` for the one `with` that gave these streams; other threads run stock code."""

        def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            mine = getattr(self._local, "streams", None) is streams
            return around(call, *args, **kwargs) if mine else call(*args, **kwargs)

        return run

    @torch.no_grad()
    def _encode(
        self, name: str, kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        streams = getattr(self._local, "streams", None)
        if streams is None or self._work() is not None:  # Qwen3-VL's video method calls the other
            return call(*args, **kwargs)
        _check_sites(self._tower)
        arguments = self._tower.bind(name, args, kwargs)
        self._local.work = work = _Work(streams, kind, arguments)
        try:
            output = call(*args, **kwargs)
        finally:
            self._local.work = None
        if work.running is not None:
            work.running.commit()
        return output

    def _work(self) -> _Work | None:
        found: _Work | None = getattr(self._local, "work", None)
        return found

    def _block(
        self, index: int, call: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        work = self._work()
        if work is None:
            return call(hidden, *args, **kwargs)
        if index == 0:
            masks = (*args, kwargs.get("attention_mask"), kwargs.get("attn_mask"))
            self._begin(work, hidden, any(mask is not None for mask in masks))
        running = work.running
        assert running is not None
        if not running.stock:
            on = partial(self._on_rows, work, self._tower.blocks[index], hidden, args, kwargs)
            return running.step(index, on, hidden, kwargs)
        work.calls = []
        with AttentionCalls(self._attend) if self._tower.timm else nullcontext():
            output = call(hidden, *args, **kwargs)
        running.watch([key for key, _ in work.calls], [value for _, value in work.calls])
        running.note(index, output.flatten(0, -2))
        return output

    def _begin(self, work: _Work, hidden: Tensor, masked: bool) -> None:
        states = len(work.streams)
        plan = plan_pass(self._tower, self._adapter, work.kind, work.arguments, hidden, states)
        work.running = FramePass(plan, work.streams, self._fixed)
        work.running.begin(hidden.flatten(0, -2), None if masked else self.rule)

    def _on_rows(
        self,
        work: _Work,
        block: nn.Module,
        hidden: Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rows: Tensor,
        attend: Attend,
    ) -> Tensor:
        """The stock forward of a block on rows `[K, D]`, with another attention inside."""
        assert work.running is not None
        if self._tower.timm:
            return on_rows(block, rows, work.running.rows % hidden.shape[1], kwargs, attend)
        given = dict(kwargs)
        if self._tower.packed:
            given["cu_seqlens"] = torch.tensor([0, len(rows)], device=rows.device)
            given["max_seqlen"] = len(rows)
            tables = kwargs["position_embeddings"]
            given["position_embeddings"] = tuple(table[work.running.rows] for table in tables)
        work.attend = attend
        try:
            forward = type(block).forward  # past other overrides: rows are a shape of their own
            output = forward(block, rows if self._tower.packed else rows[None], *args, **given)
        finally:
            work.attend = None
        out: Tensor = output[0] if isinstance(output, tuple) else output
        return out.flatten(0, -2)

    def _attend(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around attention: `(module, q, k, v, …)` of transformers, `(q, k, v)` of sdpa in timm."""
        work = self._work()
        if work is None:
            return call(*args, **kwargs)
        query, key, value = args[:3] if self._tower.timm else args[1:4]
        if work.attend is None:
            work.calls.append((key, value))
            return call(*args, **kwargs)
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))  # [K, H, d]
        return work.attend(q, k, v, kwargs.get("scaling"))[None], None


@dataclass
class _Work:
    streams: Sequence[FrameCacheState]
    kind: str
    arguments: Call
    running: FramePass | None = None
    calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    attend: Attend | None = None  # while a block runs on some rows alone


_THREAD = threading.local()


def _entered() -> set[int]:
    """Towers on which this thread uses a frame cache, by id."""
    found: set[int] = _THREAD.__dict__.setdefault("towers", set())
    return found


def _check_blocks(tower: Tower, family: str) -> None:
    if not len(tower.blocks) or not all(map(has_halves, tower.blocks)):
        raise ModelError(
            f"the vision tower of {family!r} ({type(tower.module).__name__}) has no blocks that a "
            "frame cache knows; leave the cache out, or use a SigLIP, CLIP, InternVL or Qwen tower"
        )
    if tower.timm:
        check_timm(tower)


def _check_sites(tower: Tower) -> None:
    """Refuse what changes the number of patches on their way."""
    merged = any(MERGED in attention_of(block).__dict__ for block in tower.blocks)
    if merged or KEPT in tower.module.__dict__:
        raise ModelError(
            "a frame cache does not work with reduction at sites 'vit' and 'pixel'; reduce at "
            "'pre', for example with dtd or stc_pruner"
        )
