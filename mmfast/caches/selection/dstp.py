"""DSTP: visual tokens that were left out come in when the attention to the others has moved."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mmfast.caches.selection.quest import tokens_of
from mmfast.core.errors import SpecError
from mmfast.core.kv import LayerStep, StepChoice, StepSelector
from mmfast.core.registry import policy
from mmfast.ops.pages import marked_places


@policy("dstp", paper="2604.12358", needs=("kind",), role="select", moment="always")
def dstp(budget: int | float, *, similar: float = 0.7, hold: int = 8) -> StepSelector:
    """Read few visual tokens, and for some steps others beside them once their attention moves.

    Kim et al. (2026): what a question needs of a picture shifts while an answer is reasoned out.
    The first step behind a prompt chooses the visual tokens with the most attention. Later steps
    read these alone, and compare their attention to them with that of the first step. Where the
    two are unlike, the tokens left out are asked as well: attention within those read and within
    those left out, each a softmax of its own, is ranked together, and what of the best is not read
    yet is read beside the others for the next steps. All text is read.

    Args:
        budget: Visual tokens to read in every head; a share is of those the layer holds.
        similar: Cosine of the two attentions, heads side by side, below which they are unlike.
        hold: Steps for which the further tokens are read.

    Raises:
        SpecError: A cosine outside [-1, 1], or no step.
    """
    if not -1 <= similar <= 1 or hold < 1:
        raise SpecError(
            f"'dstp' got similar={similar}, hold={hold}; choose a cosine in [-1, 1] and at least 1 "
            "step, as in 'dstp:0.33?similar=0.7&hold=8'"
        )
    return ShiftedTokens(budget, similar, hold)


@dataclass(frozen=True, eq=False)
class TokenSwap:
    """Choice of one step among V visual tokens, and the start of its answer; `[H, V]` each."""

    kept: Tensor  # bool
    attention: Tensor  # of the first step within those kept, 0 elsewhere
    more: Tensor  # bool, read beside them
    left: int = 0  # further steps for which they are


_KNOWN = 24  # steps that are kept, in case entries are taken back


@dataclass(eq=False)
class TokenSwaps:
    """The state of each of the last steps, by its number of entries."""

    made: dict[int, TokenSwap] = field(default_factory=dict)

    def trim(self, entries: int) -> bool:
        """Forget steps that were taken back."""
        self.made = {n: state for n, state in self.made.items() if n <= entries}
        return True

    def add(self, n: int, state: TokenSwap) -> None:
        """Put in a state, and the oldest out."""
        self.made[n] = state
        if len(self.made) > _KNOWN:
            del self.made[min(self.made)]


@dataclass(frozen=True)
class ShiftedTokens:
    """Visual tokens by attention, and others for a while once it has moved."""

    budget: int | float
    similar: float = 0.7
    hold: int = 8
    alone: bool = True  # a row asks again when its own attention has moved
    across: bool = False
    host: bool = False
    beside: float = 0.5  # masks and attention of the last steps, far below a key each

    def check(self, depths: int) -> None:
        """Every layer chooses."""

    def choose(self, step: LayerStep) -> StepChoice:
        """All text, the tokens kept, and those that the attention has moved to."""
        if step.visual is None:
            return StepChoice()
        places = step.visual.nonzero()[:, 0]
        wanted = tokens_of(self.budget, len(places))
        if wanted >= len(places):
            return StepChoice()
        swaps: TokenSwaps = step.memory.setdefault("swaps", TokenSwaps())
        state = swaps.made.get(step.n - 1)  # none behind a prompt, which adds more than an entry
        size = step.keys.shape[1] * step.keys.shape[3] * step.keys.element_size()
        asked = 0
        if state is None or state.kept.shape[1] != len(places):
            state, asked = self._first(step, places, wanted), len(places)
        elif state.left:
            state = replace(state, left=state.left - 1)
        else:
            state, asked = self._later(step, places, state, wanted)
        swaps.add(step.n, state)
        read = (~step.visual).expand(len(state.kept), -1).clone()
        read[:, places] = state.kept | state.more
        if step.stays is not None:
            read |= step.stays
        index, real = marked_places(read[None, :, :-1])
        return StepChoice(index, 1, step.n - 1, real, asked * size)

    def _first(self, step: LayerStep, places: Tensor, wanted: int) -> TokenSwap:
        """The tokens with the most attention, and the attention within them."""
        heads = step.keys.shape[1]
        every = torch.ones(heads, len(places), dtype=torch.bool, device=places.device)
        kept = _best(_within(step, places, every), wanted)
        return TokenSwap(kept, _within(step, places, kept), torch.zeros_like(kept))

    def _later(
        self, step: LayerStep, places: Tensor, state: TokenSwap, wanted: int
    ) -> tuple[TokenSwap, int]:
        """The state of the first step, with more where attention has moved; and keys asked."""
        now = _within(step, places, state.kept)
        cosine = torch.cosine_similarity(now.flatten(), state.attention.flatten(), 0)
        if float(cosine) >= self.similar:
            return replace(state, more=torch.zeros_like(state.kept)), 0
        both = now + _within(step, places, ~state.kept)
        more = _best(both, wanted) & ~state.kept
        return replace(state, more=more, left=self.hold - 1), len(places) - wanted


def _within(step: LayerStep, places: Tensor, mask: Tensor) -> Tensor:
    """Attention `[H, V]` within the tokens of a mask, mean over the heads of a group."""
    logits = (step.query[0] @ step.keys[0, :, places].mT).float().mul_(step.scale)
    return logits.masked_fill_(~mask[:, None], -torch.inf).softmax(-1).mean(1)


def _best(score: Tensor, wanted: int) -> Tensor:
    """Mark the highest of each row `[H, V]`."""
    chosen = score.topk(wanted, sorted=False).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, chosen, True)
