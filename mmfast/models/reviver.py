"""Decode steps in which dropped tokens come back; see lazy.py."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.core.trace import Trace
from mmfast.models.lazy import Store
from mmfast.models.lengths import held
from mmfast.models.scores import last_query_scores


@dataclass
class _Back:
    """Tokens that come back in this step, beside the new one."""

    count: int
    embeddings: tuple[Tensor, ...]
    mask: Tensor


class _Local(threading.local):
    stack: ExitStack | None = None
    scores: Tensor | None = None
    back: _Back | None = None


class Reviver:
    """Decode steps of a model with a reviving cut.

    Args:
        layer: Decoder layer of the cut.
        text: The text model.
        trace: Gets a row `revive` per step in which tokens come back.
    """

    def __init__(self, layer: int, text: Any, trace: Trace) -> None:
        kind = text.config._attn_implementation
        types = set((getattr(text.config, "layer_types", None) or ())[layer:])
        if types - {"full_attention"}:
            raise ModelError(
                f"lazyllm puts tokens back into full attention, and decoder layers from {layer} on "
                f"are {', '.join(sorted(types))}; use fastv"
            )
        if kind not in ("sdpa", "eager"):
            raise ModelError(
                f"lazyllm makes masks of its own for sdpa and eager attention, not for {kind!r}; "
                "call model.set_attn_implementation('sdpa')"
            )
        self._layer, self._text, self._trace = layer, text, trace
        self._additive = kind == "eager"
        self._local = _Local()

    def before(self, index: int, module: Any, hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        """Before a decoder layer of a step with one new token.

        Returns:
            The input of the layer with the tokens that come back, `[1, R + 1, D]`, or None.
        """
        cache: Any = kwargs.get("past_key_values")
        if index < self._layer - 1 or cache is None or len(cache.layers) <= self._layer:
            return None
        store: Store | None = getattr(cache.layers[self._layer], "store", None)
        if store is None:
            return None
        if index == self._layer - 1:
            store.fit(held(cache.layers[self._layer]), held(cache.layers[index]))
            self._watch(module)
            return None
        if index == self._layer:
            hidden = self._choose(store, cache, hidden, kwargs["position_embeddings"])
        back = self._local.back
        if back is None:
            return None
        cache.layers[index].dropped -= back.count
        kwargs["position_embeddings"], kwargs["attention_mask"] = back.embeddings, back.mask
        kwargs["position_ids"] = None
        return hidden

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the last decoder layer: only the new token goes on."""
        if self._local.back is None:
            return None
        self._local.back = None
        if isinstance(output, tuple):
            return (output[0][:, -1:], *output[1:])
        return output[:, -1:]

    def close(self) -> None:
        """The step has ended, perhaps with an exception."""
        local = self._local
        if local.stack is not None:
            local.stack.close()
        local.stack, local.scores, local.back = None, None, None

    def _watch(self, module: Any) -> None:
        from mmfast.models.probe import probing

        self.close()

        def look(owner: Reviver, _: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
            if owner._local.stack is not None:  # else another thread's step
                owner._local.scores = last_query_scores(q, k, rest[0], rest[1])[0]

        self._local.stack = ExitStack()
        self._local.stack.enter_context(probing({module.self_attn: partial(look, self)}))

    def _choose(self, store: Store, cache: Any, hidden: Tensor, embeddings: Any) -> Tensor:
        """Rank again, and put what comes back before the new token."""
        scores = self._local.scores
        self.close()
        assert scores is not None
        chosen = store.wanted(scores)
        now = torch.tensor([held(cache.layers[self._layer - 1]) - 1], device=hidden.device)
        arrived = torch.cat([store.times[chosen], now])
        store.present = torch.cat([store.present, arrived])
        count = len(chosen)
        if not count:
            return hidden
        with self._trace.stage("revive", len(store.times), count):
            rows = zip(store.embeddings, embeddings, strict=True)
            joined = tuple(torch.cat([old[chosen][None], new], 1) for old, new in rows)
            mask = (store.present <= arrived[:, None])[None, None]  # [1, 1, R + 1, P + R + 1]
            if self._additive:
                low = torch.finfo(hidden.dtype).min
                zeros = torch.zeros(mask.shape, dtype=hidden.dtype, device=hidden.device)
                mask = zeros.masked_fill(~mask, low)
            self._local.back = _Back(count, joined, mask)
            return torch.cat([store.hidden[chosen][None], hidden], 1)
