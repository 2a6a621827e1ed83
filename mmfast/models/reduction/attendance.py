"""Attendance: the calls that an attached model saw, and prompts on which no stage could act."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from mmfast.core.errors import ModelError
from mmfast.core.registry import ALL, MEDIA, TOKENS
from mmfast.core.spec import Spec
from mmfast.core.trace import Trace
from mmfast.models.cache_name import layered_cache_of
from mmfast.models.families.adapter import adapter_for, tower_of
from mmfast.models.families.tower import KINDS, kinds_of
from mmfast.models.patching import override, stand_before
from mmfast.models.reduction.call import apply
from mmfast.models.reduction.record import features_given
from mmfast.models.wrappers import (
    attention_at,
    base_of,
    decoder_of,
    layers_of,
    stock_model,
)

_KEY = "mmfast attendance"


def _parts_of(model: Any) -> dict[str, Any]:
    """Modules that stages may stand at, by name, without wrappers that call what they wrap."""
    text, adapter = decoder_of(model), adapter_for(model)
    found = {"the text model": text}
    for index, layer in enumerate(layers_of(text)):
        found[f"decoder layer {index}"] = layer
        found[f"attention of decoder layer {index}"] = attention_at(text, index)
    if adapter.media:
        tower = adapter.tower(base_of(model))
        found["the vision tower"] = tower.module
        found |= {f"block {n} of the vision tower": block for n, block in enumerate(tower.blocks)}
    return {name: stock_model(part) for name, part in found.items()}


def refuse_export(module: Any, *_: Any) -> None:
    """Before a call of an attached model, refuse what would record it; compiled code may go on."""
    _refuse_export(type(module).__name__)


def _refuse_export(name: str) -> None:
    tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]
    if torch.compiler.is_exporting() or tracing():
        raise ModelError(
            f"torch.export, torch.onnx and torch.jit.trace of this {name} would keep the choice of "
            "tokens of one prompt for all; detach first, and export the stock model"
        )


# So that it runs where Dynamo, which compiles, would guess.
torch.compiler.assume_constant_result(_refuse_export)


def refuse_replaced(base: Any, parts: Mapping[Any, Any], now: Mapping[Any, Any]) -> None:
    """Refuse a model in which a part, by name, is not that of the time of `attach`."""
    for name, part in now.items():
        if parts.get(name) is not part:
            raise ModelError(
                f"{name} of this {type(base).__name__} was replaced after attach(), which acts in "
                "the old one; detach first, then attach again"
            )


class Attendance:
    """Counts the calls of one attached model, and warns once where its stages find no media.

    Media that `generate` encodes ahead belong to the prompt that follows, whose first chunk may
    hold text alone.
    """

    def __init__(self, model: Any, specs: Sequence[Spec], trace: Trace) -> None:
        self._model, self._base, self._trace = model, base_of(model), trace
        of_media = [spec for spec in specs if spec.tokens == MEDIA and not spec.whole]
        self._stages = "+".join(map(str, of_media))
        able = any(spec.method.text and spec.site == "llm" for spec in of_media)
        self._advice = f"; write {TOKENS}={ALL} to drop text, too" if able else ""
        self._names = list(inspect.signature(self._base.forward).parameters)
        self._encoded = False
        self._encoder = tower_of(model) if adapter_for(model).alone else None
        self._uncompiled: Any = torch.compiler.disable(apply)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hooks in, hooks out."""
        with ExitStack() as stack:
            if self._encoder is not None:
                for name in self._encoder.entries():
                    stack.enter_context(override(self._encoder.base, name, self._count))
                yield
                return
            for kind in kinds_of(self._base):
                stack.enter_context(override(self._base, f"get_{kind}_features", self._encode))
            stack.callback(stand_before(self._base, self._enter, _KEY))
            self._parts = _parts_of(self._model)
            yield

    def _count(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        if self._stages:
            refuse_export(self._base)
        self._trace.calls += 1
        return stock(*args, **kwargs)

    def _encode(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # compiled forwards encode their own pixels
            self._encoded, self._trace.calls = True, max(1, self._trace.calls)
        return stock(*args, **kwargs)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs} if args else kwargs
        refuse_export(module)
        ids = kwargs.get("input_ids")
        length = (kwargs["inputs_embeds"] if ids is None else ids).shape[1]
        if torch.compiler.is_compiling():
            if length > 1:  # compiled steps stay whole
                self._uncompiled(self._see, kwargs)
        elif length > 1:
            self._see(kwargs)
        else:
            self._trace.calls += 1

    def _see(self, kwargs: Mapping[str, Any]) -> None:
        self._trace.calls += 1
        refuse_replaced(self._base, self._parts, _parts_of(self._model))
        if self._base.training and features_given(kwargs):  # else it would grow with every step
            self._trace.rows.clear()
            self._trace.reductions.clear()
        encoded, self._encoded = self._encoded, False
        # Features that a caller encodes and merges by hand are no media of the prompt that follows.
        encoded = encoded and kwargs.get("input_ids") is not None
        if not self._stages or encoded or features_given(kwargs):
            return
        cache = layered_cache_of(kwargs)
        if cache is None or int(cache.get_seq_length()) == 0:
            self._trace.warn(self._reason(kwargs))

    def _reason(self, kwargs: Mapping[str, Any]) -> str:
        ids, config = kwargs.get("input_ids"), self._base.config
        if ids is None:
            return (
                f"{self._stages!r} reduced nothing: inputs_embeds came without pixels, so tokens "
                "of media cannot be told from text; pass input_ids with pixel_values"
            )
        for kind in KINDS:
            token = getattr(config, f"{kind}_token_id", None)
            if token is not None and bool((ids == token).any()):
                return (
                    f"{self._stages!r} reduced nothing: the prompt has {kind} placeholders, but no "
                    f"{kind} came with it; pass what the processor returned"
                )
        return (
            f"{self._stages!r} reduced nothing: the prompt has no image, video or sound"
            f"{self._advice}"
        )
