"""Name under which models take and return their cache: `cache`, `past_key_values` of old.

transformers 5.24 renamed the argument of every forward and the field of every output. It still
takes the old name, with a warning, and older releases know the old one alone. Calls of a model are
written `**{CACHE: cache}`; hooks, which may see what a user wrote, read with `cache_of`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.masking_utils import create_causal_mask

from mmfast.core.errors import ModelError

RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))  # of transformers
NEW, OLD = "cache", "past_key_values"
CACHE = NEW if NEW in inspect.signature(create_causal_mask).parameters else OLD


def name_in(arguments: Mapping[str, Any]) -> str:
    """Return the name of the cache among arguments or parameters; the installed one if none."""
    return OLD if CACHE not in arguments and OLD in arguments else CACHE


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call; None where it has none."""
    found = arguments.get(CACHE)
    return arguments.get(OLD) if found is None else found


def layered_cache_of(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call, as `cache_of` does.

    Raises:
        ModelError: It has no layers: a tuple of old releases, or two caches in one.
    """
    found = arguments.get(CACHE)
    found = arguments.get(OLD) if found is None else found  # each decoding step comes by: no call
    if found is not None and not hasattr(found, "layers"):
        raise ModelError(
            f"{CACHE}= is of type {type(found).__name__}, which has no layers of keys and values; "
            "pass DynamicCache(config=model.config), or leave it out"
        )
    return found


def returned_cache(output: Any) -> Any:
    """Return the cache of a model's output; None where it has none."""
    return getattr(output, CACHE, None)
