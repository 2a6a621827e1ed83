"""Speech models of transformers by their type; every file of this package registers its own."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

V = TypeVar("V", bound=type)


@dataclass(frozen=True)
class SpeechFamily:
    """A class of transformers that loads a checkpoint, its reader and its voice here.

    `reader` is the class that turns its text into ids and back; `voice` makes a voice, a `cls`, of
    a loaded model and its reader.
    """

    stock: str
    reader: str
    voice: Callable[[Any, Any], Any]
    cls: type


_FAMILIES: dict[str, SpeechFamily] = {}


def speech_family(
    model_type: str, stock: str, argument: str, reader: str = "AutoTokenizer", part: str = ""
) -> Callable[[V], V]:
    """Register a class as the voice of a model type, which is that of `config.json`.

    `stock` names the class of transformers that loads it, `reader` the one that turns text into ids
    and back; `argument` is the argument of the class that takes the reader, or its attribute
    `part`.
    """

    def register(cls: V) -> V:
        def voice(model: Any, words: Any) -> Any:
            return cls(model, **{argument: getattr(words, part) if part else words})

        _FAMILIES[model_type] = SpeechFamily(stock, reader, voice, cls)
        return cls

    return register


def speech_families() -> dict[str, SpeechFamily]:
    """Return the families by model type."""
    package = importlib.import_module("mmfast.models.speech")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    return dict(sorted(_FAMILIES.items()))
