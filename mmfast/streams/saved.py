"""A memory as a tree of tensors, and back: rotated keys are left out, they follow from the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.streams import places
from mmfast.streams.buffers import RAW, VALUES

if TYPE_CHECKING:
    from mmfast.streams.memory import Memory


def to_tree(memory: Memory) -> dict[str, Any]:
    """All state of a memory; tensors are copies."""
    layers: list[dict[str, Tensor] | None] = []
    for buffer in memory.buffers:
        if buffer.data is None:
            layers.append(None)
        else:
            layers.append({"keys": buffer.read(RAW).clone(), "values": buffer.read(VALUES).clone()})
    return {
        "plan": str(memory.plan) if memory.plan is not None else None,
        "blocks": [places.to_tree(block) for block in memory.blocks],
        "layers": layers,
        "number": memory.number,
        "stored": memory.stored,
        "counts": dict(memory.counts),
        "archive": None if memory.archive is None else memory.archive.snapshot(),
    }


def from_tree(memory: Memory, tree: dict[str, Any]) -> None:
    """Fill a new memory of the same model and plan.

    Raises:
        MmfastError: The tree is of another model or another plan.
    """
    plan = str(memory.plan) if memory.plan is not None else None
    if tree["plan"] != plan or (tree["archive"] is None) != (memory.archive is None):
        raise MmfastError(
            f"a stream saved with memory {tree['plan']!r} cannot go on with {plan!r}; "
            "open it with the memory it was saved with"
        )
    if len(tree["layers"]) != len(memory.buffers):
        raise MmfastError(
            f"a stream saved from a model of {len(tree['layers'])} layers cannot go on with one "
            f"of {len(memory.buffers)}; load the model it was saved with"
        )
    blocks = [places.from_tree(each) for each in tree["blocks"]]
    for layer, saved in enumerate(tree["layers"]):
        if saved is not None:
            _fill(memory, layer, blocks, saved["keys"], saved["values"])
    memory.blocks = blocks
    memory.cursor = places.Cursor.behind(blocks, memory.turner.axes)
    memory.number, memory.stored = tree["number"], tree["stored"]
    memory.counts = dict(tree["counts"])
    if memory.archive is not None:
        memory.archive.restore(tree["archive"])


def _fill(memory: Memory, layer: int, blocks: list[Any], keys: Any, values: Any) -> None:
    device = memory.turner.device(layer)
    raw, values = keys.to(device), values.to(device)
    buffer = memory.buffers[layer]
    buffer.length = 0
    if blocks:
        where = torch.cat([block.positions(layer) for block in blocks], 1)
        buffer.write(raw, memory.turner.rotate(layer, raw, where), values)
    buffer.length = raw.shape[1]
