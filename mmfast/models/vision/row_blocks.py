"""Packed towers in blocks of rows that stay in a processor's cache: a part of `encoder="fast"`.

Stock towers turn queries and keys in seven passes, normalise in five and gate in two, over tensors
that no cache holds. Here a block of rows goes through all of them while it lies there.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from mmfast.models.families.tower import NORMS, Tower, part_of
from mmfast.models.patching import override

_ROTARY = "apply_rotary_pos_emb_vision"  # in the modules of transformers whose towers are packed
_NUMBERS = 1 << 17  # of a block that is turned or normalised: half a megabyte in float32
_ROWS = 1024  # of a block that is multiplied: fewer would read the weights too often
Call = Callable[..., Any]


@contextmanager
def in_blocks(tower: Tower) -> Iterator[None]:
    """Compute what depends on one row alone block by block, while this tower runs on a CPU."""
    if not tower.packed or not len(tower.blocks):
        yield
        return
    with ExitStack() as stack:
        for block in tower.blocks:
            parts = dict.fromkeys((part_of(block, names) for names in NORMS.values()), _normed)
            parts[part_of(block, ["mlp"])] = partial(_by_rows, _ROWS)
            parts.pop(None, None)  # what this tower calls otherwise
            for part, around in parts.items():
                stack.enter_context(override(part, "forward", around))
        module = sys.modules[type(tower.blocks[0]).__module__]
        function = getattr(module, _ROTARY, None)
        if function is not None and turns_halves(inspect.unwrap(function)):
            running = threading.local()  # the function is that of every tower of the kind
            stack.enter_context(override(module, _ROTARY, partial(_turned, running)))
            stack.enter_context(override(tower.module, "forward", partial(_run, running)))
        yield


@lru_cache
def turns_halves(function: Callable[..., Any]) -> bool:
    """Return whether a function of transformers turns as `turn` does: some turn pairs, or parts."""
    with torch.no_grad():
        q = torch.arange(16, dtype=torch.float32, device="cpu").view(2, 1, 8)
        k, angles = q.sin(), q[:, 0].sqrt()
        cos, sin = angles.cos(), angles.sin()
        found = function(q, k, cos, sin)
        return all(map(torch.equal, found, (turn(x, cos, sin) for x in (q, k))))


def _run(running: Any, call: Call, *args: Any, **kwargs: Any) -> Any:
    before = getattr(running, "now", False)
    running.now = not torch.is_grad_enabled()
    try:
        return call(*args, **kwargs)
    finally:
        running.now = before


def _turned(
    running: Any, call: Call, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    plain = q.ndim == 3 and cos.ndim == 2 and q.device.type == "cpu"
    if not plain or not getattr(running, "now", False):
        return call(q, k, cos, sin)  # type: ignore[no-any-return]
    cos, sin = cos.float(), sin.float()
    return turn(q, cos, sin), turn(k, cos, sin)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of `x` `[S, H, d]` by `cos` and `sin` `[S, d]` (float32), as `x`.

    Every number is rounded as by transformers' function, so none differs.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    half = x.shape[-1] // 2
    rows = max(1, _NUMBERS // max(1, x.shape[1] * x.shape[2]))
    parts = (each.split(rows) for each in (x, cos[:, None], sin[:, None], out))
    for part, c, s, target in zip(*parts, strict=True):
        wide = part.float()
        found = wide * c
        found[..., :half].sub_(wide[..., half:] * s[..., :half])
        found[..., half:].add_(wide[..., :half] * s[..., half:])
        target.copy_(found)
    return out


def _normed(call: Call, x: Tensor) -> Tensor:
    return _by_rows(max(1, _NUMBERS // x.shape[-1]), call, x)


def _by_rows(rows: int, call: Call, x: Tensor) -> Tensor:
    if torch.is_grad_enabled() or x.ndim != 2 or x.device.type != "cpu" or len(x) <= rows:
        return call(x)  # type: ignore[no-any-return]
    first, *others = x.split(rows)
    found: Tensor = call(first)
    out = torch.empty((len(x), found.shape[-1]), dtype=found.dtype)
    parts = out.split(rows)
    parts[0].copy_(found)
    for part, target in zip(others, parts[1:], strict=True):
        target.copy_(call(part))
    return out
