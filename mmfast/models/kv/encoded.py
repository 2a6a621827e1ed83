"""A KV policy on an encoder-decoder: what stays of the keys and values of what its encoder read.

In its first pass the decoder computes keys and values of everything that the encoder has written,
and every later step reads them all. A policy acts on them once, behind that pass, by the queries of
the decoder's prompt. What the decoder itself writes is a cache of its own, on which none acts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

from mmfast.caches.plan import CachePlan
from mmfast.caches.store import leave
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import Method, methods
from mmfast.core.spec import AUTO
from mmfast.core.tokens import Tokens
from mmfast.core.trace import Row, Trace
from mmfast.models.cache_name import cache_of
from mmfast.models.kv.eviction import hidden, signals_of
from mmfast.models.kv.notes import COUNTED, TEXT, TOTAL, VISUAL, WINDOW
from mmfast.models.reduction.attendance import refuse_export, refuse_replaced
from mmfast.models.reduction.probe import HIDDEN, bias_of, head_mass, intercepting
from mmfast.models.wrappers import base_of, decoder_of

_NAMES = ("encoder_attn", "EncDecAttention", "cross_attn")
_READ = {"x", "values", "kind", "layer", "attn_window", "attn_counted", "attn_sum"}
_LEFT = "_mmfast_left"  # of a cache layer: what a policy has left of it


def cross_attention(model: Any) -> dict[int, nn.Module]:
    """Attention modules that read what an encoder has written, by decoder layer.

    Empty for a model that is no encoder-decoder, or names them otherwise.
    """
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {}
    named = decoder_of(model).named_modules() if hasattr(model, "get_decoder") else ()
    found = [module for name, module in named if name.rpartition(".")[2] in _NAMES]
    return {int(module.layer_idx): module for module in found if hasattr(module, "layer_idx")}


def _named(modules: Mapping[int, nn.Module]) -> dict[str, nn.Module]:
    return {f"cross-attention of decoder layer {index}": each for index, each in modules.items()}


def check_encoded(
    model: Any, specs: Any, plan: CachePlan | None, others: Mapping[str, Any]
) -> None:
    """Refuse all but a policy that reads keys, values and attention of a whole prompt.

    `others` are further options of `attach`, by name.
    """
    name = type(model).__name__
    given = [f"reduce '{specs if specs == AUTO else specs[0]}'"] if specs else []
    given += [f"{option}={value!r}" for option, value in others.items() if value is not None]
    if given:
        raise ModelError(
            f"{given[0]} does not act in {name}, an encoder-decoder; cache='snapkv:0.25' does, on "
            "what its decoder reads of the encoder"
        )
    if plan is not None and (plan.every or not all(_able(spec.method) for spec in plan.parts)):
        able = ", ".join(method.name for method in methods("cache") if _able(method))
        raise SpecError(
            f"cache '{plan}' cannot act in {name}, whose decoder reads an encoder: all of it comes "
            f"at once and nothing follows; policies that can, without every=: {able}"
        )


def _able(method: Method) -> bool:
    fits = method.role in ("position", "score") and set(method.needs) <= _READ
    return fits and not method.uneven and not {"high", "low"} <= method.knobs.keys()


@dataclass(frozen=True)
class _Remainder:
    """All of a layer, or the entries that are left of it, in rows that are padded in front."""

    all: bool
    valid: Tensor | None = None  # `[B, m]`, False at padding

    def mask(self, module: nn.Module, query: Tensor, given: Any) -> Any:
        """Return the mask of a later step, for which stock code made one of all entries."""
        if self.all:
            return given
        if self.valid is None:
            return None
        return hidden(module, query, None, self.valid[:, None, None])


class _Call(threading.local):
    """The cache of the module that a thread is in, and what was done to layers of a prompt."""

    cache: Any = None
    done: tuple[tuple[float, ...], ...] = ()  # entries before and after, milliseconds, bytes


class EncodedStage:
    """Hooks of a policy on one encoder-decoder; traces a row `kv` per prompt."""

    def __init__(self, model: Any, plan: CachePlan, trace: Trace) -> None:
        self._plan, self._trace = plan, trace
        self._model, self._modules = model, cross_attention(model)
        self._kind = TEXT if model.main_input_name == "input_ids" else VISUAL
        self._call = _Call()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hooks in, hooks out."""
        arounds: dict[nn.Module, Any] = {
            module: torch.compiler.disable(partial(self._attend, index))
            for index, module in self._modules.items()
        }
        begin: Any = torch.compiler.disable(self._begin)
        with ExitStack() as stack:
            base = base_of(self._model)
            stack.enter_context(base.register_forward_pre_hook(refuse_export))
            stack.enter_context(base.register_forward_pre_hook(begin, with_kwargs=True))
            for index, module in self._modules.items():
                enter: Any = torch.compiler.disable(partial(self._enter, index))
                stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            stack.enter_context(intercepting(arounds))
            yield

    def _begin(self, base: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Before a prompt, refuse a decoder that reads by other modules than those hooked."""
        cache = cache_of(kwargs)
        read = isinstance(cache, EncoderDecoderCache) and cache.cross_attention_cache.layers
        if not any(hasattr(layer, _LEFT) for layer in read or ()):
            refuse_replaced(base, _named(self._modules), _named(cross_attention(self._model)))

    def _enter(self, index: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._trace.calls += index == min(self._modules)
        self._call.cache = cache_of(kwargs)
        if kwargs.get("output_attentions"):
            raise ModelError(
                f"cache '{self._plan}' leaves fewer entries than output_attentions=True, or "
                "timestamps of words, need; leave one of the two out"
            )

    def _attend(
        self,
        index: int,
        call: Any,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        mask, cache = attention_mask, self._call.cache
        if isinstance(cache, EncoderDecoderCache):
            layer = cache.cross_attention_cache.layers[index]
            left = getattr(layer, _LEFT, None)
            if left is None:
                self._evict(layer, index, query, mask, kwargs.get("scaling"))
            else:
                mask = left.mask(module, query, mask)
        elif query.shape[2] > 1:  # one token alone: Whisper asks for the language so
            self._trace.warn(
                f"cache {self._plan} did nothing: this call keeps no keys and values of what the "
                "encoder read (use_cache=False); leave cache= out here"
            )
        return call(module, query, key, value, mask, *args, **kwargs)

    def _evict(
        self, layer: Any, index: int, query: Tensor, mask: Any, scaling: float | None
    ) -> None:
        """Choose from a layer, whose attention at hand goes on with all of it."""
        if type(layer) is not DynamicLayer:
            raise ModelError(
                f"cache '{self._plan}' cannot thin a {type(layer).__name__} of an encoder-decoder; "
                "leave out cache_implementation=, or cache= of attach()"
            )
        start, seen = time.perf_counter(), (query, layer.keys, mask, scaling)
        where = _real(query, layer.keys, mask)
        chosen = [self._chosen(layer, index, row, mine, seen) for row, mine in enumerate(where)]
        whole = all(each.pure and each.m == each.n for each in chosen)
        if not whole:
            left = leave(layer.keys, layer.values, {}, where, chosen)
            (layer.keys,), (layer.values,) = left.kv.keys, left.kv.values
        setattr(layer, _LEFT, _Remainder(whole, None if whole else left.valid))
        self._count(index, chosen, time.perf_counter() - start, layer)

    def _chosen(
        self,
        layer: Any,
        index: int,
        row: int,
        where: Tensor,
        seen: tuple[Tensor, Tensor, Any, float | None],
    ) -> Reduction:
        """Let the policy choose among the entries `where` of a row, by queries `[B, H, L, d]`."""
        keys, values = (each[row].index_select(1, where) for each in (layer.keys, layer.values))
        query, key, mask, scaling = seen
        every = torch.arange(query.shape[2], device=key.device)
        last = every[max(0, len(every) - max(1, self._plan.window)) :]
        rows = (query, key, row), (mask, scaling, False)
        notes = {
            note: head_mass(*rows[0], places, *rows[1], counted=note == COUNTED)
            for need, note, places in (
                ("attn_window", WINDOW, last),
                ("attn_counted", COUNTED, last),
                ("attn_sum", TOTAL, every),
            )
            if need in self._plan.needs
        }
        notes = {name: note.index_select(-1, where) for name, note in notes.items()}
        signals = signals_of(values, torch.full_like(where, self._kind), notes)
        return self._plan.reduce(Tokens(keys, signals=signals | {"layer": torch.tensor(index)}))

    def _count(self, index: int, chosen: list[Reduction], seconds: float, layer: Any) -> None:
        """Note what was done to a layer; behind the last one, trace it."""
        before, after = sum(each.n for each in chosen), sum(each.m for each in chosen)
        mine = before, after, seconds * 1e3, layer.keys.nbytes + layer.values.nbytes
        earlier = () if index == min(self._modules) else self._call.done
        self._call.done = (*earlier, mine)
        if index == max(self._modules):
            before, after, ms, held = (sum(each) for each in zip(*self._call.done, strict=True))
            before, after = (round(each / len(self._modules)) for each in (before, after))
            row = Row("kv", before, after, ms, int(held), str(self._plan))
            self._trace.rows.append(row)


def _real(query: Tensor, key: Tensor, mask: Any) -> list[Tensor]:
    """Places `[n_b]` of each row of keys `[B, H, n, d]` that a mask does not hide."""
    every = torch.arange(key.shape[2], device=key.device)
    last = every.new_tensor([query.shape[2] - 1])
    bias = bias_of(mask, query, key, last, is_causal=False)
    if bias is None:
        return [every] * len(key)
    seen = (bias[:, 0, -1] > HIDDEN / 2).expand(len(key), -1)
    return [every[row] for row in seen]
