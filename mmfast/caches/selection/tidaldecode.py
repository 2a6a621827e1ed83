"""TidalDecode: a few layers choose the tokens that all layers behind them read."""

from __future__ import annotations

from dataclasses import dataclass

from mmfast.caches.selection.quest import tokens_of
from mmfast.caches.selection.tokenselect import attention_votes, keys_read, most_voted
from mmfast.core.errors import SpecError
from mmfast.core.kv import LayerStep, StepChoice, StepSelector
from mmfast.core.registry import policy


@policy("tidaldecode", paper="2410.05076", needs=(), role="select", moment="always")
def tidaldecode(budget: int | float, *, skip: int = 2, again: float = 0.5) -> StepSelector:
    """Read in most layers the tokens to which an earlier layer attends most at the same step.

    Yang et al. (ICLR 2025): consecutive layers attend to the same places. The first layers read
    everything; the next one does, too, and chooses in every head the tokens with the most
    attention, mean over the query heads that share a key head. All later layers read these, until a
    layer in the middle reads everything and chooses anew. So does a layer that holds other entries
    than the one that chose, behind a cut of the prompt between the two.

    Args:
        budget: Tokens to read in every head; a share is of the tokens held at the step. The newest
            one is read beside them.
        skip: Layers at the start that read everything and choose nothing.
        again: Relative depth in [0, 1) of the layer that chooses anew; 0 is none.

    Raises:
        SpecError: A negative skip, or a depth outside [0, 1).
    """
    if skip < 0 or not 0 <= again < 1:
        raise SpecError(
            f"'tidaldecode' got skip={skip}, again={again}; choose at least 0 layers and a depth "
            "in [0, 1), as in 'tidaldecode:0.1?skip=2&again=0.5'"
        )
    return EarlierLayers(budget, skip, again)


@dataclass(frozen=True)
class EarlierLayers:
    """Tokens by the attention of an earlier layer."""

    budget: int | float
    skip: int = 2
    again: float = 0.5
    alone: bool = False
    across: bool = True
    host: bool = False
    beside: float = 0.0

    def check(self, depths: int) -> None:
        """Refuse a model in which no layer follows the one that chooses."""
        if self.skip + 1 >= depths:
            raise SpecError(
                f"'tidaldecode' with skip={self.skip} chooses in layer {self.skip + 1} of full "
                f"attention, and this model has {depths}; write 'tidaldecode:0.1?skip=0'"
            )

    def choose(self, step: LayerStep) -> StepChoice:
        """Choose in layers that read everything, else what the last of them chose."""
        wanted, count = tokens_of(self.budget, step.n), step.n - 1
        if step.depth < self.skip or wanted >= count:
            return StepChoice()
        again = max(self.skip, round(self.again * step.depths))
        # deeper layers lose entries only, so that as many are the same ones
        if step.depth in (self.skip, again) or step.shared.get("n") != step.n:
            votes = attention_votes(step).mean(2)  # [B, H, n]
            step.shared |= {"tokens": most_voted(votes, step, wanted), "n": step.n}
            return StepChoice(nbytes=keys_read(step))
        return StepChoice(step.shared["tokens"], tail=count)
