"""A policy that keeps by keys, applied to every frame as it is prefilled."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import SpecError
from mmfast.core.tokens import Tokens
from mmfast.ops.evict import evict
from mmfast.streams.buffers import RAW, VALUES
from mmfast.streams.memory import Memory
from mmfast.streams.places import Live
from mmfast.streams.turning import Turner

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


def score(memory: Memory, turner: Turner, block: Live, queries: dict[int, Tensor]) -> Live:
    """Let the policy choose among the tokens of a new frame, in every layer for itself.

    Args:
        memory: Its buffers hold the tokens, not counted in.
        turner: Rotates what a policy merges.
        block: The new block; texts are left whole.
        queries: Per layer the queries of its tokens `[1, Hq, n, d]` before RoPE.

    Returns:
        The block with what is left of it.
    """
    spec = None if memory.plan is None else memory.plan.score
    if spec is None or block.kind != "frame":
        return block
    held = []
    for layer, buffer in enumerate(memory.buffers):
        end = buffer.length + block.n
        raw, values = (buffer.read(plane, buffer.length, end) for plane in (RAW, VALUES))
        signals = {
            "values": values.transpose(0, 1).flatten(1),
            "kind": block.kinds.to(raw.device),
            "layer": torch.tensor(layer),
            "layers": torch.tensor(turner.layers),
        }
        # All heads of a layer keep the same tokens: heads side by side are one long key.
        tokens = Tokens(raw.transpose(0, 1).flatten(1), signals=signals)
        reduction = evict(spec, tokens)
        keep = reduction.keep.cpu()
        held.append(keep)
        if reduction.pure:
            buffer.select(keep, block.n)
            continue
        merged = [reduction.apply(rows.transpose(0, 1).flatten(1)) for rows in (raw, values)]
        keys, values = (rows.unflatten(1, (raw.shape[0], -1)).transpose(0, 1) for rows in merged)
        places = replace(block, held=(keep,)).positions(0)
        buffer.write(keys, turner.rotate(layer, keys, places), values)
    return replace(block, held=tuple(held))
