"""Peak memory of the layers whose attention a method reads, against the same layers of stock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mmfast.bench.measure import peak_now, reset_peak
from mmfast.core.schedule import expand
from mmfast.core.spec import Spec
from mmfast.models.inner import INNER
from mmfast.models.signals import from_tower

Span = tuple[str, int]  # ("tower", 0), or ("layer", number)


def spans(model: Any, specs: Sequence[Spec], tower: bool) -> list[Span]:
    """Where the methods read attention: the vision tower, and decoder layers.

    Args:
        model: Gives the number of decoder layers.
        specs: The stages of a spec.
        tower: The tower runs, so that methods can read it.
    """
    found: list[Span] = []
    for spec in expand(tuple(specs), len(model.get_decoder().layers)):
        if spec.site == "llm" and spec.layer and INNER & set(spec.method.needs):
            found.append(("layer", spec.layer - 1))
        elif tower and spec.site in ("pre", "vit") and from_tower(spec.method.needs):
            found.append(("tower", 0))
    return list(dict.fromkeys(found))


def peaks_in(model: Any, where: Sequence[Span], run: Callable[[], object]) -> dict[Span, float]:
    """Peak megabytes while each span runs, in one run of the model; no run where there is none.

    A layer's span ends where the next layer begins: signals are read behind a layer, too.
    """
    peaks: dict[Span, float] = {}
    if where:
        with _watched(model, where, peaks):
            run()
    return peaks


@contextmanager
def _watched(model: Any, where: Sequence[Span], peaks: dict[Span, float]) -> Iterator[None]:
    layers, tower = model.get_decoder().layers, model.get_encoder("image")
    handles: list[Any] = []

    def read(span: Span) -> Callable[..., None]:
        def note(*_: Any) -> None:
            _wait()
            peaks[span] = max(peaks.get(span, 0.0), peak_now())

        return note

    def reset(*_: Any) -> None:
        _wait()
        reset_peak()

    for span in where:
        kind, number = span
        first = tower if kind == "tower" else layers[number]
        handles.append(first.register_forward_pre_hook(reset))
        if kind == "tower":
            handles.append(tower.register_forward_hook(read(span)))
        elif number + 1 < len(layers):
            handles.append(layers[number + 1].register_forward_pre_hook(read(span)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
