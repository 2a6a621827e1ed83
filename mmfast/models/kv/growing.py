"""A dynamic cache for `generate` that writes new entries behind the old ones.

The stock cache joins old and new entries at every step, which reads and writes all of it: a sixth
of a step behind 16,384 tokens of the 0.5B shape, and nothing to be seen behind a thousand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer

from mmfast.models.cache_name import CACHE, NEW, OLD
from mmfast.models.kv.room import RoomyLayer
from mmfast.models.reduction.cache_layers import adopt

_OTHERS = ("cache_implementation", "prompt_lookup_num_tokens", "assistant_model", NEW, OLD)
_SEVERAL = ("num_beams", "num_return_sequences")


def growing_cache(model: Any, how: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `generate` is to be given beside `how`: a cache that grows in place.

    Nothing where the call or the model wants another cache, with beams, which reorder it at every
    step, and for models that make their own.
    """
    if model.config.is_encoder_decoder or not model._supports_default_dynamic_cache():
        return {}

    def wanted(name: str) -> Any:
        found = how.get(name)
        return getattr(model.generation_config, name, None) if found is None else found

    several = any((wanted(name) or 1) > 1 for name in _SEVERAL)
    if several or any(wanted(n) is not None for n in _OTHERS) or wanted("use_cache") is False:
        return {}
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            adopt(cache, index, RoomyLayer)
    return {CACHE: cache}
