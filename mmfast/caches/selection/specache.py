"""SpeCache: a copy of the keys in few bits tells a step early what to fetch from host memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from mmfast.caches.selection.quest import tokens_of
from mmfast.core.errors import SpecError
from mmfast.core.kv import LayerStep, StepChoice, StepSelector
from mmfast.core.registry import policy
from mmfast.ops.pages import PageTable, key_bounds, level_codes, level_logits


@policy("specache", paper="2503.16163", needs=(), role="select", moment="always")
def specache(budget: int | float, *, bits: int = 2, group: int = 64) -> StepSelector:
    """Keep all in host memory, and fetch what a copy in few bits says the next step will read.

    Jie et al. (ICML 2025): keys and values lie in host memory, and a copy of the keys in few bits
    on the device. At every step the query is compared with the copy, and the tokens with the most
    attention are fetched for the step after it while this one is still computed. A step reads what
    has been fetched for it, and all tokens behind the copy, which has full groups alone. The first
    step behind a prompt chooses, and waits, for itself.

    Args:
        budget: Tokens of the copy to fetch for every head; a share is of the tokens held at the
            step. Those behind the copy, `group` to twice as many, are read beside them.
        bits: Bits of a number in the copy: 4, 2 or 1.
        group: Tokens whose numbers of a channel share their bounds.

    Raises:
        SpecError: Other bits, or a group below 1.
    """
    if bits not in (4, 2, 1) or group < 1:
        raise SpecError(
            f"'specache' got bits={bits}, group={group}; choose 4, 2 or 1 bits and at least 1 "
            "token, as in 'specache:0.1?bits=2&group=64'"
        )
    return GuessedTokens(budget, bits, group)


_KNOWN = 24  # guesses that are kept, in case entries are taken back


@dataclass(eq=False)
class Guesses:
    """Choices that were fetched, by the number of entries of the step they are for."""

    made: dict[int, StepChoice] = field(default_factory=dict)

    def trim(self, entries: int) -> bool:
        """Forget the guesses of queries that were taken back."""
        self.made = {n: guess for n, guess in self.made.items() if n <= entries + 1}
        return True

    def add(self, n: int, guess: StepChoice) -> None:
        """Put in a guess, and the oldest out."""
        self.made[n] = guess
        if len(self.made) > _KNOWN:
            del self.made[min(self.made)]


@dataclass(frozen=True)
class GuessedTokens:
    """Tokens by attention to a copy in few bits, one step ahead."""

    budget: int | float
    bits: int = 2
    group: int = 64
    alone: bool = False
    across: bool = False
    host: bool = True
    beside: float = 0.25  # keys in few bits

    def check(self, depths: int) -> None:
        """Every layer chooses."""

    def choose(self, step: LayerStep) -> StepChoice:
        """The guess of the step before, or without one the choice of the query itself."""
        count = (step.n - 1) // self.group * self.group  # tokens of the copy
        wanted = tokens_of(self.budget, step.n)
        if wanted >= count:
            return StepChoice()
        likely = self._likely(step, count, wanted)
        guesses: Guesses = step.memory.setdefault("guesses", Guesses())
        chosen = guesses.made.get(step.n, likely)
        guesses.add(step.n + 1, likely)
        return replace(chosen, ahead=likely, nbytes=likely.nbytes)

    def _likely(self, step: LayerStep, count: int, wanted: int) -> StepChoice:
        """The tokens `[B, H, k]` with the most attention, mean over the heads of a group."""
        groups, device = count // self.group, step.query.device
        tables = step.memory
        bounds = tables.setdefault("bounds", PageTable(self.group, key_bounds))
        bounds = bounds.grow(step.keys, groups, device)
        codes = tables.setdefault("codes", PageTable(self.group, self._codes))
        codes = codes.grow(step.keys, groups, device)
        logits = level_logits(step.query, codes, bounds, self.group, self.bits)
        score = logits.mul_(step.scale).softmax(-1).mean(2)  # [B, H, count]
        if step.stays is not None:
            stays = step.stays[:count]
            score = score.masked_fill(stays, torch.inf)
            wanted = min(count, wanted + int(stays.sum()))
        chosen = score.topk(wanted, sorted=False).indices
        nbytes = codes.numel() + bounds.numel() * bounds.element_size()
        return StepChoice(chosen, 1, count, nbytes=nbytes)

    def _codes(self, pages: torch.Tensor) -> torch.Tensor:
        return level_codes(pages, self.bits)
