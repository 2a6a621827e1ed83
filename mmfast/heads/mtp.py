"""Multi-token prediction, VocalNet (arXiv 2504.04060).

Modules in a row, each fed by the hidden state of the one before it and by no token: the drafts of
one pass do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.errors import ModelError
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

    def seed_from(self, module: int) -> None:
        """Start the module behind `module` as its copy, norm and output matrix too."""
        super().seed_from(module)
        for parts in (self.norms, self.outputs):
            if len(parts):
                parts[module + 1].load_state_dict(parts[module].state_dict())

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


IGNORED = -100


@dataclass(frozen=True, eq=False)
class HeadLoss:
    """Result of a training step of a head: the weighted sum, and detached figures per module.

    `terms` has the mean cross-entropy, `right` the share of labels that the best guess is.
    """

    loss: Tensor
    terms: list[float]
    right: list[float]


def head_loss(
    head: AudioHead,
    hidden: Tensor,
    embeds: Tensor,
    labels: Tensor,
    *,
    segments: Tensor | None = None,
    rows: slice | None = None,
    teacher: Tensor | None = None,
    share: float = 1.0,
) -> HeadLoss:
    """The loss of a head on whole sequences; the backbone gets no gradient.

    `hidden` (as `head.reads` says) and `embeds` are `[B, T, D]`; `labels` `[B, T]` are the tokens
    at every place, within `rows`, -100 where none is to be guessed. `segments` `[B, T]` number the
    sequences that are packed into a row: they do not see each other. `teacher` `[B, T, rows]` are
    logits of the backbone, whose place t is about token t + 1: the modules then also learn to say
    what the backbone would, with a share of the loss in [0, 1]; 1 is the teacher alone. ModelError:
    shapes do not fit, or no label is there.
    """
    if labels.shape != hidden.shape[:2] or embeds.shape != hidden.shape:
        raise ModelError(
            f"hidden states {list(hidden.shape)}, embeddings {list(embeds.shape)} and labels "
            f"{list(labels.shape)} differ; they are [B, T, D], [B, T, D] and [B, T]"
        )
    mask = None
    if segments is not None or head.window:
        alone = labels.new_zeros(labels.shape) if segments is None else segments
        mask = packed_mask(alone, hidden.dtype, head.window)
    total = hidden.new_zeros(())
    terms, right = [], []
    for k, states in enumerate(head(hidden.detach(), embeds.detach(), mask)):
        chosen, target = _places(labels, segments, k)
        if not chosen.any():
            continue
        logits = head.output(k, states[:, : chosen.shape[1]][chosen], rows or slice(None))
        target = target[chosen] - (0 if rows is None else rows.start or 0)
        hard = F.cross_entropy(logits.float(), target)
        term = hard
        if teacher is not None:
            soft = teacher[:, k + 1 : k + 1 + chosen.shape[1]][chosen].float().softmax(-1)
            term = (1 - share) * hard + share * F.cross_entropy(logits.float(), soft)
        total = total + head.weights()[k] * term
        terms.append(float(hard.detach()))
        right.append(float((logits.argmax(-1) == target).float().mean()))
    if not terms:
        raise ModelError("no label behind the second token; use longer sequences or fewer -100")
    return HeadLoss(total, terms, right)


def _places(labels: Tensor, segments: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """Places `[B, T - k - 2]` that module k guesses at, and the tokens there."""
    n = max(0, labels.shape[1] - k - 2)
    target = labels[:, k + 2 :]
    chosen = target != IGNORED
    if segments is not None:
        chosen = chosen & (segments[:, :n] == segments[:, k + 2 :])
    return chosen, target


def packed_mask(segments: Tensor, dtype: torch.dtype, window: int = 0) -> Tensor:
    """`[B, 1, T, T]` added to scores: causal, each sequence of a row by itself."""
    n = segments.shape[1]
    near = torch.ones(n, n, dtype=torch.bool, device=segments.device).tril()
    if window:
        near = near.triu(1 - window)
    seen = (segments[:, :, None] == segments[:, None]) & near
    mask = torch.zeros(seen.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
