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

from mmfast.core.errors import MmfastError

_BASE = "__base__"  # peft's name of no adapter
_MERGE = "a server takes plain LoRA of linear layers; merge the adapter and serve the result"
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
        from peft.tuners.lora import Linear

        key = f"mmfast{len(self.keys)}_"  # a name with a dot would be none for peft
        _inject(self._model, name, folder, key)
        self.keys[name] = key
        known = {*self._model.get_decoder().modules(), self._model.get_output_embeddings()}
        for path, module in _layers(self._model):
            if key in module.lora_embedding_A or key in module.lora_variant:
                raise MmfastError(f"adapter {name!r} changes {path} otherwise: {_MERGE}")
            if key not in module.lora_A:
                continue
            if not isinstance(module, Linear):
                raise MmfastError(f"adapter {name!r} changes {path}, no linear layer: {_MERGE}")
            if module not in known:
                self.visual.add(name)
            if "forward" not in vars(module):
                vars(module)["forward"] = partial(_forward, module, module.forward, self.keys)

    def close(self) -> None:
        """Leave the model as it was before."""
        model = self._model
        for path, module in _layers(model) if self.keys or "peft_config" in vars(model) else ():
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module.get_base_layer())
            model._hf_peft_config_loaded = False
        vars(model).pop("peft_config", None)
        self.keys.clear()
        _SETS.pop(model, None)


def _layers(model: Any) -> list[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(n, each) for n, each in model.named_modules() if isinstance(each, BaseTunerLayer)]


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


def _inject(model: Any, name: str, folder: Path, key: str) -> None:
    """Add the matrices of an adapter to a model as peft and transformers do."""
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            raise MmfastError(
                f"adapter {name!r}: {str(folder)!r} has no {file}; give a folder that peft's "
                "save_pretrained wrote"
            )
    try:
        from peft import PeftConfig
    except ImportError:
        raise MmfastError('adapters need peft: pip install "mmfast[train]"') from None
    from transformers.utils import logging as told

    verbosity = told.get_verbosity()
    told.set_verbosity(told.CRITICAL)  # its report lists all weights of the model
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
        kind = "DORA" if getattr(config, "use_dora", False) else config.peft_type
        if kind != "LORA" or config.modules_to_save:
            held = f"whole modules {config.modules_to_save}" if kind == "LORA" else str(kind)
            raise MmfastError(f"adapter {name!r} holds {held}: {_MERGE}")
        info = model.load_adapter(str(folder), key, peft_config=config)
    except MmfastError:
        raise
    except Exception as error:  # peft and transformers raise many kinds
        text = " ".join(str(error).split())[:160]
        text = "its matrices have other sizes" if "mismatched" in text else text
        raise MmfastError(f"adapter {name!r} of {str(folder)!r} does not fit: {text}") from error
    finally:
        told.set_verbosity(verbosity)
    if left := sorted([*info.unexpected_keys, *(n for n in info.missing_keys if key in n)]):
        raise MmfastError(
            f"adapter {name!r} of {str(folder)!r} does not fit: {len(left)} of its matrices have "
            f"no place, such as {left[0]}; it was made for {config.base_model_name_or_path!r}"
        )


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
