"""Run code around a method of one object, or before and behind a module, exactly undone."""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mmfast.core.locks import WholeLock

Undo = Callable[[], None]
_LOCK = WholeLock()
_MISSING = object()
# The module of the hooks that transformers leaves on a model for good at its first call with
# `output_hidden_states`, closures that cannot be pickled.
CAPTURING = "transformers.utils.output_capturing"
CANDIDATES = "_get_candidate_generator"  # of GenerationMixin: makes what drafts, of any kind


def on_cpu_by_default(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `run` with tensors on the CPU where it names no device, whatever torch is set to.

    A default device is for what its user makes: tables of a prompt lie on the CPU.
    """
    if torch.compiler.is_compiling() or torch.utils._device.CURRENT_DEVICE is None:
        return run(*args, **kwargs)
    with torch.device("cpu"):
        return run(*args, **kwargs)


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
            run = functools.partial(on_cpu_by_default, around, run)
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
    module: nn.Module,
    hook: Callable[..., Any],
    key: str | None = None,
    always: bool = False,
    first: bool = False,
) -> Undo:
    """Register a forward hook `(module, args, kwargs, output)`; `always`: also after exceptions.

    `first`: it runs before all that are there.
    """
    kinds = [module._forward_hooks_with_kwargs]
    if always:
        kinds.append(module._forward_hooks_always_called)
    handle = RemovableHandle(module._forward_hooks, extra_dict=kinds)
    undo = _stand(handle, module._forward_hooks, hook, key)
    if first:
        hooks: Any = module._forward_hooks  # an ordered dictionary
        hooks.move_to_end(handle.id, last=False)
    return undo


def _stand(handle: Any, hooks: dict[Any, Any], hook: Any, key: str | None) -> Undo:
    if key is not None and key not in hooks:
        handle.id = key
    for table in handle.extra_dict_ref:  # first: other threads may call the hook at once
        table()[handle.id] = True
    hooks[handle.id] = functools.partial(on_cpu_by_default, hook)  # which refuses to be copied
    undo: Undo = handle.remove
    return undo


# Compiled code of a model when it was detached.
_COMPILED: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


@contextmanager
def compiled_again(model: nn.Module) -> Iterator[None]:
    """Forget the code that torch.compile made of a model while it had no hooks.

    Such code does not look for hooks, so it would go on without them. What was compiled under
    earlier hooks asks for those and stays, as long as nothing else was compiled since.
    """
    known = {id(piece) for piece in _COMPILED.get(model, ())}
    if any(id(piece) not in known for piece in _pieces(model)):
        for code in _codes(model):
            torch._C._dynamo.eval_frame.reset_code(code)
    try:
        yield
    finally:
        _COMPILED[model] = _pieces(model)


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model or a part of it is compiled, which changes would compile anew."""
    own = [vars(module) for module in model.modules()]
    whole = any(each.get("_compiled_call_impl") is not None for each in own)
    return whole or any(hasattr(each.get("forward"), "_torchdynamo_orig_callable") for each in own)


def is_hooked(module: nn.Module) -> bool:
    """Return whether somebody sees or changes what a module gives, or has compiled it."""
    own = module.__dict__
    hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
    # Those that capture do nothing within a call that does not ask for it, as that of a batch.
    foreign = any(getattr(hook, "__module__", "") != CAPTURING for hook in hooks)
    return foreign or "forward" in own or own.get("_compiled_call_impl") is not None


def _pieces(model: nn.Module) -> list[Any]:
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    return [entry.code for code in _codes(model) for entry in entries(code)]


def _codes(model: nn.Module) -> list[Any]:
    """Code that torch.compile has seen in the files of the model's classes and decorators."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is None:
        return []
    files = set()
    for cls in {type(module) for module in model.modules()}:
        function: Any = cls.forward
        while function is not None:
            files.add(getattr(getattr(function, "__code__", None), "co_filename", None))
            function = getattr(function, "__wrapped__", None)
    seen = (reference() for reference in compiler.input_codes.seen)
    return [code for code in seen if code is not None and code.co_filename in files]


# The mark by which transformers makes no hooks that capture anew.
_CAPTURED = "_output_capturing_hooks_installed"


def portable_state(owner: Any) -> dict[str, Any]:
    """Return the state of what has a `model` for another process: weights, no hooks of calls."""
    weights = {id(each): each for each in (*owner.model.parameters(), *owner.model.buffers())}
    state: dict[str, Any] = copy.deepcopy(vars(owner), {id(owner): owner, **weights})
    for module in state["model"].modules():
        vars(module).pop(_CAPTURED, None)
        for key, hook in [*module._forward_hooks.items()]:
            if getattr(hook, "__module__", "") == CAPTURING:
                del module._forward_hooks[key]
    return state
