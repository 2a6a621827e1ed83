"""TokenSelect: all heads vote on the tokens that a query needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.caches.selection.quest import tokens_of
from mmfast.core.kv import LayerStep, StepChoice, StepSelector
from mmfast.core.registry import policy


@policy("tokenselect", paper="2411.02886", needs=(), role="select", moment="always")
def tokenselect(budget: int | float, *, similar: float = 0.9) -> StepSelector:
    """Read at every step the tokens to which all heads together attend most.

    Wu et al. (EMNLP 2025): the attention of every query head is a soft vote, votes are added over
    the heads of a layer, and all heads read the tokens with the most. Every head has one vote for
    the tokens that are not read anyway. A query that is like the one
    of the last vote reads what that has chosen, and what has come since; then no keys are read in
    order to choose. The first and latest tokens, which the paper always reads, are `sink` and
    `window` beside it: `sink:128+window:512+tokenselect:0.1`.

    Args:
        budget: Tokens to read; a share is of the tokens held at the step. The newest one is read
            beside them.
        similar: Cosine, heads side by side, from which on a query is like that of the last vote;
            above 1 there is a vote at every step.
    """
    return SoftVotes(budget, similar)


@dataclass(eq=False)
class LastVote:
    """The query `[1, H, G, d]` of a vote, the tokens `[1, 1, k]` chosen and those there were."""

    query: Tensor
    tokens: Tensor
    n: int

    def trim(self, entries: int) -> bool:
        """A vote among tokens that were taken back is void."""
        return self.n <= entries


@dataclass(frozen=True)
class SoftVotes:
    """Tokens by attention, summed over the heads of a layer."""

    budget: int | float
    similar: float = 0.9
    alone: bool = True  # each row votes when its own query has changed
    across: bool = False
    host: bool = False
    beside: float = 0.125  # places of the last vote

    def check(self, depths: int) -> None:
        """Every layer chooses."""

    def choose(self, step: LayerStep) -> StepChoice:
        """The tokens of the last vote, or of a new one."""
        count, wanted = step.n - 1, tokens_of(self.budget, step.n)
        if wanted >= count:
            return StepChoice()
        last: LastVote | None = step.memory.get("vote")
        if last is not None and last.n < step.n and self._like(step.query, last.query):
            since = torch.arange(last.n - 1, count, device=last.tokens.device)
            return StepChoice(torch.cat([last.tokens, since.expand(1, 1, -1)], -1), tail=count)
        away = torch.arange(step.n, device=step.query.device) == count
        if step.stays is not None:  # what is read anyway takes no part of a head's vote
            away |= step.stays
        votes = attention_votes(step, away).sum((1, 2))  # [1, n]
        tokens = most_voted(votes[:, None], step, wanted)
        step.memory["vote"] = LastVote(step.query, tokens, step.n)
        return StepChoice(tokens, tail=count, nbytes=keys_read(step))

    def _like(self, one: Tensor, other: Tensor) -> bool:
        a, b = one.flatten().float(), other.flatten().float()
        return bool(torch.dot(a, b) >= self.similar * a.norm() * b.norm())


def attention_votes(step: LayerStep, away: Tensor | None = None) -> Tensor:
    """Attention `[B, H, G, n]` of every query head to the entries not `away` `[n]`, float32."""
    logits = (step.query @ step.keys.transpose(2, 3)).float().mul_(step.scale)
    return (logits if away is None else logits.masked_fill_(away, -torch.inf)).softmax(-1)


def most_voted(votes: Tensor, step: LayerStep, wanted: int) -> Tensor:
    """Places `[B, 1 or H, k]` of the most votes `[B, 1 or H, n]` and of those that stay.

    The newest entry does not take part.
    """
    votes = votes[..., :-1]
    if step.stays is not None:
        stays = step.stays[:-1]
        votes = votes.masked_fill(stays, torch.inf)
        wanted = min(votes.shape[-1], wanted + int(stays.sum()))
    return votes.topk(wanted, sorted=False).indices


def keys_read(step: LayerStep) -> int:
    """Bytes of all keys."""
    return step.keys.numel() * step.keys.element_size()
