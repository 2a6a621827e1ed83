"""What generating from an evicted cache must equal: the stock layers, one by one, with all entries.

Nothing leaves the oracle's cache. Entries that a policy evicted are hidden from the queries of one
KV head by a mask, merged ones are edited in place, and the model's own layers do the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import model_oracle as oracle
import torch
from torch import Tensor
from transformers import DynamicCache


class Walk:
    """A conversation in the stock decoder layers, with a stock cache.

    Args:
        tiny: The model.
        prompt: Everything that is prefilled.
    """

    def __init__(self, tiny: Any, prompt: oracle.Prompt) -> None:
        self.tiny, self.text = tiny, tiny.model.get_decoder()
        config = self.text.config
        self.kinds = list(getattr(config, "layer_types", None) or ())
        self.kinds = self.kinds or ["full_attention"] * len(self.text.layers)
        self.cache = DynamicCache(config=config)
        self.masks: dict[int, Tensor | None] = {}  # of a step, by layer
        self.position = prompt.positions[..., -1:]
        self.logits = self._through(prompt.embeds, prompt.positions, prompt, {})[-1]

    @property
    def full(self) -> list[int]:
        """Layers of full attention, with keys of their own."""
        modes = self._modes()
        pairs = enumerate(zip(self.kinds, modes, strict=True))
        return [i for i, (kind, mode) in pairs if kind == "full_attention" and mode != "reuse"]

    def step(self, token: int, visible: Mapping[int, Tensor] | None = None) -> Tensor:
        """Logits `[V]` behind one more token.

        Args:
            token: Its id.
            visible: Per layer which entries `[Hkv, n]` its query sees; the rest it sees.
        """
        self.position = self.position + 1
        new = torch.tensor([token])
        embeds = self.tiny.model.get_input_embeddings()(new)
        self.logits = self._through(embeds, self.position, None, visible or {}, new)[-1]
        return self.logits

    def _through(
        self,
        hidden: Tensor,
        positions: Tensor,
        prompt: Any,
        visible: Mapping[int, Tensor],
        new: Tensor | None = None,
    ) -> Tensor:
        sides = None if prompt is None else prompt.sides
        if prompt is None and new is not None:
            sides = oracle.sides_of(self.tiny, new)
        if sides is not None:
            sides = self.text.project_per_layer_inputs(hidden[None], sides[None])
        lent: dict[str, Any] = {}
        places = positions[None] if positions.ndim == 1 else positions[:, None]
        for index, layer in enumerate(self.text.layers):
            kind = self.kinds[index]
            by_kind = [kind] if hasattr(self.text.rotary_emb, "layer_types") else []
            out = layer(
                hidden[None],
                attention_mask=self._mask(index, hidden, prompt, visible.get(index)),
                position_embeddings=self.text.rotary_emb(hidden[None], places, *by_kind),
                past_key_values=self.cache,
                **({} if sides is None else {"per_layer_input": sides[:, :, index]}),
                **({"shared_kv_states": lent} if "gemma4" in self.text.config.model_type else {}),
                **({} if prompt is None else prompt.experts(torch.arange(len(hidden)))),
            )
            hidden = (out[0] if isinstance(out, tuple) else out)[0]
            if prompt is not None and index < len(prompt.planes):
                hidden = hidden + prompt.planes[index]
        norm = self.text.norm if hasattr(self.text, "norm") else self.text.embedding_norm
        return self.tiny.model.lm_head(norm(hidden))

    def _mask(self, index: int, hidden: Tensor, prompt: Any, visible: Tensor | None) -> Any:
        kind, config = self.kinds[index], self.text.config
        if kind in ("conv", "linear_attention"):
            return None
        if prompt is not None:
            n = len(hidden)
            seen = torch.ones(n, n).tril().bool()
            seen |= oracle.forward_of(self.tiny, kind, oracle.blocks(prompt))
            seen |= torch.tensor(self.tiny.facts.prefix)
            if kind == "sliding_attention":
                seen &= torch.ones(n, n).triu(1 - config.sliding_window).bool()
            return self._as_function_wants(seen[None, None], hidden)
        modes = self._modes()
        if modes[index] == "reuse":  # sees what the layer saw that lends its keys
            lenders = [i for i, mode in enumerate(modes) if mode == "store"]
            return next(self.masks[i] for i in lenders if self.kinds[i] == kind)
        self.masks[index] = self._step_mask(index, hidden, visible)
        return self.masks[index]

    def _modes(self) -> Sequence[str | None]:
        """What a layer does with keys of others; before 5.23, the last layers read the last own."""
        config, kinds = self.text.config, self.kinds
        if hasattr(config, "kv_sharing_modes"):
            return config.kv_sharing_modes
        count = getattr(config, "num_kv_shared_layers", 0)
        own = kinds[: len(kinds) - count]
        last = dict.fromkeys({*kinds}, "store") if count else {}
        return [last.pop(kind, None) for kind in own[::-1]][::-1] + ["reuse"] * count

    def _step_mask(self, index: int, hidden: Tensor, visible: Tensor | None) -> Tensor | None:
        if visible is None:
            return None
        config = self.text.config
        heads = config.num_attention_heads // config.num_key_value_heads
        length = self.cache.layers[index].keys.shape[2] + 1
        seen = torch.nn.functional.pad(visible, (0, length - visible.shape[1]), value=True)
        return self._as_function_wants(seen.repeat_interleave(heads, 0)[None, :, None], hidden)

    def _as_function_wants(self, seen: Tensor, hidden: Tensor) -> Tensor:
        if self.text.config._attn_implementation != "eager":
            return seen
        low = torch.finfo(hidden.dtype).min
        return torch.zeros(seen.shape, dtype=hidden.dtype).masked_fill(~seen, low)


def kept(cache: Any, layer: int, n: int, row: int = 0) -> Tensor:
    """Which of the first `n` tokens a layer still holds in each KV head, `[Hkv, n]` bool."""
    held = cache.layers[layer]
    places = held.notes["place"][row].expand(held.keys.shape[1], -1)
    seen = torch.zeros(len(places), n, dtype=torch.bool)
    for head, mine in enumerate(places):
        real = held.notes["kind"][row].expand(len(places), -1)[head] >= 0
        seen[head, mine[real & (mine < n)]] = True
    return seen


def apply(walk: Walk, found: dict[int, Any]) -> dict[int, torch.Tensor]:
    """Edit keys and values by hand; says what each head still sees."""
    visible = {}
    for index, heads in found.items():
        held = walk.cache.layers[index]
        seen = torch.zeros(held.keys.shape[1], held.keys.shape[2], dtype=torch.bool)
        for name in ("keys", "values"):
            whole = getattr(held, name)
            edited = whole.clone()
            for head, answer in enumerate(heads):
                for slot, shares in answer.groups.items():
                    if name == "keys" and answer.own_keys:
                        shares = {slot: 1.0}
                    parts = [share * whole[0, head, source] for source, share in shares.items()]
                    edited[0, head, slot] = sum(parts)
                    seen[head, slot] = True
            setattr(held, name, edited)
        visible[index] = seen
    return visible
