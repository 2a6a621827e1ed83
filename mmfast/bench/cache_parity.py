"""Drivers that reproduce golden vectors with the cache policies, one function a method.

They read queries and keys of one layer, and find the attention that a policy asks for as a cache
does. Names of parameters are those of the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmfast.caches.plan import CachePlan, plan_cache
from mmfast.core.errors import MmfastError
from mmfast.core.tokens import Tokens
from mmfast.models.reduction.probe import head_mass

Arrays = Mapping[str, Tensor]
Params = Mapping[str, Any]
Outcome = tuple[dict[str, Tensor], list[str]]
Drive = Callable[[Arrays, Params], Outcome]

_POOLS = {"maxpool": "max", "avgpool": "mean"}


def plan_of(spec: str) -> CachePlan:
    """Return the plan of a spec that names a policy."""
    plan = plan_cache(spec)
    assert plan is not None
    return plan


def attention(query: Tensor, keys: Tensor, last: int) -> Tensor:
    """Attention `[H, n]` of the last queries `[Hq, n, d]`, mean over those that share a key head.

    Summed over the queries; an MmfastError says that they are not finite.
    """
    n = keys.shape[1]
    found = head_mass(query[None], keys[None], 0, torch.arange(n - last, n))
    if not bool(found.isfinite().all()):
        raise MmfastError("queries or keys are not finite")
    return found


def _snapkv(arrays: Arrays, params: Params) -> Outcome:
    window, keys = params["window_size"], arrays["keys"]
    knobs = f"window={window}&kernel={params['kernel_size']}&pool={_POOLS[params['pooling']]}"
    votes = attention(arrays["query"], keys, window) / window
    tokens = Tokens(keys, signals={"attn_window": votes})
    return {
        "kept": plan_of(f"snapkv:{params['max_capacity_prompt']}?{knobs}").reduce(tokens).keep
    }, []


_WINDOW = "kernel_size max_capacity_prompt pooling window_size"
# As `DRIVERS` in `parity`, which has these, too.
CACHE_DRIVERS: dict[str, tuple[Drive, str, str]] = {
    "snapkv": (_snapkv, "query keys", _WINDOW),
}
