"""Codebook groups in parallel, LiveSpeech (arXiv 2406.02897)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from mmfast.core.errors import SpecError
from mmfast.core.registry import register
from mmfast.heads.code_base import Choose, CodeEmbed, CodeState, Wide, likeliest, width_of
from mmfast.heads.depth import StepLinear, TimeStack
from mmfast.ops.codebooks import CodeLoss, adaptive_weights, check_delays, code_loss
from mmfast.ops.stream_cache import crop, empty


@register("groups", kind="head", paper="2406.02897", needs=("hidden",), sites=("codebooks",))
class GroupsHead(nn.Module):
    """Groups of codebooks predicted side by side, each with a history of its own (LiveSpeech).

    A hidden state is projected once per group; the same layers run all groups as one batch; each
    codebook of a group has an output matrix of its own. All codes of a step come from one pass.

    `codes` is the number of codebooks K, a multiple of `groups` (else SpecError); code V (`size`)
    stands for "none". `hidden` is the width of the backbone's hidden state, or the backbone.
    `delays` are steps that each codebook lags; a group looks back to `window` steps, None for all.
    """

    def __init__(
        self,
        hidden: int | Wide,
        codes: int,
        size: int,
        *,
        groups: int = 2,
        delays: Sequence[int] | None = None,
        dim: int = 256,
        layers: int = 2,
        heads: int = 4,
        ffn: int = 512,
        window: int | None = None,
    ) -> None:
        super().__init__()
        if groups < 1 or codes % groups:
            fits = [g for g in range(1, codes + 1) if codes % g == 0]
            raise SpecError(f"groups={groups!r} do not divide {codes} codebooks; choices: {fits}")
        self.codes, self.size, self.groups = codes, size, groups
        self.delays = check_delays(delays or [0] * codes, codes)
        sizes = {"dim": dim, "layers": layers, "heads": heads, "ffn": ffn, "window": window}
        self.config = {
            "head": "groups", "codes": codes, "size": size, "groups": groups,
            "delays": list(self.delays), **sizes,
        }  # fmt: skip
        self.inputs = CodeEmbed(codes, size, width_of(hidden))
        self.project = StepLinear(width_of(hidden), dim, groups)
        self.stack = TimeStack(dim, layers, heads, ffn, window=window)
        self.norm = nn.RMSNorm(dim, 1e-6)
        self.out = StepLinear(dim, size, codes)

    def init_state(self, batch: int = 1) -> CodeState:
        """Before the first step."""
        device = self.out.weight.device
        codes = torch.zeros(batch, 1, self.codes, dtype=torch.long, device=device)
        return CodeState(codes, empty(batch * self.groups, device))

    @torch.no_grad()
    def draft(
        self, state: CodeState, hidden: Tensor, choose: Choose = likeliest
    ) -> tuple[CodeState, Tensor]:
        """All codes of the next step: hidden `[B, D]` to codes `[B, K]`."""
        state, logits = self.logits(state, hidden[:, None])
        codes = choose(logits[:, 0])
        kept = torch.cat([state.codes, codes[:, None]], dim=1)[:, -16:]
        return CodeState(kept, state.kv), codes

    def crop(self, state: CodeState, steps: int) -> CodeState:
        """Forget the last steps."""
        assert state.kv is not None
        kept = state.codes[:, : max(state.codes.shape[1] - steps, 1)]
        return CodeState(kept, crop(state.kv, state.kv.advance - steps))

    def logits(self, state: CodeState, hidden: Tensor) -> tuple[CodeState, Tensor]:
        """The next steps: hidden `[B, n, D]` to logits `[B, n, K, V]`."""
        batch = len(hidden)
        assert state.kv is not None
        x = self.project(repeat(hidden, "b n d -> (b n) g d", g=self.groups), 0)
        kv, x = self.stack(state.kv, rearrange(x, "(b n) g d -> (b g) n d", b=batch))
        x = rearrange(self.norm(x), "(b g) n d -> (b n) g d", b=batch)
        x = repeat(x, "m g d -> m (g k) d", k=self.codes // self.groups)  # an output a codebook
        logits = rearrange(self.out(x, 0), "(b n) k v -> b n k v", b=batch)
        return CodeState(state.codes, kv), logits

    def guess(self, hidden: Tensor, _first: Tensor, _before: Tensor) -> Tensor:
        """As a drafter of a depth transformer, without history: `[B, D]` to `[B, K, V]`."""
        return self.logits(self.init_state(len(hidden)), hidden[:, None])[1][:, 0]

    def loss(
        self, hidden: Tensor, codes: Tensor, *, power: float | None = 0.05, ceiling: float = 0.5
    ) -> CodeLoss:
        """Cross-entropy with adaptive weights of power λ; None weighs all codes alike.

        `hidden` `[B, T, D]` stands at the step whose codes it is to say; `codes` `[B, T, K]` are
        delayed already, V or -100 where there is none. Codes likelier than `ceiling` (p_max) are
        left out.
        """
        logits = self.logits(self.init_state(len(hidden)), hidden)[1]
        weights = None if power is None else adaptive_weights(logits, codes, power, ceiling)
        return code_loss(logits, codes, weights)
