"""STC-Pruner: keep tokens unlike the memory of the stream and the frame's mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import grouped_topk, marked, share_out
from mmfast.ops.video import ChunkMemory, familiarity


def stream_stc_pruner(
    tokens: Tokens, budget: int | None, state: Mapping[str, Tensor] | None
) -> tuple[Reduction, dict[str, Tensor]]:
    """One frame of a stream, which is one chunk; the state is the memory, one level per channel."""
    if budget is None:
        raise SpecError("'stc_pruner' needs a budget; write 'stc_pruner:0.25'")
    before = None
    if state is not None:
        before = ChunkMemory(state["total"].to(tokens.x.device), int(state["chunks"]))
    found, memory = prune_chunk(tokens, budget, before)
    return found, {"total": memory.total, "chunks": torch.tensor(memory.chunks)}


@register("stc_pruner", paper="2512.00891", temporal=True, stream=stream_stc_pruner)
def stc_pruner(tokens: Tokens, budget: int) -> Reduction:
    """Keep in every frame the tokens least like the stream so far and the frame's mean.

    The item is one chunk that starts from an empty memory (Wang et al., CVPR 2026);
    `prune_chunk` carries the memory of a stream from chunk to chunk. The paper keeps 60 tokens of
    each frame.

    Args:
        tokens: `x` `[..., N, D]`; without a `grid` it is one frame.
        budget: Tokens to keep, the same number of each frame; what does not divide goes to the
            first frames.
    """
    return prune_chunk(tokens, budget, None)[0]


def prune_chunk(
    tokens: Tokens, budget: int, memory: ChunkMemory | None
) -> tuple[Reduction, ChunkMemory]:
    """Prune one chunk of a stream, and hand on the `memory` of the chunks before with it added."""
    frames = 1 if tokens.grid is None else tokens.grid[0]
    n = tokens.n // frames
    found = familiarity(tokens.x, frames, memory)
    device = tokens.x.device
    caps = torch.full((frames,), n, device=device)
    counts = share_out(torch.ones(frames, device=device), budget, caps)
    frame = torch.arange(tokens.n, device=device) // n
    keep = marked(grouped_topk(-found.score.flatten(-2), frame, counts))
    return Reduction.prune(keep, tokens.n), found.memory
