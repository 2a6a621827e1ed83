"""Depth transformer over the codebooks of a frame, Moshi (arXiv 2410.00037) and CSM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.core.registry import register
from mmfast.heads.code_base import Choose, CodeEmbed, CodeState, Wide, likeliest, width_of
from mmfast.heads.depth_core import DepthCore, DepthShape
from mmfast.ops.codebook_loss import CodeLoss, code_loss
from mmfast.ops.delay import check_delays


@register("depth", kind="head", paper="2410.00037", needs=("hidden",), sites=("codebooks",))
class DepthHead(DepthCore):
    """Codebooks of a frame one after the other, by a small transformer (Moshi, CSM).

    One pass over all codebooks trains it and verifies drafts; `decoding.codebooks` drafts all
    codes at once and keeps the output exact.

    Args:
        hidden: Width of the backbone's hidden state, or the backbone.
        codes: Codebooks K.
        size: Entries per codebook V; code V stands for "none" where a delay leaves a gap.
        first: Values of the token in front of the codes (the text token of the frame); 1: none.
        delays: Steps that each codebook lags; None for none.
        dim: Width.
        layers: Depth.
        heads: Attention heads.
        ffn: Inner width of the feed-forward.
        kind: Of the rest, as `heads.depth_core.DepthShape`: `per_step`, `prepend`, ….
    """

    def __init__(
        self,
        hidden: int | Wide,
        codes: int,
        size: int,
        *,
        first: int = 1,
        delays: Sequence[int] | None = None,
        dim: int = 256,
        layers: int = 2,
        heads: int = 4,
        ffn: int = 512,
        **kind: Any,
    ) -> None:
        super().__init__(
            DepthShape(
                hidden=width_of(hidden),
                codes=codes,
                size=size,
                first=first,
                dim=dim,
                layers=layers,
                heads=heads,
                ffn=ffn,
                blank=1,
                **kind,
            )
        )
        self.delays = check_delays(delays or [0] * codes, codes)
        sizes = {"dim": dim, "layers": layers, "heads": heads, "ffn": ffn}
        self.config = {
            "head": "depth", "codes": codes, "size": size, "first": first,
            "delays": list(self.delays), **sizes, **kind,
        }  # fmt: skip
        self.inputs = CodeEmbed(codes, size, width_of(hidden))

    def init_state(self, batch: int = 1) -> CodeState:
        """Before the first frame: a drafter that copies finds code 0."""
        blank = torch.zeros(batch, 1, self.codes, dtype=torch.long, device=self.causal.device)
        return CodeState(blank)

    @torch.no_grad()
    def draft(
        self,
        state: CodeState,
        hidden: Tensor,
        first: Tensor | None = None,
        choose: Choose = likeliest,
    ) -> tuple[CodeState, Tensor]:
        """The codes of the next step, code by code.

        Args:
            state: Of the step before.
            hidden: `[B, D]` of the backbone.
            first: `[B]` the token in front; None: none.
            choose: How a code is chosen from logits `[B, V]`.

        Returns:
            The next state, and codes `[B, K]`.
        """
        frame = self.begin(hidden)
        token = self.fronts(hidden) if first is None else first
        codes = []
        for at in range(self.codes):
            token = choose(self.run(frame, token[:, None], at)[:, 0])
            codes.append(token)
        found = torch.stack(codes, dim=1)
        return CodeState(torch.cat([state.codes, found[:, None]], dim=1)[:, -16:]), found

    def crop(self, state: CodeState, frames: int) -> CodeState:
        """Forget the last frames, 15 at most; nothing else is remembered of them."""
        return CodeState(state.codes[:, : max(state.codes.shape[1] - frames, 1)])

    def fronts(self, hidden: Tensor) -> Tensor:
        """`[B]`: the token in front of the codes where there is no text."""
        return torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)

    def loss(self, hidden: Tensor, codes: Tensor, first: Tensor | None = None) -> CodeLoss:
        """Teacher-forced, in one pass over all codebooks of all steps.

        Args:
            hidden: `[B, T, D]` of the backbone, at the step whose codes it is to say.
            codes: `[B, T, K]`, delayed already; V or -100 where there is none.
            first: `[B, T]` tokens in front; None: none.
        """
        flat, target = hidden.flatten(0, 1), codes.flatten(0, 1)
        front = self.fronts(flat) if first is None else first.flatten()
        known = target.where((target >= 0) & (target < self.size), self.size)
        tokens = torch.cat([front[:, None], known[:, :-1]], dim=1)  # [B T, K]
        return code_loss(self.whole(flat, tokens), target)
