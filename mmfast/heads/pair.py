"""Two channels of a dialogue per step, NTPP (ICML 2025)."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from mmfast.core.kv import KVBlock
from mmfast.core.registry import register
from mmfast.heads.code_base import Choose, Wide, likeliest, width_of
from mmfast.heads.depth import TimeStack
from mmfast.ops.codebooks import CodeLoss, code_loss
from mmfast.ops.stream_cache import crop, empty


@register("pair", kind="head", paper="2506.00975", needs=("hidden",), sites=("channels",))
class PairHead(nn.Module):
    """Both speakers advance together: one token each per step, the partner's of it hidden (NTPP).

    The channels are interleaved, a1 b1 a2 b2 …; the tokens of a step share a position and do not
    see each other; a channel embedding tells them apart. The backbone runs the same way
    (`mmfast.models.decoder.backbone.StreamDecoder` of width 2).

    `hidden` is the width of the backbone's hidden state, or the backbone; `size` the entries per
    channel. `window` steps are looked back to, None for all.
    """

    def __init__(
        self,
        hidden: int | Wide,
        size: int,
        *,
        layers: int = 1,
        heads: int = 4,
        ffn: int = 512,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.size, hidden = size, width_of(hidden)
        sizes = {"layers": layers, "heads": heads, "ffn": ffn, "window": window}
        self.config = {"head": "pair", "size": size, **sizes}
        self.table = nn.Embedding(size, hidden)
        self.channel = nn.Parameter(torch.randn(2, hidden) * 0.02)
        self.lift = nn.Parameter(torch.randn(2, hidden // heads) * 0.02)  # on queries and keys
        self.stack = TimeStack(hidden, layers, heads, ffn, window=window, width=2)
        self.norm = nn.RMSNorm(hidden, 1e-6)
        self.out = nn.Linear(hidden, size, bias=False)

    def embed(self, codes: Tensor) -> Tensor:
        """Embed codes for the backbone: `[B, 2, T]` to `[B, 2 T, D]`, interleaved."""
        x = self.table(codes) + self.channel[:, None]  # [B, 2, T, D]
        mixed: Tensor = rearrange(x, "b c t d -> b (t c) d")
        return mixed

    def init_state(self, batch: int = 1) -> KVBlock:
        """Before the first step."""
        return empty(batch, self.table.weight.device)

    @torch.no_grad()
    def draft(
        self, state: KVBlock, hidden: Tensor, choose: Choose = likeliest
    ) -> tuple[KVBlock, Tensor]:
        """Hidden `[B, 2, D]` of the newest step to the next token of each channel `[B, 2]`."""
        state, logits = self.logits(state, hidden)
        return state, choose(logits[:, :, 0])

    def crop(self, state: KVBlock, seen: Tensor) -> KVBlock:
        """Keep the first `seen` steps of each stream, `[B]`."""
        return crop(state, seen)

    def logits(self, state: KVBlock, hidden: Tensor) -> tuple[KVBlock, Tensor]:
        """Hidden `[B, 2 n, D]`, interleaved, to logits `[B, 2, n, V]` of the steps behind."""
        lift = self.lift.repeat(hidden.shape[1] // 2, 1)
        state, x = self.stack(state, hidden, lift)
        return state, rearrange(self.out(self.norm(x)), "b (n c) v -> b c n v", c=2)

    def loss(self, hidden: Tensor, codes: Tensor) -> CodeLoss:
        """Loss of each channel's next token from its own place; figures per channel.

        `hidden` is `[B, 2 T, D]` of the backbone, which has read `embed(codes)`; `codes` are `[B,
        2, T]`, -100 where there is none.
        """
        logits = self.logits(self.init_state(len(hidden)), hidden)[1]
        return code_loss(logits[:, :, :-1].transpose(1, 2), codes[:, :, 1:].transpose(1, 2))
