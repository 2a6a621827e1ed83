"""Multi-token prediction, VocalNet (arXiv 2504.04060).

Modules in a row, each fed by the hidden state of the one before it and by no token: the drafts of
one pass do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from mmfast.core.registry import register
from mmfast.heads.base import AudioHead, HeadState, Rows, Trunk


@register("mtp", kind="head", paper="2504.04060", needs=("hidden",), sites=("time",))
class Mtp(AudioHead):
    """Independent draft modules, fed by the hidden state before them alone (VocalNet).

    Module k is a decoder layer on the states of module k - 1 before any norm, with a norm of its
    own; the loss of the k-th module, counted from 1, weighs 0.8^k. With `own_output` every module
    has an output matrix of its own, as published; else they share the backbone's, which costs no
    bytes. Other arguments are those of `AudioHead`.
    """

    name: ClassVar[str] = "mtp"
    reads: ClassVar[str] = "raw"

    def __init__(
        self, trunk: Trunk, modules: int = 5, *, own_output: bool = False, **options: Any
    ) -> None:
        super().__init__(trunk, modules, **options)
        self.config["own_output"] = own_output
        self.norms = nn.ModuleList(trunk.new_norm() for _ in range(modules))
        self.outputs = nn.ModuleList()
        if own_output:
            self.outputs.extend(trunk.new_output() for _ in range(modules))
        self._norms: list[Callable[[Tensor], Tensor]] = []

    def weights(self) -> list[float]:
        """0.8^k for the k-th module, counted from 1."""
        return [0.8 ** (k + 1) for k in range(self.modules_count)]

    def forward(self, hidden: Tensor, embeds: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """See `AudioHead.forward`; the embeddings only say how long the sequences are."""
        found = []
        for k, layer in enumerate(self.layers):
            n = embeds.shape[1] - 1 - k
            if n < 1:
                break
            cut = None if mask is None else mask[..., :n, :n]
            hidden = self.trunk.whole(layer, hidden[:, :n], cut)
            found.append(self.norms[k](hidden))
        return found

    def output(self, module: int, states: Tensor, rows: Rows) -> Tensor:
        """See `AudioHead.output`."""
        if len(self.outputs):
            return nn.functional.linear(states, _weight(self.outputs[module])[rows])
        return self.trunk.logits(states, rows)

    def _prepare(self) -> None:
        self._norms = [self.trunk.normer(norm) for norm in self.norms]

    def _enter(
        self, state: HeadState, module: int, hidden: Tensor, starts: list[int], n: int
    ) -> Tensor:
        return hidden

    def _enter_alone(self, module: int, token: Tensor, hidden: Tensor) -> Tensor:
        return hidden

    def _leave(self, module: int, raw: Tensor) -> tuple[Tensor, Tensor]:
        return raw, self._norms[module](raw)


def _weight(output: Any) -> Tensor:
    weight: Tensor = output.weight
    return weight
