"""The decoder of a model, run over rows that each attend to keys and values of their own.

Attention is computed row by row, or by rows that lie in one tensor, through the attention function
of the model. So a pass takes rows of any length, sliding windows, and images that attend forward,
and no mask is made that spans all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mmfast.core.errors import ModelError
from mmfast.models.cache_name import CACHE
from mmfast.models.decoder.early_exit import ExitAdapter
from mmfast.models.decoder.lean import Around, LeanDecoder, lean_decoder
from mmfast.models.patching import override
from mmfast.models.reduction.cache_layers import StoreLayer
from mmfast.models.reduction.probe import intercepting
from mmfast.models.wrappers import CONV, FULL, SLIDING, kind_of


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The attention function of a model in one layer, as a pass got it."""

    module: Any
    stock: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def scaling(self) -> float | None:
        """Factor of the scores; None is the usual one."""
        return self.options.get("scaling")

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with queries `[B, H, n, d]`, keys and values `[B, Hkv, S, d]`: `[B, n, H, d]`.

        The mask `[B, 1, n, S]` is added to the scores, or False at what is not seen; None is
        causal, counted from the end.
        """
        call = self.stock
        step = query.shape[2] == 1
        if (mask is not None or step) and self.name != "eager" and query.device.type == "cpu":
            given = query, key, value, mask
            return self._shared(*given) if step else self._masked(*given)
        if mask is not None and mask.dtype == torch.bool and self.name == "eager":
            mask = added(mask, query.dtype)
        # Of the others none takes any mask, and only flash attention counts from the end.
        plain = mask is None and query.shape[2] > 1 and "flash" in self.name
        if not plain and self.name not in ("sdpa", "eager"):
            call = sdpa_attention_forward
        found: Tensor = call(self.module, query, key, value, mask, *self.args, **self.options)[0]
        return found

    def _masked(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # Its kernel shares keys among heads; transformers would copy them, as for a GPU.
        more: dict[str, Any] = {"scale": self.scaling, "enable_gqa": True}
        seen: Tensor = F.scaled_dot_product_attention(query, key, value, mask, **more)
        return seen.transpose(1, 2)

    def _shared(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with one query a head: those that share keys as rows of one product."""
        rows, heads, _, width = query.shape
        folded = query.reshape(rows, key.shape[1], -1, width)
        seen = F.scaled_dot_product_attention(folded, key, value, mask, scale=self.scaling)
        return seen.reshape(rows, 1, heads, -1)


def added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores, for a mask that is False at what is not seen."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


# (decoder layer, attention, q [B, H, n, d], new k and v [B, Hkv, n, d]) -> [B, n, H, d]
Attend = Callable[[int, AttentionCall, Tensor, Tensor, Tensor], Tensor]


class _LeftError(Exception):
    """A pass ends at the early exit."""


class Lane:
    """The decoder of a model for passes in which every row has keys and values of its own.

    Raises `ModelError` for layers of a kind whose rows cannot be told apart.
    """

    def __init__(self, model: Any) -> None:
        self.decoder, self.output = model.get_decoder(), model.get_output_embeddings()
        config, name = self.decoder.config, type(model).__name__
        self.kinds = tuple(kind_of(config, i) for i in range(len(self.decoder.layers)))
        if other := set(self.kinds) - {FULL, SLIDING, CONV}:
            raise ModelError(f"{name} has layers of kind {', '.join(sorted(other))}")
        self.window = int(config.sliding_window) if SLIDING in self.kinds else 0
        self.name = str(config._attn_implementation)
        layers = enumerate(self.decoder.layers)
        self.modules = {i: each.self_attn for i, each in layers if self.kinds[i] != CONV}
        with intercepting(dict.fromkeys(self.modules.values(), _pass)):
            pass  # a ModelError where the attention cannot be routed
        weight = self.output.weight
        self._stub = torch.zeros(1, 1, 1, 1, dtype=weight.dtype, device=weight.device)
        self._calls: dict[int, AttentionCall] = {}
        self.lean = self._lean() if CONV not in self.kinds else None
        # an early exit, and the states `[B, n, D]` in front of it in the last pass
        self.exit: ExitAdapter | None = None
        self.early: Tensor | None = None
        self._leaves = False

    def _lean(self) -> LeanDecoder | None:
        """Return the lean form of the decoder, and learn how its layers call their attention."""
        calls = self._calls

        def note(index: int, attention: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            calls[index] = attention
            return attention(q, k, v, None)

        def stock(embeds: Tensor, positions: Tensor) -> Tensor:
            return self._stock(note, passing([None] * len(self.kinds)), embeds, positions)

        found = lean_decoder(self.decoder, stock, lambda i, q, k, v: calls[i](q, k, v, None))
        # What a call is given besides must be the same in every pass.
        given = [each for call in calls.values() for each in (*call.args, *call.options.values())]
        return None if any(isinstance(each, Tensor) for each in given) else found

    def run(
        self,
        attend: Attend,
        cache: Cache,
        embeds: Tensor,
        positions: Tensor,
        around: Around | None = None,
        **more: Any,
    ) -> Tensor:
        """Return the last hidden states `[B, n, D]`; positions are `[A, B, n]`.

        `around(layer, next, hidden, …)` answers the calls of all layers.
        """
        if self.exit is not None:
            around = partial(self._note, threading.get_ident(), self.exit.layer, around)
        if self.lean is None or more or not self.lean.free:
            return self._stock(attend, cache, embeds, positions, around, **more)
        calls = self._calls
        given = (lambda i, *heads: attend(i, calls[i], *heads)), embeds, positions
        return self.lean.run(*given, around)

    def leave(self, attend: Attend, cache: Cache, embeds: Tensor, positions: Tensor) -> Tensor:
        """Run the layers in front of the early exit alone; return their states `[B, n, D]`."""
        self._leaves = True
        try:
            self.run(attend, cache, embeds, positions)
        except _LeftError:
            pass
        finally:
            self._leaves = False
        assert self.early is not None
        return self.early

    def _note(
        self,
        thread: int,
        layer: int,
        around: Around | None,
        index: int,
        stock: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        found = (stock if around is None else partial(around, index, stock))(*args, **kwargs)
        if index + 1 == layer and threading.get_ident() == thread:
            self.early = found[0] if isinstance(found, tuple) else found
            if self._leaves:
                raise _LeftError
        return found

    def _stock(
        self,
        attend: Attend,
        cache: Cache,
        embeds: Tensor,
        positions: Tensor,
        around: Around | None = None,
        **more: Any,
    ) -> Tensor:
        thread = threading.get_ident()
        routes = {m: partial(self._route, attend, i, thread) for i, m in self.modules.items()}
        mask: Any = self._stub  # stands for the masks that nobody reads
        if len(set(self.kinds)) > 1:
            mask = {kind: None if kind == CONV else self._stub for kind in self.kinds}
        with ExitStack() as stack:
            stack.enter_context(intercepting(routes))
            if around is not None:
                for index, layer in enumerate(self.decoder.layers):
                    stack.enter_context(override(layer, "forward", partial(around, index)))
            output = self.decoder(
                inputs_embeds=embeds,
                attention_mask=mask,
                position_ids=positions if len(positions) > 1 else positions[0],
                **{CACHE: cache},
                use_cache=True,
                **more,
            )
        found: Tensor = output.last_hidden_state
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[B, V]` float32 of last hidden states `[B, D]`."""
        found: Tensor = self.output(hidden).float()
        cap = getattr(self.decoder.config, "final_logit_softcapping", None)
        return found if cap is None else cap * torch.tanh(found / cap)

    def _route(
        self,
        attend: Attend,
        index: int,
        thread: int,
        call: Callable[..., Any],
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        if threading.get_ident() != thread:  # a pass of another thread
            return call(module, query, key, value, attention_mask, *args, **options)
        if "position_ids" in options:  # flash attention takes a gap for the end of a sequence
            options["position_ids"] = None

        attention = AttentionCall(module, call, self.name, args, options)
        return attend(index, attention, query, key, value), None


def _pass(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


def passing(layers: Sequence[Any | None]) -> Cache:
    """Return a cache that hands on what is new, as `Attend` stores it; convolutions are given."""
    made = [StoreLayer(lambda k, v: (k, v)) if layer is None else layer for layer in layers]
    return Cache(layers=made)
