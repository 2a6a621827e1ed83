"""From encoded media to the embeddings of one prompt: joined, reduced, embedded, named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from mmfast.core.errors import ModelError, SpecError
from mmfast.core.trace import Trace
from mmfast.models.compress import compress
from mmfast.serve.engine.embed import embedded, identities
from mmfast.serve.engine.media import Known, Unit, joined
from mmfast.serve.engine.parts import Embedded, Prepared

Key = tuple[Any, ...]
Result = Embedded | Exception


def finished(
    model: Any,
    prepared: Prepared,
    mine: Sequence[Unit],
    known: Mapping[Key, Known | Exception],
    reused: AbstractSet[Key],
) -> Result:
    """The prompt as the language model gets it, or why there is none.

    Args:
        model: The model.
        prepared: The request.
        mine: Its media.
        known: What they became.
        reused: Those that were not encoded for this request.
    """
    try:
        parts = [(unit, _fine(known[unit.key])) for unit in mine]
        return _joined(model, prepared, parts, reused)
    except Exception as error:
        return error


def _fine(found: Known | Exception) -> Known:
    if isinstance(found, Exception):
        raise found
    return found


@torch.no_grad()
def _joined(
    model: Any,
    prepared: Prepared,
    parts: Sequence[tuple[Unit, Known]],
    reused: AbstractSet[Key],
) -> Embedded:
    kinds = dict.fromkeys(unit.kind for unit, _ in parts)
    known = {kind: [each for unit, each in parts if unit.kind == kind] for kind in kinds}
    outputs = {kind: joined(kind, each) for kind, each in known.items()}
    again = [each for unit, each in parts if unit.key in reused]
    visual = sum(len(y.content()) for _, each in parts for y in each.layouts)
    trace = Trace()
    trace.add("read", 0, prepared.length, prepared.ms)
    fresh = (each.ms for unit, each in parts if unit.key not in reused)
    trace.add("encode", visual, visual, sum(fresh))
    inputs = {**prepared.inputs, "mm_encoder_outputs": outputs}
    try:
        rest = compress(model, inputs, prepared.reduce, trace)
    except ModelError as error:
        if not prepared.reduce:
            raise
        raise SpecError(str(error)) from error  # reducers that do not fit this model or prompt
    named = identities([unit for unit, _ in parts], known, prepared.reduce)
    told = trace.to_dict()
    return Embedded(
        **embedded(model, rest, outputs, named),
        whole=prepared.inputs["input_ids"][0],
        reused=sum(y.length for each in again for y in each.layouts),
        visual_tokens=visual,
        kept_tokens=left(visual, trace),
        rows=told["rows"],
        reductions=told["reductions"],
    )


def left(visual: int, trace: Trace) -> int:
    """Visual tokens behind all reductions, of so many before."""
    ends: dict[int, tuple[int, int]] = {}
    for site, item, reduction in trace.reductions:
        if site != "vit":  # inside the encoder patches are counted
            ends[item] = (ends.get(item, (reduction.n, 0))[0], reduction.m)
    return visual - sum(before - after for before, after in ends.values())
