"""A vision tower that computes only the changed patches of a stream's frames.

`with cache.using(state):` overrides the stock `get_video_features` or `get_image_features`; nothing
of the model is replaced for longer, other threads see the stock tower, and the memory of a stream
lies in its state alone.

The changed patches are chosen once, on the embedded patches. In every block the chosen rows alone
are projected, attend to all keys of their frame (those of the other patches come from the frame's
reference) and go through the MLP. The first published cache of this kind (STC, arXiv 2512.00891)
projects fresh keys of all tokens and chooses anew in every layer: on the embedded clips features
are no nearer for it, and it costs a third more.

Under a `goal` the cache looks for motion of the whole picture (`motion`), measures on frames
computed whole what reuse would have cost in quality, and stands aside where it saves nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import MmfastError, ModelError
from mmfast.core.trace import settled
from mmfast.frontends.changes import Refresh
from mmfast.models.families.adapter import Call, adapter_for, check_inner, tower_of
from mmfast.models.families.tower import PIXELS, Tower, attention_of, has_halves
from mmfast.models.patching import override
from mmfast.models.reduction.probe import AttentionCalls, intercepting
from mmfast.models.reduction.tower_signals import KEPT, MERGED
from mmfast.models.vision.frames.encoder_pass import Attend, FramePass
from mmfast.models.vision.frames.motion import (
    by_frame,
    flat_picture,
    lumas,
)
from mmfast.models.vision.frames.state import (
    FrameCacheState,
    FramePlan,
    plan_pass,
)
from mmfast.models.vision.timm_attention import check_timm, on_rows

# Products of a frame in the blocks below which the cache costs more than it can save: on one core
# of a CPU its own work takes some 3 ms, and this many about 30 ms.
LEAST_WORK = 1e9


class Payoff:
    """The clock's word on whether a cache is faster than the stock tower.

    The first calls of a cache are stock calls. From then on the mean time of the latest cached
    calls is compared with the median of stock calls, each per patch; where it is not below, the
    cache rests, twice as long each time in a row.
    """

    FIRST, WINDOW, REST = 3, 6, 64  # calls

    def __init__(self) -> None:
        """Begin without any time known."""
        self._stock: deque[float] = deque(maxlen=5)
        self._cached: deque[float] = deque(maxlen=self.WINDOW)
        self._left, self._next = 0, self.REST

    @property
    def rests(self) -> bool:
        """Calls go to the stock tower."""
        return len(self._stock) < self.FIRST or self._left > 0

    def note(self, seconds: float, patches: int, cached: bool) -> None:
        """Note the time of a call that encoded so many patches."""
        if not patches:
            return
        if not cached:
            self._stock.append(seconds / patches)
            self._left = max(0, self._left - 1)
            return
        self._cached.append(seconds / patches)
        if len(self._cached) < self.WINDOW:
            return
        if mean(self._cached) < median(self._stock):
            self._next = self.REST
        else:
            self._cached.clear()
            self._left, self._next = self._next, 2 * self._next


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
        goal: float | None = None,
        timed: bool = False,
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
            goal: Cosine of the features to the exact ones, 0.98 for example. In place of
                `cut`, whole frames are computed as often as it takes: on each one the error that
                reuse would have had is measured, and says how long and how changed the next ones
                may be. Patches that moved with the whole picture are taken from their old place
                (see `mmfast.models.vision.frames.motion`); calls that reuse cannot make cheaper go
                to the stock tower.
            timed: Under a goal, let the clock tell whether the cache is faster than the stock tower
                (see `Payoff`), in place of a rule of thumb. Then which frames are computed whole
                may differ from run to run.

        Raises:
            MmfastError: A value is out of range, or both `refresh` and `threshold` are given.
            ModelError: The tower has no blocks that a frame cache knows.
        """
        share = 0.25 if refresh is None and threshold is None else refresh
        self.rule = Refresh(share, threshold, cut, every)
        self._adapter = adapter_for(model)
        self._tower = tower_of(model)
        check_inner(self._adapter, "a frame cache")
        _check_blocks(self._tower, self._adapter.family)
        if goal is not None and not 0.0 < goal < 1.0:
            raise MmfastError(f"goal={goal} is no cosine to keep; choose 0 to 1, such as 0.98")
        if timed and goal is None:
            raise MmfastError("timed=True acts under a goal alone; give one, such as goal=0.98")
        self._fixed, self.goal = fixed, goal
        self.payoff = Payoff() if timed else None
        linear = [m for m in self._tower.blocks.modules() if isinstance(m, nn.Linear)]
        self._weights = sum(layer.weight.numel() for layer in linear)
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
            if self._idle(streams):
                around = mine(self._count)
                stack.enter_context(override(tower.blocks[0], "forward", around))
                yield
                return
            for index, block in enumerate(tower.blocks):
                stack.enter_context(override(block, "forward", mine(partial(self._block, index))))
            modules = [attention_of(block) for block in tower.blocks]
            around = mine(self._attend)
            if not tower.timm:
                stack.enter_context(intercepting(dict.fromkeys(modules, around), innermost=True))
            yield

    def _idle(self, streams: Sequence[FrameCacheState]) -> bool:
        """Return True if these streams are left to the stock tower for now."""
        if self.goal is None:
            return False
        rests = self.payoff is not None and self.payoff.rests
        return rests or all(state.small or state.limits.pause for state in streams)

    def _count(self, call: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Around the first block of a stock pass: count its frames and forget the reference."""
        work = self._work()
        if work is not None:
            self._note_stock(work, self._plan(work, hidden))
        return call(hidden, *args, **kwargs)

    def _note_stock(self, work: _Work, plan: FramePlan) -> None:
        for stream, state in enumerate(work.streams):
            pairs = zip(plan.streams, plan.sizes, strict=True)
            sizes = [size for owner, size in pairs if owner == stream]
            work.counts.append((state, sizes, self._is_small(plan)))

    def _is_small(self, plan: FramePlan) -> bool:
        """Return True if a frame is too little work for a cache to save any, by rule of thumb."""
        return self.payoff is None and self._weights * max(plan.sizes) < LEAST_WORK

    def _plan(self, work: _Work, hidden: Tensor) -> FramePlan:
        states = len(work.streams)
        return plan_pass(self._tower, self._adapter, work.kind, work.arguments, hidden, states)

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
        outputs = getattr(self._local, "outputs", None)
        if streams is None or outputs is not None or self._work() is not None:
            return call(*args, **kwargs)
        _check_sites(self._tower)
        arguments = self._tower.bind(name, args, kwargs)
        work = _Work(streams, kind, arguments, self.rule)
        start = 0.0 if self.payoff is None else settled()
        output = self._run(work, partial(call, *args, **kwargs))
        for state, sizes, small in work.counts:
            state.count(sum(sizes), sum(sizes), len(sizes), len(sizes))
            pause = max(0, state.limits.pause - 1)
            state.limits = replace(state.limits, pause=pause)
            state.reference, state.small = None, small
        if work.running is not None:
            if work.running.would:
                self._measure(work.running, output, partial(call, *args, **kwargs))
            work.running.commit()
            for stream in sorted(work.running.moved):
                self._see_flat(name, call, work, stream, args, kwargs)
        if self.payoff is not None:
            plan = work.running.plan if work.running else None
            patches = sum(plan.sizes) if plan else sum(sum(sizes) for _, sizes, _ in work.counts)
            self.payoff.note(settled() - start, patches, cached=plan is not None)
        return output

    def _run(self, work: _Work, call: Callable[[], Any]) -> Any:
        self._local.work = work
        try:
            return call()
        finally:
            self._local.work = None

    def _measure(self, running: FramePass, output: Any, call: Callable[[], Any]) -> None:
        """Measure errors on the features that the language model reads, else on the last block.

        The call is made once more with blocks that only hand on what reuse would have made.
        """
        exact, would = running.last()
        if not self._tower.alone:
            self._local.outputs = running.would
            try:
                frames = len(running.plan.sizes)
                pair = [by_frame(o.pooler_output, frames) for o in (output, call())]
            finally:
                self._local.outputs = None
            if pair[0] is not None and pair[1] is not None:
                exact, would = pair[0], pair[1]
        running.learn(exact, would)

    def _see_flat(
        self,
        name: str,
        call: Callable[..., Any],
        work: _Work,
        stream: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Encode a flat picture in the colour of a stream's last frame, into its state."""
        pixels = work.arguments[PIXELS[work.kind]]
        share = len(pixels) // len(work.streams)
        flat = flat_picture(pixels[: (stream + 1) * share])
        args = [flat if value is pixels else value for value in args]
        kwargs = {key: flat if value is pixels else value for key, value in kwargs.items()}
        scratch = FrameCacheState()
        alone = _Work([scratch], work.kind, self._tower.bind(name, args, kwargs), None)
        self._run(alone, partial(call, *args, **kwargs))
        if alone.running is not None:
            alone.running.commit()
            work.streams[stream].flat = scratch.reference

    def _work(self) -> _Work | None:
        return getattr(self._local, "work", None)

    def _block(
        self, index: int, call: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        work, outputs = self._work(), getattr(self._local, "outputs", None)
        if outputs is not None:
            return outputs[index].reshape(hidden.shape) if index in outputs else hidden
        if work is None:
            return call(hidden, *args, **kwargs)
        if index == 0:
            masks = (*args, kwargs.get("attention_mask"), kwargs.get("attn_mask"))
            self._begin(work, hidden, any(mask is not None for mask in masks))
        running = work.running
        if running is None:
            return call(hidden, *args, **kwargs)
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
        plan = self._plan(work, hidden)
        if self.goal is not None and self._is_small(plan):
            self._note_stock(work, plan)
            return
        seen: list[Tensor] = []
        if self.goal is not None and all(layout[1:] == (1,) for layout in plan.layouts):
            seen = lumas(self._tower, work.kind, work.arguments, len(plan.layouts))
        work.running = FramePass(plan, work.streams, self._fixed, self.goal, seen)
        work.running.begin(hidden.flatten(0, -2), None if masked else work.rule)

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
    rule: Refresh | None  # None: all patches of all frames
    running: FramePass | None = None
    calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    attend: Attend | None = None  # while a block runs on some rows alone
    # Of a stock pass: state, patches of its frames, and whether the pass was little work.
    counts: list[tuple[FrameCacheState, list[int], bool]] = field(default_factory=list)


_THREAD = threading.local()


def _entered() -> set[int]:
    """Towers on which this thread uses a frame cache, by id."""
    found: set[int] = _THREAD.__dict__.setdefault("towers", set())
    return found


def _check_blocks(tower: Tower, family: str) -> None:
    known = len(tower.blocks) and all(map(has_halves, tower.blocks)) and not tower.scene
    if not known:
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
