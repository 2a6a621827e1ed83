"""LoRA adapters of requests over one copy of a model, through peft (ServerlessLoRA, 2505.14468).

The matrices of all adapters lie beside those of the model. A call of the model is told the adapter
of each of its tokens, so that requests of different adapters share passes and steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from mmfast.models.adapters import inject, tuner_layers, unload

_BASE = "__base__"  # peft's name of no adapter
# adapter of each token of the calls that are running; a single one holds for all of them
Names = Sequence[str | None]
_RUNNING: ContextVar[Names] = ContextVar("mmfast_adapters", default=(None,))


@contextlib.contextmanager
def using(names: Names | None = None, rows: Sequence[int] | None = None) -> Iterator[None]:
    """Run calls of the model with these adapters: one per token, or a single one for all.

    None is the model alone. With `rows`, only these tokens run, of `names` or of those running.
    """
    found = _RUNNING.get() if names is None else names
    if len(set(found)) == 1:
        found = found[:1]
    elif rows is not None:
        found = [found[row] for row in rows]
    token = _RUNNING.set(found)
    try:
        yield
    finally:
        _RUNNING.reset(token)


class AdapterSet:
    """The adapters of one model; `keys` are peft's names for them.

    `visual` are those that change how media are encoded.
    """

    def __init__(self, model: Any) -> None:
        self._model, self.keys, self.visual = model, dict[str, str](), set[str]()

    def add(self, name: str, folder: Path) -> None:
        """Put an adapter beside the model; errors as for `load_adapters`."""
        key = f"mmfast{len(self.keys)}_"  # a name with a dot would be none for peft
        inject(self._model, name, folder, key)
        self.keys[name] = key
        known = {*self._model.get_decoder().modules(), self._model.get_output_embeddings()}
        for _, module in tuner_layers(self._model):
            if key not in module.lora_A:
                continue
            if module not in known:
                self.visual.add(name)
            if "forward" not in vars(module):
                vars(module)["forward"] = partial(_forward, module, module.forward, self.keys)

    def close(self) -> None:
        """Leave the model as it was before."""
        if self.keys or "peft_config" in vars(self._model):
            unload(self._model)
        self.keys.clear()
        _SETS.pop(self._model, None)


def _forward(
    module: Any, stock: Callable[..., Tensor], keys: Mapping[str, str], x: Tensor, *args: Any
) -> Tensor:
    """Run a linear layer `[..., D]` with the adapter of each token."""
    names = [_BASE if name is None else keys[name] for name in _RUNNING.get()]
    if len(names) > 1:
        found = stock(x.flatten(0, -2), *args, adapter_names=names)
        return found.view(*x.shape[:-1], -1)
    if names[0] == _BASE:
        base: Tensor = module.base_layer(x, *args)
        return base
    return stock(x, *args, adapter_names=names * len(x))


_SETS: WeakKeyDictionary[Any, AdapterSet] = WeakKeyDictionary()


def adapters_of(model: Any) -> AdapterSet:
    """Return the adapters of a model; an empty set where it has none."""
    return _SETS.get(model) or AdapterSet(model)


def load_adapters(model: Any, folders: Mapping[str, str]) -> AdapterSet:
    """Load the adapters of these folders, by name, beside a model.

    Raises `MmfastError` for a folder without an adapter, and for an adapter of another model; the
    model is then as it was.
    """
    found = AdapterSet(model)
    try:
        for name, folder in folders.items():
            found.add(name, Path(folder).expanduser())
    except BaseException:
        found.close()
        raise
    if folders:
        _SETS[model] = found
    return found
