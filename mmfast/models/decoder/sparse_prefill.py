"""Sparse prefill of one attached model: prompts read the blocks of keys that a method chooses.

It stands in the place of the attention function of decoder layers of full attention, so that
reducers and KV policies see queries, keys and their scores as ever. Decode steps, short parts of a
prompt and whatever is not plain causal attention run as in the stock model; the trace says why.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.blocks import PromptLayer
from mmfast.core.errors import ModelError
from mmfast.core.trace import Row, Trace
from mmfast.models.families.adapter import adapter_for
from mmfast.models.reduction.probe import HIDDEN, Around, substituting
from mmfast.models.wrappers import (
    FULL,
    HYBRID,
    attention_at,
    base_of,
    decoder_of,
    kind_of,
    layers_of,
)
from mmfast.ops.block_attention import block_attention
from mmfast.prefill.plan import PrefillPlan

# Arguments of attention functions that change the logits.
_OWN = ("softcap", "s_aux", "position_bias", "sliding_window", "block_indices")
_ROWS = 1 << 24  # entries of a mask that are compared at a time


class _SparseSums(threading.local):
    heads: int = 0  # of all layers and rows of the call
    held: float = 0.0
    read: float = 0.0
    ms: float = 0.0
    mask: Any = None
    spans: list[tuple[int, int]] | None = None
    tells: bool = False  # the caller asks for attention weights


def check_prefill(plan: PrefillPlan, model: Any) -> None:
    """Require a decoder layer of full attention that goes through transformers' interface."""
    if adapter_for(model).alone or not _modules(model):
        raise ModelError(
            f"prefill '{plan}' has nothing to act on in {type(model).__name__}, which has no "
            "decoder layer of full attention; leave it out"
        )


def _modules(model: Any) -> dict[int, nn.Module]:
    text = decoder_of(model)
    kinds = [kind_of(text.config, index) for index in range(len(layers_of(text)))]
    found = {i: attention_at(text, i) for i, kind in enumerate(kinds) if kind in (FULL, HYBRID)}
    return {index: module for index, module in found.items() if module is not None}


class SparsePrefill:
    """One method on one model; the trace gets a row `sparse` for every call in which it chose.

    The row has the keys that a query could read and those that it read, means over queries, heads
    and layers, and the milliseconds in which was chosen.
    """

    def __init__(self, model: Any, plan: PrefillPlan, trace: Trace) -> None:
        self._model, self._plan, self._trace = model, plan, trace
        self._selector, self._local = plan.selector(), _SparseSums()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Attention functions in, and out."""
        if self._plan.whole:
            yield
            return
        base, core = base_of(self._model), torch.compiler.disable(self._attend)
        cores: dict[nn.Module, Around] = dict.fromkeys(_modules(self._model).values(), core)
        with ExitStack() as stack:
            stack.enter_context(substituting(cores))
            enter, leave = map(torch.compiler.disable, (self._enter, self._leave))
            stack.callback(base.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(base.register_forward_hook(leave, always_call=True).remove)
            yield

    def _enter(self, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        local = self._local
        asked, config = kwargs.get("output_attentions"), base.config
        local.tells = bool(getattr(config, "output_attentions", False) if asked is None else asked)
        local.heads, local.held, local.read, local.ms = 0, 0.0, 0.0, 0.0

    def _leave(self, *_: Any) -> None:
        local = self._local
        local.mask = local.spans = None
        if local.heads:
            held, read = round(local.held / local.heads), round(local.read / local.heads)
            row = Row("sparse", held, read, local.ms, method=str(self._plan))
            self._trace.rows.append(row)
        local.heads = 0

    def _attend(
        self,
        call: Around,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        length = query.shape[2]
        stock = partial(call, module, query, key, value, attention_mask, *args, **kwargs)
        if length < max(2, self._selector.least):
            return stock()
        reason = _unlike(module, query, key, value, attention_mask, args, kwargs)
        spans = None if reason else self._spans(query, key, attention_mask, module)
        if spans is None:
            reason = reason or "its mask is not causal"
            self._trace.warn(f"prefill '{self._plan}': a layer attends to all, as {reason}")
            return stock()
        if self._local.tells:
            self._trace.warn(
                f"prefill '{self._plan}' makes no attention weights of a prompt, so that "
                "output_attentions=True gives none; leave one of the two out"
            )
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        out = query.new_zeros(len(query), query.shape[1], length, value.shape[-1])
        for row, (start, stop) in enumerate(spans):
            count = min(length, stop - start)  # of this row's queries, behind its padding
            mine = query[row, :, length - count :]
            keys, values = key[row, :, start:stop], value[row, :, start:stop]
            out[row, :, length - count :] = self._row(mine, keys, values, scale)
        return out.transpose(1, 2).contiguous(), None

    def _row(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Outputs `[Hq, L, d]` of one row of the batch, without padding."""
        local, begin = self._local, time.perf_counter()
        heads, length = query.shape[0], query.shape[1]
        if self._selector.share:
            layer = PromptLayer(query.unflatten(0, (len(key), -1)), key, scale)
        else:
            keys = key.repeat_interleave(heads // len(key), 0)
            layer = PromptLayer(query[:, None], keys, scale)
        choice = self._selector.choose(layer)
        local.ms += (time.perf_counter() - begin) * 1e3
        local.heads += len(choice.blocks)
        local.held += len(choice.blocks) * (key.shape[1] - (length - 1) / 2)
        local.read += float(choice.reads(length, key.shape[1]).sum())
        return block_attention(query, key, value, choice, scale)[0]

    def _spans(
        self, query: Tensor, key: Tensor, mask: Any, module: nn.Module
    ) -> list[tuple[int, int]] | None:
        """First key of each row, and the one behind its last; None where a mask is otherwise.

        The layers of a call share their mask, which is compared once.
        """
        length, size = query.shape[2], key.shape[2]
        if mask is None:
            name = str(getattr(getattr(module, "config", None), "_attn_implementation", ""))
            # An empty static cache: sdpa reads only the slots that are filled.
            return [(0, size if "flash" in name else length)] * len(query)
        local = self._local
        if local.mask is None or local.mask() is not mask:
            local.mask, local.spans = weakref.ref(mask), _spans_of(mask, len(query), length, size)
        return local.spans


def _unlike(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, args: Any, kwargs: Any
) -> str:
    """Tell what is not plain causal attention; "" where nothing is."""
    own = next((name for name in _OWN if kwargs.get(name) is not None), None)
    if args or own is not None:
        return f"it takes {own or 'further arguments'}"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return "gradients are wanted; call it under torch.no_grad()"
    if kwargs.get("dropout"):
        return "it has dropout"
    if query.device.type not in ("cpu", "cuda"):
        return f"there is no kernel for {query.device.type}"
    if value.shape[-1] != key.shape[-1]:
        return "keys and values differ in width"
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    if mask is None and not causal:
        return "it is not causal"
    if mask is not None and not isinstance(mask, Tensor):
        return "flex_attention brings a mask of its own; use attn='sdpa'"
    return ""


def _spans_of(mask: Tensor, batch: int, length: int, size: int) -> list[tuple[int, int]] | None:
    """Rows of a mask that are causal behind padding on the left; None where one is not."""
    if mask.ndim == 2:
        rows = mask[:, -size:] != 0
        found = [_span(row) for row in rows]
        return None if None in found else [each for each in found if each is not None]
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != length:
        return None
    spans: list[tuple[int, int]] = []
    for row in mask[:, 0, :, :size]:
        span = _span(_visible(row[-1]))
        if span is None or not _is_causal(row, *span):
            return None
        spans.append(span)
    return spans * (batch if len(spans) == 1 else 1)


def _visible(rows: Tensor) -> Tensor:
    return rows if rows.dtype == torch.bool else rows > HIDDEN / 2


def _span(row: Tensor) -> tuple[int, int] | None:
    """First True of a row and the place behind the last one, where there is no gap."""
    places = row.nonzero()[:, 0]
    if not len(places):
        return None
    start, stop = int(places[0]), int(places[-1]) + 1
    return (start, stop) if stop - start == len(places) else None


def _is_causal(mask: Tensor, start: int, stop: int) -> bool:
    """Return True if the queries `[L, S]` see the keys from `start` to themselves, the last all."""
    length, size = mask.shape
    places, first = torch.arange(size, device=mask.device), max(0, length - (stop - start))
    step = max(1, _ROWS // size)
    for low in range(first, length, step):
        high = min(low + step, length)
        last = torch.arange(low, high, device=mask.device)[:, None] + stop - length
        rule = (places >= start) & (places <= last)
        if not torch.equal(_visible(mask[low:high]), rule):
            return False
    return True
