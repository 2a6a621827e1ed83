"""What a head needs of its language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from mmfast.ops.row_cache import Place, Placer, Slot

# Given the logits [B, rows] of draft i, the tokens [B] to draft behind; None ends it.
Pick = Callable[[Tensor, int], Tensor | None]
Block = Callable[[Tensor, Slot, Place], Tensor]
Rows = slice


class Trunk(Protocol):
    """What a head needs of its language model; `mmfast.models.backbone.Backbone` is one."""

    width: int
    placer: Placer

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings `[.., D]` of ids `[..]`."""

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm."""

    def logits(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Logits `[.., rows]` of normed hidden states `[.., D]`."""

    def new_layer(self, ffn: int | None = None) -> nn.Module:
        """A decoder layer of the model's own class, its inner width `ffn` where given."""

    def new_norm(self) -> nn.Module:
        """A norm of the model's own class."""

    def new_output(self) -> nn.Module:
        """An output matrix of its own, a copy of the model's to begin with."""

    def block(self, layer: nn.Module) -> Block:
        """The layer as it is called on pieces of streams."""

    def normer(self, norm: nn.Module) -> Callable[[Tensor], Tensor]:
        """The norm as it is called on pieces of streams."""

    def entry(self, norms: Sequence[nn.Module], linear: nn.Module) -> Callable[[Tensor], Tensor]:
        """A linear layer on inputs `[.., k D]` side by side, each through its own norm."""

    def whole(self, layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        """The layer on whole sequences `[B, T, D]`, causal, differentiable."""
