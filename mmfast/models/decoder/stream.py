"""The decoder of a causal language model run piece by piece on embeddings, its state a value.

A step leaves the state it was given as it was, so streams can branch, go back and be batched.
Keys are kept for a window of places, as Moshi's 3000 frames, so that a conversation without end
needs no more memory than one of a window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from mmfast.core.errors import ModelError
from mmfast.ops.stream_cache import StreamKV, advance, empty


class _Call(Cache):  # type: ignore[misc]  # transformers has no types
    """A cache for one call: what comes in is joined to the state, which stays as it is."""

    def __init__(self, state: StreamKV, keep: int | None) -> None:
        super().__init__(layers=[])
        self.old = (state.keys, state.values)
        self.new: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.keep = keep

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer with all that came before."""
        both = []
        for old, new, fresh in zip(self.old, self.new, (key_states, value_states), strict=True):
            whole = torch.cat([old[layer_idx], fresh], dim=2) if old else fresh
            new.append(whole if self.keep is None else whole[:, :, -self.keep :])
            both.append(whole)
        return both[0], both[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Entries so far."""
        return self.old[0][layer_idx].shape[2] if self.old[0] else 0


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
        self.attention = config._attn_implementation
        if self.attention not in ("sdpa", "eager"):
            raise ModelError(
                f"steps of a stream need attention 'sdpa' or 'eager', not {self.attention!r}; "
                "load the model with attn_implementation='sdpa'"
            )

    def start(self, batch: int = 1) -> StreamKV:
        """The state before the first step."""
        return empty(batch, next(self.body.parameters()).device)

    def step(
        self, state: StreamKV, embeds: Tensor, real: Tensor | None = None
    ) -> tuple[StreamKV, Tensor]:
        """Run the tokens `[B, n, D]`; returns the next state and the last hidden states.

        `real` `[B, n]` is False where shorter streams are padded; padding leaves no trace.
        """
        step = advance(state, embeds.shape[1], real, self.window, self.width)
        keep = None if self.window is None else (self.window - 1) * self.width
        call = _Call(state, keep)
        out: Tensor = self.body(
            inputs_embeds=embeds,
            attention_mask=self.mask(step.sees[:, None], embeds.dtype),
            position_ids=step.place.clamp(min=0),
            past_key_values=call,
            use_cache=True,
        ).last_hidden_state
        known = step.known if keep is None else step.known[:, -keep:]
        return StreamKV(tuple(call.new[0]), tuple(call.new[1]), known, step.seen), out

    def mask(self, sees: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn what a token sees, `[B, 1, n, N]` bool, into the mask its attention takes."""
        if self.attention == "sdpa":
            return sees
        return torch.zeros_like(sees, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)
