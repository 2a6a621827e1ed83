"""The decoder of a causal language model run piece by piece on embeddings, its state a value.

A step leaves the state it was given as it was, so streams can branch, go back and be batched.
Keys are kept for a window of places, as Moshi's 3000 frames, so that a conversation without end
needs no more memory than one of a window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.core.kv import KVBlock
from mmfast.models.reduction.cache_layers import Pair, cache_over
from mmfast.ops.stream_cache import advance, empty, within


class StreamDecoder:
    """Steps of a stock decoder (`LlamaModel`, `MoshiModel`, `CsmBackboneModel`, …).

    A token may look back to `window` places, its own included, of `width` tokens each; None for
    all. ModelError where the attention takes no mask of ours, or the window is below 2.
    """

    def __init__(self, body: nn.Module, window: int | None = None, width: int = 1) -> None:
        self.body = body
        self.window, self.width = window, width
        if window is not None and window < 2:
            raise ModelError(f"window={window!r} holds no history; use 2 or more, or None for all")
        config: Any = body.config
        self.layers = int(config.num_hidden_layers)
        self.attention = config._attn_implementation
        if self.attention not in ("sdpa", "eager"):
            raise ModelError(
                f"steps of a stream need attention 'sdpa' or 'eager', not {self.attention!r}; "
                "load the model with attn_implementation='sdpa'"
            )

    def start(self, batch: int = 1) -> KVBlock:
        """The state before the first step."""
        return empty(batch, next(self.body.parameters()).device)

    def step(
        self, state: KVBlock, embeds: Tensor, real: Tensor | None = None
    ) -> tuple[KVBlock, Tensor]:
        """Run the tokens `[B, n, D]`; returns the next state and the last hidden states.

        `real` `[B, n]` is False where shorter streams are padded; padding leaves no trace.
        """
        step = advance(state, embeds.shape[1], real, self.window, self.width)
        kept: list[Pair] = []

        def join(layer: int, keys: Tensor, values: Tensor) -> Pair:
            if state.keys:
                keys = torch.cat([state.keys[layer], keys], dim=2)
                values = torch.cat([state.values[layer], values], dim=2)
            kept.append((keys, values))
            return keys, values

        out: Tensor = self.body(
            inputs_embeds=embeds,
            attention_mask=self.mask(step.sees[:, None], embeds.dtype),
            position_ids=step.place.clamp(min=0),
            past_key_values=cache_over(self.layers, join, lambda _: state.n),
            use_cache=True,
        ).last_hidden_state
        keys, values = zip(*kept, strict=True)
        state = KVBlock(keys, values, step.known, step.seen)
        return within(state, self.window, self.width), out

    def mask(self, sees: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn what a token sees, `[B, 1, n, N]` bool, into the mask its attention takes."""
        if self.attention == "sdpa":
            return sees
        return torch.zeros_like(sees, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)
