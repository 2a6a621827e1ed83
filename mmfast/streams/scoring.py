"""A policy that keeps by keys, applied to every frame as it is prefilled."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.spec import Spec
from mmfast.core.tokens import Tokens
from mmfast.ops.evict import evict
from mmfast.streams.buffers import RAW, VALUES
from mmfast.streams.memory import Memory
from mmfast.streams.places import VISUAL, Live

_KNOWN = {"x", "values", "kind", "layer", "layers"}


def check_score(plan: CachePlan | None) -> None:
    """Refuse a score policy that reads what a stream does not know.

    Raises:
        SpecError: It needs attention of queries that are still to come.
    """
    spec = None if plan is None else plan.score
    if spec is not None and not set(spec.method.needs) <= _KNOWN:
        missing = ", ".join(sorted(set(spec.method.needs) - _KNOWN))
        raise SpecError(
            f"{spec.method.name!r} needs {missing}, which frames of a stream do not have before "
            "a question comes; use 'keynorm' in a stream"
        )


def score(memory: Memory, block: Live) -> Live:
    """Let the policy choose among the visual tokens of a new frame, in every layer for itself.

    Args:
        memory: Its buffers hold the tokens, not counted in.
        block: The new block; texts, and markers inside frames, are left alone.

    Returns:
        The block with what is left of it.
    """
    spec = None if memory.plan is None else memory.plan.score
    visual = (block.kinds == VISUAL).nonzero()[:, 0]
    if spec is None or not len(visual):
        return block
    markers = (block.kinds != VISUAL).nonzero()[:, 0]
    held = []
    for layer, buffer in enumerate(memory.buffers):
        tail = buffer.read_all(buffer.length, buffer.length + block.n)  # [3, H, n, d]
        rows = tail.index_select(2, visual.to(tail.device))
        reduction = _choose(spec, rows, layer, len(memory.buffers))
        chosen = visual[reduction.keep.cpu()]
        held.append(torch.cat([markers, chosen]).sort().values)
        buffer.select(held[-1], block.n)
    return replace(block, held=tuple(held))


def _choose(spec: Spec, rows: Tensor, layer: int, layers: int) -> Reduction:
    """All heads of a layer keep the same tokens: heads side by side are one long key."""
    keys, values = (_wide(rows[plane]) for plane in (RAW, VALUES))
    signals = {
        "values": values,
        "kind": torch.full(keys.shape[:1], VISUAL, device=keys.device),
        "layer": torch.tensor(layer),
        "layers": torch.tensor(layers),
    }
    reduction = evict(spec, Tokens(keys, signals=signals))
    if not reduction.pure:
        raise SpecError(
            f"{spec.method.name!r} merges keys, which frames of a stream do not do; use 'keynorm' "
            "in a stream"
        )
    return reduction


def _wide(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1).flatten(1)  # [m, H * d]
