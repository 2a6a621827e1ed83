"""Run code around a method of one object, or before and behind a module, exactly undone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

Undo = Callable[[], None]
_LOCK = threading.RLock()
_MISSING = object()


@contextmanager
def override(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Let `around(next, *args, **kwargs)` answer calls of `owner.name`; the last one is outermost.

    They may leave in any order, as threads do; the instance is as before when the last has left.
    The class is never touched, and the signature stays readable, as `generate` inspects it.
    """
    with _LOCK:
        gate = getattr(owner.__dict__.get(name), "_mmfast_arounds", None)
        if gate is None:
            gate = _install(owner, name)
        gate.append(around)
    try:
        yield
    finally:
        with _LOCK:
            last = next(i for i in reversed(range(len(gate))) if gate[i] is around)
            del gate[last]
            if not gate:
                _uninstall(owner, name, gate)


def _install(owner: Any, name: str) -> list[Callable[..., Any]]:
    stock = getattr(owner, name)
    gate: list[Callable[..., Any]] = []

    @functools.wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = stock
        for around in tuple(gate):
            run = functools.partial(around, run)
        return run(*args, **kwargs)

    call.__dict__["_mmfast_arounds"] = gate
    call.__dict__["_mmfast_before"] = owner.__dict__.get(name, _MISSING)
    owner.__dict__[name] = call
    return gate


def _uninstall(owner: Any, name: str, gate: list[Callable[..., Any]]) -> None:
    call = owner.__dict__.get(name)
    if getattr(call, "_mmfast_arounds", None) is not gate:
        return  # replaced by other code meanwhile, which stays
    before = call.__dict__["_mmfast_before"]
    if before is _MISSING:
        del owner.__dict__[name]
    else:
        owner.__dict__[name] = before


def stand_before(module: nn.Module, hook: Callable[..., Any], key: str | None = None) -> Undo:
    """Register a forward pre-hook `(module, args, kwargs)` under a name; returns its removal.

    torch numbers hooks, and compiled code asks for the numbers it has seen: a model that is
    attached again would be compiled again. A name stays the same; without one, or where it is
    taken, torch numbers the hook.
    """
    handle = RemovableHandle(
        module._forward_pre_hooks, extra_dict=module._forward_pre_hooks_with_kwargs
    )
    return _stand(handle, module._forward_pre_hooks, hook, key)


def stand_behind(
    module: nn.Module, hook: Callable[..., Any], key: str | None = None, always: bool = False
) -> Undo:
    """Register a forward hook `(module, args, kwargs, output)`; `always`: also after exceptions."""
    kinds = [module._forward_hooks_with_kwargs]
    if always:
        kinds.append(module._forward_hooks_always_called)
    handle = RemovableHandle(module._forward_hooks, extra_dict=kinds)
    return _stand(handle, module._forward_hooks, hook, key)


def _stand(handle: Any, hooks: dict[Any, Any], hook: Any, key: str | None) -> Undo:
    if key is not None and key not in hooks:
        handle.id = key
    for table in handle.extra_dict_ref:  # first: other threads may call the hook at once
        table()[handle.id] = True
    hooks[handle.id] = hook
    undo: Undo = handle.remove
    return undo
