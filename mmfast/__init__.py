"""mmfast: faster image, video and speech models on stock Hugging Face classes.

`import mmfast` loads neither torch nor transformers: the public names arrive on first use.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

_root = Path(__file__).resolve().parents[1]
if (_root / "pyproject.toml").is_file():  # a checkout: kernels/ and pipelines/ sit beside mmfast/
    __path__.append(str(_root))

if TYPE_CHECKING:
    from mmfast.attach import attach as attach
    from mmfast.bench.compare import time_answers as time_answers
    from mmfast.core.errors import MediaError as MediaError
    from mmfast.core.errors import MmfastError as MmfastError
    from mmfast.core.errors import ModelError as ModelError
    from mmfast.core.errors import SpecError as SpecError
    from mmfast.core.reduction import Mix as Mix
    from mmfast.core.reduction import Reduction as Reduction
    from mmfast.core.registry import methods as methods
    from mmfast.core.registry import register as register
    from mmfast.core.spec import reduce as reduce
    from mmfast.core.tokens import Tokens as Tokens
    from mmfast.core.trace import Trace as Trace
    from mmfast.frontends.image import kind_of as kind_of
    from mmfast.models.image_guard import ImageGuard as ImageGuard
    from mmfast.pipelines.answer import Answer as Answer
    from mmfast.pipelines.overlay import overlay as overlay
    from mmfast.pipelines.registry import pipeline as pipeline
    from mmfast.streams.reuse.schema import PromptSchema as PromptSchema
    from mmfast.streams.reuse.store import ReuseStore as ReuseStore
    from mmfast.tiny.stream.world import World as World

__version__ = "0.1.0"

_LAZY = {
    "Answer": "mmfast.pipelines.answer",
    "ImageGuard": "mmfast.models.image_guard",
    "MediaError": "mmfast.core.errors",
    "Mix": "mmfast.core.reduction",
    "MmfastError": "mmfast.core.errors",
    "ModelError": "mmfast.core.errors",
    "PromptSchema": "mmfast.streams.reuse.schema",
    "Reduction": "mmfast.core.reduction",
    "ReuseStore": "mmfast.streams.reuse.store",
    "SpecError": "mmfast.core.errors",
    "Tokens": "mmfast.core.tokens",
    "Trace": "mmfast.core.trace",
    "World": "mmfast.tiny.stream.world",
    "attach": "mmfast.attach",
    "calibrate_heads": "mmfast.models.kv.calibration",
    "kind_of": "mmfast.frontends.image",
    "methods": "mmfast.core.registry",
    "overlay": "mmfast.pipelines.overlay",
    "pipeline": "mmfast.pipelines.registry",
    "reduce": "mmfast.core.spec",
    "register": "mmfast.core.registry",
    "time_answers": "mmfast.bench.compare",
}

__all__ = sorted(["__version__", *_LAZY])


class _Package(ModuleType):
    """Importing the submodule `mmfast.attach` must not hide the function of the same name."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(
            f"module 'mmfast' has no attribute {name!r}; choices: {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
