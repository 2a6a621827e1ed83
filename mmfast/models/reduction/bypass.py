"""Tokens that pass feed-forward layers by, and leave with their keys when the prompt ends.

Such tokens take part in the attention of a prompt as keys and as queries. A feed-forward layer is
given the others alone and adds nothing to these. What they told is in the tokens that stay, so when
the prompt ends their keys and values go (Skip-Vision).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicLayer

from mmfast.core.errors import ModelError
from mmfast.models.patching import override
from mmfast.models.reduction.cache_layers import held, regroup, shorten
from mmfast.models.reduction.call import PassState, apply
from mmfast.models.reduction.step import ForwardStep
from mmfast.models.wrappers import feed_forward_at, layers_of


class Bypass:
    """The feed-forward layers of one attached model from decoder layer `first` on."""

    def __init__(self, first: int, text: Any, state: PassState) -> None:
        self._first, self._state = first, state
        self._modules = [feed_forward_at(text, i) for i in range(first, len(layers_of(text)))]
        self._uncompiled: Any = torch.compiler.disable(apply)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In the place of the modules' forward, exactly undone."""
        with ExitStack() as stack:
            for index, module in enumerate(self._modules, self._first):
                stack.enter_context(override(module, "forward", partial(self._forward, index)))
            yield

    def _forward(self, index: int, stock: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return self._some(index, stock, x, *args, **kwargs)
        if x.shape[1] == 1:  # steps of decoding, which alone run well compiled, skip nothing
            return stock(x, *args, **kwargs)
        return self._uncompiled(self._some, index, stock, x, *args)

    def _some(self, index: int, stock: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Outputs of the module for `[B, n, D]`, zero at tokens that skip it."""
        call = self._state.call
        skip = None if call is None or call.step is None else call.step.skipped.get(index)
        if skip is None:
            return stock(x, *args, **kwargs)
        where = (~skip).flatten().nonzero()[:, 0].to(x.device)
        rows = x.flatten(0, 1)
        done = stock(rows.index_select(0, where)[None], *args, **kwargs)
        if not isinstance(done, Tensor):
            raise ModelError(
                f"the feed-forward layer {index} returns a {type(done).__name__}, of which tokens "
                "cannot be left out; use a method that drops them, such as fastv"
            )
        return done.new_zeros(rows.shape).index_copy(0, where, done[0]).view(x.shape)

    def close(self, cache: Any, step: ForwardStep, last: bool) -> None:
        """Note the entries that skipped in a call; behind the last part of a prompt drop them.

        ModelError for a cache layer that cannot lose entries.
        """
        for index in range(self._first, self._first + len(self._modules)):
            if index >= len(cache.layers):
                return
            now, before = step.skipped.get(index), getattr(cache.layers[index], "skipped", None)
            if now is None and before is None:
                continue
            layer = shorten(cache, index)
            if not isinstance(layer, DynamicLayer) or layer.is_sliding:
                raise ModelError(
                    f"cache layer {index} is a {type(layer).__name__}, which cannot lose entries; "
                    "use the default DynamicCache, or fastv"
                )
            length = held(layer)
            skipped = _aligned(before, now, length)
            if not last:
                layer.skipped = skipped
                continue
            real = _real(layer, step, length, skipped)
            _drop(layer, real & ~skipped)
            regroup(cache, index)


def _aligned(before: Tensor | None, now: Tensor | None, length: int) -> Tensor:
    """Entries `[B, length]` that skipped, from those of earlier parts and of this one."""
    new = 0 if now is None else now.shape[1]
    if before is None:
        assert now is not None
        return F.pad(now, (length - new, 0), value=False)
    before = F.pad(before, (0, length - new - before.shape[1]), value=False)
    return before if now is None else torch.cat([before, now.to(before.device)], 1)


def _real(layer: Any, step: ForwardStep, length: int, like: Tensor) -> Tensor:
    """Entries `[B, length]` of a layer that are no padding."""
    if layer.group is not None:
        known = like.new_ones(like.shape) if layer.valid is None else layer.valid
        return F.pad(known, (0, length - known.shape[1]), value=True)
    real, ok = like.new_ones(like.shape), step.sequences.ok
    if step.past is not None:
        real[:, : step.past.shape[1]] = step.past
    if ok is not None:
        real[:, length - ok.shape[1] :] = ok
    return real


def _drop(layer: Any, keep: Tensor) -> None:
    """Keep the entries `keep` `[B, n]` of each row; rows of unequal length get padding in front."""
    most = int(keep.sum(1).max())
    order = keep.byte().argsort(dim=1, stable=True)[:, keep.shape[1] - most :]
    left = keep.gather(1, order)
    for name in ("keys", "values"):
        x = getattr(layer, name)
        at = order.to(x.device)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        setattr(layer, name, x.gather(2, at))
    layer.valid = None if bool(left.all()) else left
    layer.dropped += keep.shape[1] - most
    layer.skipped = None
