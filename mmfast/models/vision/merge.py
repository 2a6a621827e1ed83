"""Merge tokens inside the vision tower: between attention and MLP of its blocks (site `vit`).

Bolya et al. (arXiv 2210.09461) for the towers of vision-language models: every used block merges
the same number of tokens of a frame (`merge_pass.MergePlan`), attention counts a merged token by
its size, and after the last used block each patch takes the value of its token, so that pooling,
merger, projector and positions of the model go on with the raster they expect. Tokens stay in
raster order (the reference moves unmerged ones in front, which changes its later pairings).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.core.spec import Spec
from mmfast.core.trace import Trace, View, settled
from mmfast.models.families.adapter import Adapter, Call, raster_places
from mmfast.models.families.tower import NORMS, Tower, attention_of, part_of
from mmfast.models.patching import override
from mmfast.models.reduction.probe import intercepting
from mmfast.models.reduction.tower_signals import MERGED
from mmfast.models.vision.acceleration import fused_attention
from mmfast.models.vision.merge_pass import MergePass, add_bias, plan_pass
from mmfast.models.vision.timm_attention import noting_keys, set_sizes
from mmfast.models.wrappers import base_of


@contextmanager
def vit_stage(model: Any, adapter: Adapter, spec: Spec, trace: Trace) -> Iterator[None]:
    """Merge tokens in the tower whenever the model encodes images or videos.

    A share holds for every frame or tile, an integer for every image or video; one that does not
    fit is a SpecError while encoding. Share 1.0 does nothing at all. Each image or video adds a row
    `vit` to the trace (patches in, tokens left after the last used block, its part of the
    milliseconds) and its Reduction over the patches in raster order, tiles one after the other;
    `item` counts within the call.
    """
    tower = adapter.tower(base_of(model))
    if spec.whole:
        yield
        return
    stage = _MergeStage(tower, adapter, spec, trace)
    with ExitStack() as stack:
        for name, kind in tower.entries().items():
            stack.enter_context(override(tower.base, name, partial(stage.encode, name, kind)))
        for index, block in enumerate(tower.blocks):
            stack.enter_context(override(block, "forward", partial(stage.block, index)))
            attention_of(block).__dict__[MERGED] = stage.merged
            stack.callback(attention_of(block).__dict__.pop, MERGED, None)
        for merger in getattr(tower.module, "deepstack_merger_list", ()):
            stack.callback(merger.register_forward_pre_hook(stage.feed).remove)
        modules = [attention_of(block) for block in tower.blocks]
        if tower.timm:
            stack.enter_context(noting_keys(tower, stage.current))
        else:
            stack.enter_context(intercepting(dict.fromkeys(modules, stage.attend)))
        yield


class _MergeStage:
    """Functions around those of the tower; the current pass is kept per thread."""

    def __init__(self, tower: Tower, adapter: Adapter, spec: Spec, trace: Trace) -> None:
        self._tower = tower
        self._adapter = adapter
        self._spec = spec
        self._trace = trace
        self._local = threading.local()

    def _pass(self) -> MergePass | None:
        return getattr(self._local, "work", None)

    def current(self) -> MergePass | None:
        """The pass of this thread, while its blocks merge."""
        work = self._pass()
        return None if work is None or work.over else work

    def merged(self) -> Reduction | None:
        """Patches onto the tokens of the current block, for readers of its attention."""
        work = self.current()
        return None if work is None else work.merged

    def encode(
        self, name: str, kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Around `get_image_features` and the like: plan, run, report."""
        if self._pass() is not None:  # Qwen3-VL's video method calls its image method
            return call(*args, **kwargs)
        arguments = self._tower.bind(name, args, kwargs)
        plan = plan_pass(self._tower, self._adapter, kind, arguments, self._spec)
        work = MergePass(plan, self._spec)
        if work.plan.idle:
            return call(*args, **kwargs)
        if getattr(self._tower.module, "grad_checkpointing", False) and torch.is_grad_enabled():
            raise ModelError(
                f"'{self._spec}' remembers pairs from block to block, and checkpointing computes "
                "blocks again; call set_grad_checkpointing(False)"
            )
        work.whole = self._tower.alone and bool(self._tower.states(arguments))
        start = settled()
        self._local.work = work
        try:
            with _together(self._tower):
                output = call(*args, **kwargs)
        finally:
            self._local.work = None
        self._report(work, (settled() - start) * 1e3)
        self._draw(work, kind, arguments)
        return output

    def _report(self, work: MergePass, ms: float) -> None:
        total = sum(work.plan.items)
        for item, found in enumerate(work.per_item()):
            self._trace.record("vit", item, found)
            self._trace.add("vit", found.n, found.m, ms * found.n / total, self._spec.method.name)

    @torch.no_grad()
    def _draw(self, work: MergePass, kind: str, arguments: Call) -> None:
        if work.merged is None:
            return
        base, shares = self._tower.base, work.merged.share()[:, None]
        folded = self._adapter.fold(base, kind, shares, arguments)
        layouts = self._adapter.layout(base, kind, arguments)
        found = work.per_item()
        for number, (layout, values) in enumerate(zip(layouts, folded, strict=True)):
            tile = None if layout.tiles is None else torch.tensor(layout.tiles)
            self._trace.see(number, layout.place(), tile, (kind, number))
            self._trace.merged[kind, number] = values[:, 0].float().cpu()
            raster = patch_raster(layout.grid, found[number].n) if len(found) > number else None
            if raster is not None:
                seen = View(raster_places(raster), source=(kind, number))
                self._trace.patches[kind, number] = (seen, found[number])

    def block(
        self, index: int, call: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Around a block: its attention on the tokens left, merge, its MLP on fewer."""
        work = self.current()
        if work is None:
            return call(hidden, *args, **kwargs)
        block: Any = self._tower.blocks[index]
        work.enter()
        hidden = work.shrink(hidden) if work.whole else hidden
        if self._tower.packed:
            self._shorten(work, kwargs)
        elif self._tower.timm:
            set_sizes(work, hidden, kwargs)
        hidden = _half(block, 1, attention_of(block), hidden, *args, **kwargs)
        hidden = work.merge(index, hidden)
        hidden = _half(block, 2, block.mlp, hidden)
        work.over = index + 1 == work.plan.blocks
        return work.expand(hidden) if work.over or work.whole else hidden

    def _shorten(self, work: MergePass, kwargs: dict[str, Any]) -> None:
        kwargs["cu_seqlens"] = work.ends(kwargs["cu_seqlens"])
        kwargs["max_seqlen"] = None  # the attention counts again where it needs it
        kwargs["position_embeddings"] = tuple(map(work.rows, kwargs["position_embeddings"]))

    def attend(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Around the attention function: note the keys, count merged tokens by size."""
        work = self.current()
        if work is not None:
            work.note(key)
            bias = work.bias(query.shape[0], key.shape[2], query)
            if bias is not None:
                query, key, attention_mask = add_bias(module, query, key, attention_mask, bias)
        return call(module, query, key, value, attention_mask, *args, **kwargs)

    def feed(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before a DeepStack merger, which reads the raster between blocks."""
        work = self._pass()
        return args if work is None else (work.expand(args[0]), *args[1:])


def _together(tower: Tower) -> AbstractContextManager[None]:
    """One call of attention for all windows of a packed tower that asks a GPU for sdpa.

    A call for each costs a GPU more than its work: hundreds a block, each with its keys to note.
    """
    config = getattr(attention_of(tower.blocks[0]), "config", None)
    sdpa = getattr(config, "_attn_implementation", None) == "sdpa"
    gpu = next(tower.module.parameters()).device.type == "cuda"
    return fused_attention(tower) if tower.packed and sdpa and gpu else nullcontext()


# Names of what scales and drops the two halves of a block.
_SCALES = {n: (f"ls{n}", f"gamma_{n}", f"lambda_{n}", f"layer_scale{n}") for n in (1, 2)}
_DROPS = {1: ("drop_path1", "drop_path"), 2: ("drop_path2", "drop_path", "dropout")}
# Blocks of timm whose norms stand behind attention and MLP.
_POST_NORM = ("ResPostBlock", "EvaBlockPostNorm")


def _half(block: Any, number: int, run: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Add attention (1) or MLP (2) of a block to `x`, normed and scaled as the block does."""
    norm, scale = part_of(block, NORMS[number]), part_of(block, _SCALES[number])
    behind = type(block).__name__ in _POST_NORM
    step = run(x if behind else norm(x), *args, **kwargs)
    step = step[0] if isinstance(step, tuple) else step
    step = norm(step) if behind else step
    if scale is not None:
        step = scale(step) if isinstance(scale, nn.Module) else scale * step
    drop = part_of(block, _DROPS[number])
    out: Tensor = x + (step if drop is None else drop(step))
    return out


def patch_raster(grid: tuple[int, int, int] | None, patches: int) -> tuple[int, int, int] | None:
    """Frames, rows and columns of the patches behind tokens of raster `grid`; None if in tiles."""
    if grid is None or patches % grid[0]:
        return None
    frames, rows, columns = grid
    tall = round(math.sqrt(patches / frames * rows / columns))
    raster = (frames, tall, patches // frames // max(1, tall))
    return raster if math.prod(raster) == patches else None
