"""Every family either streams as its stock model computes, or says why not."""

from __future__ import annotations

import pytest
import torch
from stream_checks import dtype, stock, width
from tiny_models import ALL_FAMILIES, tiny

from mmfast.caches.plan import plan_cache
from mmfast.core.errors import ModelError
from mmfast.streams.engine import Engine
from mmfast.streams.script import Piece

REFUSED = {"gemma3": "sliding_attention", "lfm2_vl": "conv"}


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family(family: str) -> None:
    model = tiny(family).model
    if family in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[family]):
            Engine(model)
        return
    engine = Engine(model)
    axes = engine.turner.axes
    pieces = []
    for i, n in enumerate((5, 9, 1, 6)):
        embeds = torch.randn(n, width(model), generator=torch.Generator().manual_seed(i))
        relative, advance = torch.arange(n).expand(axes, n), torch.full((axes,), n)
        pieces.append(Piece(embeds.to(dtype(model)), relative, advance, "text", fresh=i > 1))
    reference = stock(model, pieces)
    memory, bounded = engine.memory(), engine.memory(plan_cache("sink:2+window:12+rekv:1"))
    ends = torch.tensor([len(piece.embeds) for piece in pieces]).cumsum(0)
    for piece, end in zip(pieces, ends.tolist(), strict=True):
        logits = engine.branch(memory).extend(piece)
        torch.testing.assert_close(logits, reference[end - 1], atol=1e-5, rtol=1e-5)
        assert bool(torch.isfinite(engine.branch(bounded).extend(piece)).all())
        engine.append(memory, piece)
        engine.append(bounded, piece)
    assert bounded.tokens() <= 14 < memory.tokens()
    engine.close()
