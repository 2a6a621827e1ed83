"""Passes of a model over the tokens behind a prompt that stock `generate` has prepared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from mmfast.core.errors import ModelError, an
from mmfast.models.cache_name import CACHE, RELEASE
from mmfast.models.reduction.cache_layers import adopt, is_short, plain_kind
from mmfast.models.reduction.call import is_static

_SHOWS_ALL = RELEASE < (5, 18)
# Arguments of the prompt's length: the model reads those of the new tokens alone.
_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class VisibleWindow:
    """Mixed into sliding windows that record: attention gets the states that its mask covers.

    Up to transformers 5.17 it gets all, which are more where reads follow each other.
    """

    def update(self, key_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Store new keys and values; returns those that new tokens see."""
        shown = self.sliding_window - 1 + key_states.shape[-2]  # type: ignore[attr-defined]
        found = super().update(key_states, *args, **kwargs)  # type: ignore[misc]
        return tuple(each[:, :, -shown:] for each in found)


def refuse_uncroppable(cache: Any, model: Any) -> None:
    """Refuse a cache that cannot take drafts back (ModelError)."""
    # A static cache of transformers 5.24 gives tokens back, but not those off a tree's path.
    if cache is not None and cache.is_croppable and not is_static(cache):
        return
    if any(isinstance(each, LinearAttentionLayer) for each in getattr(cache, "layers", ())):
        raise ModelError(
            "decode= takes drafts back, which the recurrences of "
            f"{type(model).__name__} cannot; leave it out"
        )
    raise ModelError(
        f"decode= takes drafts back, which {an(type(cache).__name__)} cannot; leave out "
        "cache_implementation, or pass DynamicCache(config=model.config)"
    )


class SequenceReader:
    """One model, one cache and the tokens of a batch behind its prompt.

    All rows hold equally many new tokens, `held`, and go back together: caches stay rectangular,
    so that sliding windows, convolutions and M-RoPE see what they see in one-token decoding.
    Positions are given explicitly, as those on the model belong to the prompt it read last.

    Args:
        model: A stock model with a head.
        kwargs: Arguments of the prompt, as `generate` prepares them for a decoding loop.
        cache: The cache with the prompt in it; ModelError where it cannot give tokens back.
    """

    def __init__(self, model: Any, kwargs: Mapping[str, Any], cache: Any) -> None:
        self.model, self.cache, self.held = model, cache, 0
        self._kwargs = dict(kwargs)
        self._kwargs.pop(CACHE, None)
        mask = self._kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and bool(mask.all()):  # `generate` drops it from 5.23 on
            del self._kwargs["attention_mask"]
        refuse_uncroppable(cache, model)
        cache.activate_past_recording()
        for index, layer in enumerate(cache.layers if _SHOWS_ALL else ()):
            if getattr(layer, "is_sliding", False) and not isinstance(layer, VisibleWindow):
                adopt(cache, index, VisibleWindow)

    @torch.no_grad()
    def read(self, tokens: Tensor, depths: Tensor | None = None, mask: Any = None) -> Tensor:
        """Read tokens `[B, n]` into the cache; returns their logits `[B, n, V]` float32.

        `depths` `[n]` are positions counted from the first of them, and `mask` the attention mask
        `[1, 1, n, S]`, where they are no plain sequence.
        """
        return self.run(tokens, depths, mask)

    def beside(self, cache: Any) -> SequenceReader:
        """Return a reader of the same prompt over another cache, which holds that prompt alone."""
        return SequenceReader(self.model, self._kwargs, cache)

    def run(self, tokens: Tensor, depths: Tensor | None = None, mask: Any = None) -> Tensor:
        """Read as `read` does, with gradients where they are enabled."""
        count = tokens.shape[1]
        kwargs = self._grown(count, depths)
        if mask is not None:
            kwargs["attention_mask"] = mask
        inputs = self.model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=count,
            **{CACHE: self.cache},
            is_first_iteration=False,
            **kwargs,
        )
        if "logits_to_keep" in self._kwargs:
            inputs["logits_to_keep"] = count
        out = self.model(**inputs, return_dict=True)
        self.held += count
        logits: Tensor = out.logits[:, -count:].to(dtype=torch.float32, device=tokens.device)
        return logits

    def rewind(self, held: int) -> None:
        """Go back to the first `held` new tokens; call it after every `read`.

        Windows and convolutions keep all they read until then.
        """
        self.cache.crop(held - self.held)
        self.held = held

    def keep_path(self, path: Sequence[int], width: int) -> None:
        """Keep of the last `width` tokens those at `path`, ascending, in full-attention layers."""
        for layer in self.cache.layers:
            start = layer.keys.shape[2] - width
            where = torch.tensor([*range(start), *(start + p for p in path)])
            where = where.to(layer.keys.device)
            layer.keys = layer.keys.index_select(2, where)
            layer.values = layer.values.index_select(2, where)
        self.held += len(path) - width

    def tree_mask(self, seen: Tensor) -> Tensor:
        """Attention mask `[1, 1, n, S]` of n tokens that see all that is held, but for the last m.

        Of the m - n tokens held last, and of each other, they see what `seen` `[n, m]` bool says.
        """
        held = max(int(layer.keys.shape[2]) for layer in self.cache.layers)
        mask = F.pad(seen, (held + len(seen) - seen.shape[1], 0), value=True)[None, None]
        mask = mask.to(self.model.device)
        if self._attention != "eager":
            return mask
        kind = self.model.dtype  # masks that are added
        return torch.zeros(mask.shape, dtype=kind, device=mask.device).masked_fill(
            ~mask, torch.finfo(kind).min
        )

    @property
    def _attention(self) -> Any:
        return getattr(self.model.config.get_text_config(), "_attn_implementation", None)

    @property
    def plain(self) -> bool:
        """All layers hold the whole sequence, unpadded, so that a pass may read a tree."""
        return self._even and not any(is_short(layer) for layer in self.cache.layers)

    @property
    def even(self) -> bool:
        """All layers hold equally many tokens, unpadded, so that a draft may be a tree."""
        lengths = {layer.keys.shape[2] for layer in self.cache.layers} if self._even else {}
        ragged = any(getattr(layer, "valid", None) is not None for layer in self.cache.layers)
        return len(lengths) == 1 and not ragged

    @property
    def whole(self) -> bool:
        """All layers hold the whole sequence, which may be padded."""
        return all(
            plain_kind(layer) is DynamicLayer and not is_short(layer) for layer in self.cache.layers
        )

    @property
    def prompt_mask(self) -> Tensor | None:
        """The attention mask `[B, P]` of the prompt; None where nothing is padded."""
        mask: Tensor | None = self._kwargs.get("attention_mask")
        return mask

    @property
    def _even(self) -> bool:
        config = self.model.config.get_text_config()
        return (
            self._attention in ("sdpa", "eager")
            and self._kwargs.get("attention_mask") is None
            and all(plain_kind(layer) is DynamicLayer for layer in self.cache.layers)
            and not getattr(config, "sliding_window", None)
            and not getattr(config, "alibi", config.model_type == "bloom")  # of plain sequences
        )

    def _grown(self, count: int, depths: Tensor | None) -> dict[str, Any]:
        """Arguments of the next `count` tokens."""
        kwargs, held = dict(self._kwargs), self.held
        mask = kwargs.get("attention_mask")
        if mask is not None:
            kwargs["attention_mask"] = torch.cat(
                [mask, mask.new_ones(len(mask), held + count)], dim=1
            )
        positions = kwargs.get("position_ids")
        if positions is not None:
            steps = torch.arange(count) if depths is None else depths
            steps = steps.to(positions.device, positions.dtype)
            kwargs["position_ids"] = positions[..., -1:] + 1 + held + steps
        for name in _TYPES:
            types = kwargs.get(name)
            if types is not None:
                kwargs[name] = types.new_zeros(*types.shape[:-1], count)
        return kwargs
