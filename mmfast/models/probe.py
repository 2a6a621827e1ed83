"""Attention scores without eager attention: sdpa stays sdpa, flash stays flash.

While at least one module is intercepted, every attention function it can reach is wrapped in
place, under its own name: the functions of transformers' attention interface, and the
module-local `eager_attention_forward` of the modelling files involved, which the interface takes
as its default. The wrapper looks for a gate on the calling module and otherwise only passes on,
so other models and threads see no difference.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from mmfast.core.errors import ModelError
from mmfast.models.levels import Levels
from mmfast.models.scores import last_query_scores, received

__all__ = ["Around", "Hook", "intercepting", "last_query_scores", "probing", "received"]

# (module, q [B, H, L, d], k [B, Hkv, S, d], v, mask, scaling, is_causal): q and k are rotated and
# k, v hold the cached tokens too. With `levels` one more: the log-sum-exp [B, H, L] or None.
Hook = Callable[..., None]
# (next, module, q, k, v, mask, *args, **kwargs) -> what `next` returns; may change any argument.
Around = Callable[..., tuple[Tensor, Tensor | None]]

_GATE = "_mmfast_gate"
_LOCK = threading.RLock()
_restore: list[Callable[[], None]] = []
_active = 0


@contextmanager
def probing(hooks: Mapping[nn.Module, Hook], levels: bool = False) -> Iterator[None]:
    """Call a hook whenever one of these attention modules computes attention.

    Re-entrant and thread-safe: several probes may watch one module, and the attention functions
    are restored when the last one leaves, also after an exception.

    Args:
        hooks: Attention module to hook. A hook sees the queries `[B, H, L, d]` and the keys and
            values `[B, Hkv, S, d]` that are really attended, and the mask as the function got it:
            None, bool or additive `[B, 1, L, S]`, `[B, S]` under flash, a BlockMask under flex.
        levels: Call them after the attention, with the log-sum-exp of every query as one argument
            more, None where the attention function does not tell it.

    Raises:
        ModelError: A module does not go through transformers' attention interface.
    """
    arounds = {module: partial(_observe, hook, levels) for module, hook in hooks.items()}
    with intercepting(arounds, innermost=True):
        yield


@contextmanager
def intercepting(arounds: Mapping[nn.Module, Around], innermost: bool = False) -> Iterator[None]:
    """Run a function around the attention of these modules; it may change every argument.

    Args:
        arounds: Attention module to `around(next, module, q, k, v, mask, *args, **kwargs)`; the
            one that entered last is outermost.
        innermost: Stand inside all others instead, to see what is really computed.

    Raises:
        ModelError: A module does not go through transformers' attention interface.
    """
    spaces = [_namespace(module) for module in arounds]
    with _LOCK:
        _enter(spaces)
        for module, around in arounds.items():
            gate = module.__dict__.get(_GATE, ())
            module.__dict__[_GATE] = (around, *gate) if innermost else (*gate, around)
    try:
        yield
    finally:
        with _LOCK:
            for module, around in arounds.items():
                _remove(module, around)
            _leave()


def _remove(module: nn.Module, around: Around) -> None:
    gate = list(module.__dict__.get(_GATE, ()))
    last = next(i for i in reversed(range(len(gate))) if gate[i] is around)
    del gate[last]
    if gate:
        module.__dict__[_GATE] = tuple(gate)
    else:
        del module.__dict__[_GATE]


def _observe(
    hook: Hook, levels: bool, call: Around, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    query, key, value, mask = args[:4] if len(args) > 3 else (*args, kwargs.get("attention_mask"))
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    length = query.shape[2]
    if mask is None and causal and 1 < length < key.shape[2] and not _is_flash(module):
        # An empty static cache: sdpa reads only the slots that are filled, so show only those.
        hook_kv = (key[:, :, :length], value[:, :, :length])
    else:
        hook_kv = (key, value)
    seen = (module, query, *hook_kv, mask, kwargs.get("scaling"), causal)
    if not levels or torch.compiler.is_compiling():
        hook(*seen)
        return call(module, *args, **kwargs)
    with Levels() as found:
        output = call(module, *args, **kwargs)
    hook(*seen, found.of(query) if kwargs.get("position_bias") is None else None)
    return output


def _is_flash(module: nn.Module) -> bool:
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return "flash" in str(name)


def _namespace(module: nn.Module) -> dict[str, Any]:
    """Globals of the file that defines the module's forward: where it finds its functions."""
    space: dict[str, Any] = inspect.unwrap(type(module).forward).__globals__
    if not isinstance(space.get("ALL_ATTENTION_FUNCTIONS"), AttentionInterface):
        raise ModelError(
            f"{type(module).__name__} does not use transformers' attention interface, so its "
            "attention cannot be observed; give the attention module of a model that does"
        )
    return space


def _wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    def gated(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = function
        for around in module.__dict__.get(_GATE, ()):
            call = partial(around, call)
        return call(module, *args, **kwargs)

    gated.__dict__["_mmfast_wraps"] = function
    return gated


def _enter(spaces: list[dict[str, Any]]) -> None:
    """Wrap what is not wrapped yet: functions may have been registered since the last entry."""
    global _active
    _active += 1
    shared = AttentionInterface()
    for name in list(shared):
        _swap(partial(_lookup, shared, name), partial(AttentionInterface.register, name))
    for space in spaces:
        for name in [n for n in space if n.endswith("eager_attention_forward")]:
            _swap(partial(_lookup, space, name), partial(space.__setitem__, name))
        own = space["ALL_ATTENTION_FUNCTIONS"]  # may override a function for its file alone
        for name in [n for n in own if own[n] is not shared[n]]:
            _swap(partial(_lookup, own, name), partial(own.__setitem__, name))


def _lookup(table: Mapping[str, Any], name: str) -> Any:
    return table[name]


def _swap(get: Callable[[], Any], put: Callable[[Any], None]) -> None:
    function = get()
    if not callable(function) or hasattr(function, "_mmfast_wraps"):
        return
    wrapper = _wrap(function)
    put(wrapper)

    def restore() -> None:
        if get() is wrapper:  # else someone replaced it since; theirs stays
            put(function)

    _restore.append(restore)


def _leave() -> None:
    global _active
    _active -= 1
    if _active == 0:
        while _restore:
            _restore.pop()()
