"""What drafting and checking the codes of a frame needs: a depth transformer, a choice, drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Depth(Protocol):
    """A depth transformer: a head of mmfast, or the one of Moshi or CSM."""

    @property
    def codes(self) -> int:
        """K, the codes that its passes predict."""

    @property
    def size(self) -> int:
        """V, entries per codebook."""

    def begin(self, hidden: Tensor) -> Any:
        """Working memory for frames of hidden states `[B, D]`."""

    def run(self, frame: Any, tokens: Tensor, at: int) -> Tensor:
        """Tokens `[B, n]` in front of the codes at, at + 1, … to their logits `[B, n, V]`."""


class Choice(Protocol):
    """How a code is chosen from logits."""

    @property
    def greedy(self) -> bool:
        """The likeliest is taken."""

    def probs(self, logits: Tensor) -> Tensor:
        """Logits `[..., V]` to the probabilities that codes are drawn from."""

    def draw(self, probs: Tensor) -> Tensor:
        """Probabilities `[..., V]` to codes `[...]`."""

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers in [0, 1) of that shape."""


@dataclass(frozen=True, eq=False)
class Drafts:
    """Proposed codes of one frame.

    Attributes:
        codes: `[B, K]`.
        probs: `[B, K, V]` what they were drawn from, independently of each other; None where
            they are certain (a copy).
    """

    codes: Tensor
    probs: Tensor | None = None


# (hidden [B, D], first [B], codes of the frame before [B, K], how codes are chosen) -> drafts
Drafter = Callable[[Tensor, Tensor, Tensor, Choice], Drafts]


def parallel(guess: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Drafter:
    """A drafter out of a network that gives logits `[B, K, V]` of all codes at once.

    Args:
        guess: (hidden `[B, D]`, first `[B]`, codes of the frame before `[B, K]`) to logits, as
            `heads.code_mlp.CodeMlp.guess` or `heads.groups.GroupsHead.guess`.
    """

    def draft(hidden: Tensor, first: Tensor, before: Tensor, choice: Choice) -> Drafts:
        logits = guess(hidden, first, before)
        if choice.greedy:
            return Drafts(logits.argmax(-1))
        probs = choice.probs(logits)
        return Drafts(choice.draw(probs), probs)

    return draft
