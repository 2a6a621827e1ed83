"""LoRA adapters of requests over one copy of a model, through peft (ServerlessLoRA, 2505.14468).

The matrices of all adapters lie beside those of the model. A call of the model is told the adapter
of each of its tokens, so that requests of different adapters share passes and steps.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path, PurePath
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from mmfast.core.errors import MmfastError, unknown

_LOG = logging.getLogger("mmfast.serve")
_BASE = "__base__"  # peft's name of no adapter
# adapter of each token of the calls that are running; a single one holds for all of them
_RUNNING: ContextVar[Sequence[str | None]] = ContextVar("mmfast_adapters", default=(None,))


@contextlib.contextmanager
def using(names: Sequence[str | None], rows: Sequence[int] | None = None) -> Iterator[None]:
    """Run calls of the model with these adapters: one per token, or a single one for all.

    None is the model alone. With `rows`, only these tokens of `names` run.
    """
    if len(set(names)) == 1:
        names = names[:1]
    elif rows is not None:
        names = [names[row] for row in rows]
    token = _RUNNING.set(names)
    try:
        yield
    finally:
        _RUNNING.reset(token)


@contextlib.contextmanager
def some(rows: Sequence[int]) -> Iterator[None]:
    """Run calls of the model on these tokens alone of those that are running."""
    with using(_RUNNING.get(), rows):
        yield


class AdapterSet:
    """The adapters of one model, by name; see `load_adapters`."""

    def __init__(self, model: Any) -> None:
        self._model, self._keys = model, dict[str, str]()
        self.visual: set[str] = set()  # those that change how media are encoded
        self._modules: dict[str, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all adapters."""
        return tuple(self._keys)

    def check(self, name: str | None) -> None:
        """Refuse the name of no adapter (MmfastError)."""
        if name is not None and name not in self._keys:
            raise MmfastError(unknown("adapter", name, self.names))

    def add(self, name: str, given: str, base: str | None = None) -> None:
        """Put an adapter beside the model; arguments and errors as for `load_adapters`."""
        folder = Path(given).expanduser()
        config, key = _config(name, folder), f"mmfast{len(self._keys)}_"
        _inject(self._model, name, folder, key, config)
        self._keys[name] = key
        self._route(name, key)
        made = config.base_model_name_or_path
        if base and made and PurePath(made).name != PurePath(base).name:
            _LOG.warning("adapter %r was made for %r, and this is %r", name, made, base)

    def close(self) -> None:
        """Leave the model as it was before."""
        model = self._model
        for path, module in _layers(model):
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module.get_base_layer())
        self._modules.clear()
        self._keys.clear()
        if getattr(model, "_hf_peft_config_loaded", False):
            model._hf_peft_config_loaded = False
            model.__dict__.pop("peft_config", None)
        _SETS.pop(model, None)

    def _route(self, name: str, key: str) -> None:
        from peft.tuners.lora import Linear

        known = {id(each) for each in self._model.get_decoder().modules()}
        known.add(id(self._model.get_output_embeddings()))
        for path, module in _layers(self._model):
            if key not in module.lora_A and key not in module.lora_embedding_A:
                continue
            if not isinstance(module, Linear) or key in module.lora_variant:
                kind = "a variant of LoRA" if isinstance(module, Linear) else type(module).__name__
                raise MmfastError(
                    f"adapter {name!r} changes {path} ({kind}); a server takes plain LoRA of "
                    "linear layers: merge the adapter and serve the model that results"
                )
            if id(module) not in known:
                self.visual.add(name)
            if path not in self._modules:
                self._modules[path] = module
                module.forward = partial(_forward, module, module.forward, self._keys)


def _layers(model: Any) -> list[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(n, each) for n, each in model.named_modules() if isinstance(each, BaseTunerLayer)]


def _forward(
    module: Any, stock: Callable[..., Tensor], keys: Mapping[str, str], x: Tensor, *args: Any
) -> Tensor:
    """Run a linear layer `[..., D]` with the adapter of each token."""
    running = _RUNNING.get()
    names = [_BASE if name is None else keys[name] for name in running]
    if len(names) > 1:
        found = stock(x.flatten(0, -2), *args, adapter_names=names)
        return found.unflatten(0, x.shape[:-1])
    if names[0] == _BASE:
        base: Tensor = module.base_layer(x, *args)
        return base
    return stock(x, *args, adapter_names=names * len(x))


def _config(name: str, folder: Path) -> Any:
    """Return the configuration of an adapter that a server can take."""
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
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # peft raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise MmfastError(f"adapter {name!r}: {str(folder)!r} cannot be read: {reason}") from error
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    kind = "DORA" if getattr(config, "use_dora", False) else kind
    whole = getattr(config, "modules_to_save", None)
    if kind != "LORA" or whole:
        what = f"whole modules ({', '.join(whole)})" if whole else f"matrices of kind {kind}"
        raise MmfastError(
            f"adapter {name!r} holds {what}; a server takes plain LoRA: merge the adapter and "
            "serve the model that results"
        )
    return config


def _inject(model: Any, name: str, folder: Path, key: str, config: Any) -> None:
    from transformers.utils import logging as told

    wrong, verbosity, shown = "", told.get_verbosity(), told.is_progress_bar_enabled()
    told.set_verbosity(told.CRITICAL)  # its report lists all weights of the model
    told.disable_progress_bar()
    try:
        info = model.load_adapter(str(folder), key, peft_config=config)
        lacks = [each for each in info.missing_keys if key in each]
        left = sorted([*info.unexpected_keys, *lacks])
        wrong = f"{len(left)} of its matrices have no place, such as {left[0]}" if left else ""
    except (RuntimeError, ValueError) as error:
        text = str(error).partition("\n")[0][:160]
        wrong = "its matrices have other sizes" if "mismatched" in text else text
    finally:
        told.set_verbosity(verbosity)
        if shown:
            told.enable_progress_bar()
    if wrong:
        base = getattr(config, "base_model_name_or_path", None)
        raise MmfastError(
            f"adapter {name!r} is not for this model: {wrong}; it was made for {base!r}"
        )


_SETS: WeakKeyDictionary[Any, AdapterSet] = WeakKeyDictionary()


def adapters_of(model: Any) -> AdapterSet:
    """Return the adapters of a model; an empty set where it has none."""
    return _SETS.get(model) or AdapterSet(model)


def load_adapters(model: Any, folders: Mapping[str, str], base: str | None = None) -> AdapterSet:
    """Load the adapters of these folders beside a model, whose name is `base`.

    Raises `MmfastError` for a folder without an adapter, and for an adapter of another model; the
    model is then as it was.
    """
    found = AdapterSet(model)
    try:
        for name, folder in folders.items():
            found.add(name, folder, base)
    except BaseException:
        found.close()
        raise
    if folders:
        _SETS[model] = found
    return found
