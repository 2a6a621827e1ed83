"""A vision tower that computes the changed patches of a stream's frames only.

`with cache.using(state):` stands around the stock `get_video_features` or `get_image_features`;
nothing of the model is replaced for longer, other threads see the stock tower, and what a stream
remembers lies in its state alone.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.frontends.frame_cache import Refresh
from mmfast.models.adapter import Call, adapter_for
from mmfast.models.frame_cache_blocks import blocks_of
from mmfast.models.frame_cache_pass import Pass
from mmfast.models.frame_cache_plan import plan_pass
from mmfast.models.frame_cache_state import FrameCacheState
from mmfast.models.patching import override
from mmfast.models.probe import intercepting
from mmfast.models.towers import Tower, attention_of, kinds_of
from mmfast.models.vision import KEPT, MERGED


class FrameCache:
    """Frames of streams through a stock tower, recomputing only what changed.

    A patch that is not computed keeps the keys, values and outputs of when it was; it is compared
    with itself as it was then, so a slow change is noticed once it has added up. Towers: SigLIP,
    CLIP, InternVL's, Idefics3's and those of Qwen2-VL, 2.5 and 3. For inference only.
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
            refresh: Share of a frame's patches to compute, the most changed ones; 1.0 is the
                stock tower. 0.25 where neither it nor `threshold` is given.
            threshold: Instead, the change from which a patch is computed (see
                `mmfast.frontends.frame_cache.changes`; 0.02 is a good start).
            cut: A frame is computed whole if its other patches have changed by more than this on
                average: a scene cut. None never does so.
            every: A frame is computed whole at least this often; None for never.
            fixed: Compare with the last frame computed whole, instead of each patch with itself
                as it was computed last.

        Raises:
            ModelError: The family is unknown, or its tower is of another kind.
            MmfastError: A value out of range.
        """
        share = 0.25 if refresh is None and threshold is None else refresh
        self.rule = Refresh(share, threshold, cut, every)
        self._adapter = adapter_for(model)
        self._tower = self._adapter.tower(model.base_model)
        self._blocks = blocks_of(self._tower, self._adapter.family)
        self._fixed = fixed
        self._local = threading.local()

    def start(self) -> FrameCacheState:
        """The state of a new stream."""
        return FrameCacheState()

    @contextmanager
    def using(self, states: FrameCacheState | Sequence[FrameCacheState]) -> Iterator[None]:
        """Encode with the cache what this thread encodes inside.

        Args:
            states: The stream whose next frames are encoded, as one video, as several that follow
                each other, or as images; or of several streams, whose videos or images then come
                in this order, equally many each. A state moves on when a call has succeeded, and
                stays where it is when one fails.

        Raises:
            ModelError: While encoding, media do not share out among the states.
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
            for kind in {"image", "video"} & set(kinds_of(tower.base)):
                name = f"get_{kind}_features"
                stack.enter_context(override(tower.base, name, mine(partial(self._encode, kind))))
            for index, block in enumerate(tower.blocks):
                stack.enter_context(override(block, "forward", mine(partial(self._block, index))))
            modules = [attention_of(block) for block in tower.blocks]
            stack.enter_context(
                intercepting(dict.fromkeys(modules, mine(self._attend)), innermost=True)
            )
            yield

    def _for(self, streams: Sequence[FrameCacheState], around: Callable[..., Any]) -> Any:
        """`around` for the one `with` that gave these streams; threads pass each other's by."""

        def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            mine = getattr(self._local, "streams", None) is streams
            return around(call, *args, **kwargs) if mine else call(*args, **kwargs)

        return run

    @torch.no_grad()
    def _encode(self, kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around `get_image_features` and `get_video_features`: run, put the references in."""
        streams = getattr(self._local, "streams", None)
        if streams is None or self._work() is not None:  # Qwen3-VL's video method calls the other
            return call(*args, **kwargs)
        _check_sites(self._tower)
        method = getattr(self._tower.base, f"get_{kind}_features")
        arguments = inspect.signature(method).bind(*args, **kwargs).arguments
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
        """Around a block: the stock one on whole frames, its parts on chosen patches."""
        work = self._work()
        if work is None:
            return call(hidden, *args, **kwargs)
        if index == 0:
            masks = (*args, kwargs.get("attention_mask"))
            self._begin(work, hidden, any(mask is not None for mask in masks))
        running = work.running
        assert running is not None
        if not running.stock:
            return running.step(index, self._blocks[index], hidden, kwargs)
        work.calls = []
        output = call(hidden, *args, **kwargs)
        running.watch([key for key, _ in work.calls], [value for _, value in work.calls])
        running.note(index, output.flatten(0, -2))
        return output

    def _begin(self, work: _Work, hidden: Tensor, masked: bool) -> None:
        """Plan the pass and choose its patches; frames with padding are computed whole."""
        states = len(work.streams)
        plan = plan_pass(self._tower, self._adapter, work.kind, work.arguments, hidden, states)
        work.running = Pass(plan, work.streams, self._fixed)
        work.running.begin(hidden.flatten(0, -2), None if masked else self.rule)

    def _attend(
        self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """Around the attention function: note keys and values as they are attended."""
        work = self._work()
        if work is not None:
            work.calls.append((args[1], args[2]))
        return call(module, *args, **kwargs)


@dataclass
class _Work:
    """One call of the encoder."""

    streams: Sequence[FrameCacheState]
    kind: str
    arguments: Call
    running: Pass | None = None
    calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)


_THREAD = threading.local()


def _entered() -> set[int]:
    """Towers on which this thread uses a frame cache, by id."""
    found: set[int] = _THREAD.__dict__.setdefault("towers", set())
    return found


def _check_sites(tower: Tower) -> None:
    """Refuse what changes the number of patches on their way."""
    merged = any(MERGED in attention_of(block).__dict__ for block in tower.blocks)
    if merged or KEPT in tower.module.__dict__:
        raise ModelError(
            "a frame cache does not work with reduction at sites 'vit' and 'pixel'; reduce at "
            "'pre', for example with dtd or stc_pruner"
        )
