"""The decoder of a causal language model run piece by piece on embeddings, its state a value.

A step leaves the state it was given as it was, so streams can branch, go back and be batched.
Keys are kept for a window of positions, as Moshi's 3000 frames, so that a conversation without
end needs no more memory than one of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from mmfast.core.errors import ModelError


@dataclass(frozen=True, eq=False)
class StreamKV:
    """What a decoder remembers of B streams.

    Attributes:
        keys: Per layer `[B, H, n, d]`; empty before the first step.
        values: Per layer `[B, H, n, d]`.
        place: `[B, n]` int64 position of each entry, -1 where a stream has none.
        seen: `[B]` int64 positions so far.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    place: Tensor
    seen: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


class _Call(Cache):
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

    Args:
        body: The decoder: takes `inputs_embeds`, `attention_mask`, `position_ids`, and calls
            `past_key_values.update`.
        window: Positions that a token may look back to, itself included; None for all.

    Raises:
        ModelError: Its attention takes no mask of ours.
    """

    def __init__(self, body: nn.Module, window: int | None = None) -> None:
        self.body = body
        self.window = window
        config: Any = body.config
        self.attention = config._attn_implementation
        if self.attention not in ("sdpa", "eager"):
            raise ModelError(
                f"steps of a stream need attention 'sdpa' or 'eager', not {self.attention!r}; "
                "load the model with attn_implementation='sdpa'"
            )

    def start(self, batch: int = 1) -> StreamKV:
        """The state before the first step."""
        device = next(self.body.parameters()).device
        none = torch.zeros(batch, 0, dtype=torch.long, device=device)
        return StreamKV((), (), none, none.new_zeros(batch))

    def step(
        self, state: StreamKV, embeds: Tensor, real: Tensor | None = None
    ) -> tuple[StreamKV, Tensor]:
        """Run the next tokens.

        Args:
            state: Of the step before.
            embeds: `[B, n, D]`.
            real: `[B, n]` bool where shorter streams are padded; padding leaves no trace.

        Returns:
            The next state, and the last hidden states `[B, n, D]`.
        """
        batch, n = embeds.shape[:2]
        if real is None:
            real = torch.ones(batch, n, dtype=torch.bool, device=embeds.device)
        place = state.seen[:, None] + real.long().cumsum(1) - 1  # [B, n]
        known = torch.cat([state.place, place.masked_fill(~real, -1)], dim=1)
        call = _Call(state, None if self.window is None else self.window - 1)
        out = self.body(
            inputs_embeds=embeds,
            attention_mask=self._mask(known, place, embeds.dtype),
            position_ids=place.clamp(min=0),
            past_key_values=call,
            use_cache=True,
        ).last_hidden_state
        if self.window is not None:
            known = known[:, -(self.window - 1) :]
        keys, values = tuple(call.new[0]), tuple(call.new[1])
        return StreamKV(keys, values, known, state.seen + real.sum(1)), out

    def _mask(self, known: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
        n = place.shape[1]
        key, query = known[:, None], place[..., None]  # [B, 1, N] and [B, n, 1]
        sees = (key >= 0) & (key <= query)
        if self.window is not None:
            sees &= key > query - self.window
        own = torch.arange(n, device=place.device)
        sees[:, own, own + known.shape[1] - n] = True  # padding sees itself: a row needs something
        mask = sees[:, None]  # [B, 1, n, N]
        if self.attention == "sdpa":
            return mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def merge(old: StreamKV, new: StreamKV, rows: Tensor) -> StreamKV:
    """`new` for some streams (`[B]` bool), `old` for the others."""
    both = stack([old, new])
    pick = torch.arange(len(rows), device=rows.device) + len(rows) * rows
    return take(both, pick)


def stack(states: Sequence[StreamKV]) -> StreamKV:
    """Several states as one batch; shorter ones are padded on the left."""
    longest = max(s.place.shape[1] for s in states)
    layers = max(len(s.keys) for s in states)
    like = next((s for s in states if s.keys), None)

    def join(which: str, layer: int) -> Tensor:
        found = []
        for state in states:
            old: tuple[Tensor, ...] = getattr(state, which)
            assert like is not None
            one = like.keys[layer]
            rows = len(state.seen)
            tensor = old[layer] if old else one.new_zeros(rows, one.shape[1], 0, one.shape[3])
            found.append(F.pad(tensor, (0, 0, longest - tensor.shape[2], 0)))
        return torch.cat(found)

    return StreamKV(
        tuple(join("keys", layer) for layer in range(layers)),
        tuple(join("values", layer) for layer in range(layers)),
        torch.cat([F.pad(s.place, (longest - s.place.shape[1], 0), value=-1) for s in states]),
        torch.cat([s.seen for s in states]),
    )


def take(state: StreamKV, rows: Tensor) -> StreamKV:
    """Some streams of a batch, by number `[b]`; what none of them has is dropped."""
    place = state.place[rows]
    used = (place >= 0).any(0)
    first = int(used.long().argmax()) if bool(used.any()) else place.shape[1]
    return StreamKV(
        tuple(k[rows, :, first:] for k in state.keys),
        tuple(v[rows, :, first:] for v in state.values),
        place[:, first:],
        state.seen[rows],
    )
