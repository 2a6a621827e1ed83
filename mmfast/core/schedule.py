"""Schedules: a method that cuts before several decoder layers, down to one budget."""

from __future__ import annotations

from collections.abc import Collection, Iterable, MutableMapping
from dataclasses import replace

from mmfast.core.budget import count
from mmfast.core.errors import SpecError
from mmfast.core.spec import Cut, Spec


def stage_layers(
    depths: Iterable[float], layers: int, able: Collection[int] | None = None
) -> list[int]:
    """Decoder layers before which a schedule cuts, ascending.

    Args:
        depths: Relative depths in (0, 1).
        layers: Decoder layers L of the model. Depth d is layer `round(d L)`, at least 1, since
            layer 0 has no attention before it; depths that fall on one layer are one cut.
        able: The layers that may be cut, where not all from 1 on: the nearest one is taken.
    """
    choices = sorted(able or range(1, layers))

    def nearest(depth: float) -> int:
        return min(choices, key=lambda layer: (abs(layer - round(depth * layers)), layer))

    return sorted({nearest(depth) for depth in depths})


def expand(
    specs: Iterable[Spec], layers: int, able: Collection[int] | None = None
) -> tuple[Spec, ...]:
    """Turn every schedule among `specs` into its cuts.

    Args:
        specs: Parsed stages.
        layers: Decoder layers of the model.
        able: See `stage_layers`.

    Raises:
        SpecError: A schedule for a model of fewer than two layers.
    """
    found: list[Spec] = []
    for number, spec in enumerate(specs):
        if not spec.staged:
            found.append(spec)
            continue
        if layers < 2:
            raise SpecError(
                f"{str(spec)!r} cuts between decoder layers, but the model has {layers}; "
                "use a model of at least 2 layers, or a method that runs at 'pre'"
            )
        at = stage_layers(spec.method.stages, layers, able)
        found += [
            replace(spec, layer=layer, cut=Cut(number, index + 1, len(at)))
            for index, layer in enumerate(at)
        ]
    return tuple(found)


def wanted(spec: Spec, n: int, entered: MutableMapping[int, int]) -> int | None:
    """Tokens that a stage leaves of the `n` of one item; None where the method decides.

    The cuts of a schedule remove a constant share each. The last one leaves exactly the budget
    of what entered the first, or less where stages of other methods between them removed more.

    Args:
        spec: The stage.
        n: Tokens of the item that enter it.
        entered: Tokens of the item that entered each schedule; a first cut adds itself.

    Raises:
        SpecError: A whole-number budget above the tokens there are.
    """
    cut = spec.cut
    if cut is None:
        return count(spec.budget, n)
    first = entered.setdefault(cut.schedule, n)
    last = count(spec.budget, first)
    if last is None or cut.index == cut.of:
        return None if last is None else min(n, last)
    share: float = (last / first) ** (cut.index / cut.of)
    return min(n, round(first * share))
