"""Multiple cross-modal token prediction, VITA-Audio (arXiv 2505.03739).

Chained modules: each reads the token before the one it guesses, drafted by the module before it,
beside that module's hidden state. They share the backbone's final norm, embedding and output head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.core.registry import register
from mmfast.heads.base import AudioHead, HeadState, Trunk, gather


@register("mctp", kind="head", paper="2505.03739", needs=("hidden",), sites=("time",))
class Mctp(AudioHead):
    """Chained draft modules, each reading the token drafted before it (VITA-Audio).

    Module k: `x = proj([norm_e(E(token t+k+1)); norm_h(H_k)])`, one decoder layer, the backbone's
    final norm gives `H_(k+1)` and, through its output head, the guess of token t + k + 2. Behind
    the last module it runs again, fed by itself, `repeats` times (as in EAGLE, arXiv 2401.15077):
    its weights are read once more and are no others. The other arguments are those of `AudioHead`.
    """

    name: ClassVar[str] = "mctp"
    reads: ClassVar[str] = "normed"

    def __init__(
        self, trunk: Trunk, modules: int = 10, *, repeats: int = 0, **options: Any
    ) -> None:
        super().__init__(trunk, modules, **options)
        if repeats < 0:
            raise ModelError(f"a head whose last module repeats {repeats} times; use 0 or more")
        self.config["repeats"], self.repeats = repeats, repeats
        self.modules_count += repeats
        width = trunk.width
        like = next(self.layers.parameters())
        self.norms_e = nn.ModuleList(trunk.new_norm() for _ in range(modules))
        self.norms_h = nn.ModuleList(trunk.new_norm() for _ in range(modules))
        projs = [
            nn.Linear(2 * width, width, bias=False, device=like.device, dtype=like.dtype)
            for _ in range(modules)
        ]
        self.projs = nn.ModuleList(projs)
        with torch.no_grad():  # both halves get through at first
            for proj in projs:
                both = torch.eye(width, dtype=like.dtype, device=like.device).repeat(1, 2)
                proj.weight.mul_(0.1).add_(both, alpha=0.7)
        self._entries: list[Callable[[Tensor], Tensor]] = []

    def weights(self) -> list[float]:
        """Every module counts the same: 1 / K."""
        return [1 / self.modules_count] * self.modules_count

    def forward(self, hidden: Tensor, embeds: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """See `AudioHead.forward`."""
        found = []
        for k in range(min(self.modules_count, embeds.shape[1] - 1)):
            n, part = embeds.shape[1] - 1 - k, min(k, len(self.layers) - 1)
            pair = self.norms_e[part](embeds[:, k + 1 :]), self.norms_h[part](hidden[:, :n])
            x = self.projs[part](torch.cat(pair, -1))
            cut = None if mask is None else mask[..., :n, :n]
            hidden = self.trunk.norm(self.trunk.whole(self.layers[part], x, cut))
            found.append(hidden)
        return found

    def _prepare(self) -> None:
        self._entries = [
            self.trunk.entry((e, h), proj)
            for e, h, proj in zip(self.norms_e, self.norms_h, self.projs, strict=True)
        ]
        parts = zip(self.norms_e, self.norms_h, self.projs, self._blocks, strict=True)
        lone = [self.trunk.lone((e, h), proj, block) for e, h, proj, block in parts]
        self._lone = [each for each in lone if each is not None] if self.window == 1 else []
        self._blocks += self._blocks[-1:] * self.repeats
        self._entries += self._entries[-1:] * self.repeats
        self._lone += self._lone[-1:] * self.repeats

    def _take(self, state: HeadState, module: int, token: Tensor) -> None:
        embeds = self.trunk.embed(token)
        for row, length in enumerate(state.length):
            state.embeds[row, length + module] = embeds[row]

    def _enter(
        self, state: HeadState, module: int, hidden: Tensor, starts: list[int], n: int
    ) -> Tensor:
        embeds = gather(state.embeds, starts, n, module + 1)
        return self._entries[module](torch.cat((embeds, hidden), -1))

    def _enter_alone(self, module: int, token: Tensor, hidden: Tensor) -> Tensor:
        return self._entries[module](torch.cat((self.trunk.embed(token), hidden), -1))

    def _leave(self, module: int, raw: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.trunk.norm(raw)
        return normed, normed
