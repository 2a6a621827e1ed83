"""Acceptance of drafts, the token at the first one that is refused, and counts of both.

The rule of exact sampling is that of speculative sampling (arXiv 2211.17192, 2302.01318): a draft
d stands with probability min(1, p(d) / q(d)); behind the first that falls a token of
norm(max(p - q, 0)) is said, behind the last a token of p. What is said is then distributed as p
alone, whatever q is. The typical rule is that of Medusa (arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmfast.core.errors import SpecError, unknown
from mmfast.decoding.sampling import draw


@dataclass(frozen=True)
class AcceptRule:
    """Rule that verifies drafts: `none`, `exact`, or `typical` with its `epsilon`."""

    kind: str
    epsilon: float = 0.0


def parse_rule(spec: str | AcceptRule) -> AcceptRule:
    """Read `none`, `exact` or `typical:ε` with ε in (0, 1); else SpecError."""
    if isinstance(spec, AcceptRule):
        return spec
    kind, colon, number = str(spec).partition(":")
    if kind in ("none", "exact") and not colon:
        return AcceptRule(kind)
    try:
        epsilon = float(number) if colon else 0.3
    except ValueError:
        epsilon = -1.0
    if kind != "typical" or not 0 < epsilon < 1:
        raise SpecError(
            f"{unknown('verify', spec, ('none', 'exact', 'typical:0.3'))}, with a number between "
            "0 and 1"
        )
    return AcceptRule(kind, epsilon)


def accept_greedy(drafts: Tensor, best: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Keep drafts `[B, n]` while they are the likeliest tokens.

    `best` `[B, n + 1]` are the backbone's choices at the same places and behind them, `counts`
    `[B]` the drafts of each stream. Returns accepted drafts `[B]`, and the token behind them `[B]`.
    """
    accepted = _leading(drafts == best[:, :-1], counts)
    return accepted, best.gather(1, accepted[:, None]).squeeze(1)


def accept_sampled(
    drafts: Tensor, p: Tensor, q: Tensor, counts: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Keep drafts so that what is said is distributed as the backbone alone would say it.

    Drafts `[B, n]` were drawn from q `[B, n, V]`; p `[B, n + 1, V]` are probabilities of the
    backbone, processed alike, place i given the drafts before it; `counts` `[B]` are the drafts of
    each stream. u `[B, n]` in [0, 1) decides on drafts, v `[B]` on the token behind. The result is
    as of `accept_greedy`.
    """
    at = drafts[..., None]
    stand = u * q.gather(-1, at).squeeze(-1) < p[:, :-1].gather(-1, at).squeeze(-1)
    accepted = _leading(stand, counts)
    here = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    wanted = p.gather(1, here).squeeze(1)  # [B, V]
    if drafts.shape[1]:
        drafted = q.gather(1, here.clamp(max=drafts.shape[1] - 1)).squeeze(1)
        rest = (wanted - drafted).clamp_(min=0)
        # Where p is q up to rounding nothing is left, and p is as good.
        fell = (accepted < counts) & (rest.sum(-1) > 0)
        wanted = torch.where(fell[:, None], rest, wanted)
    return accepted, draw(wanted, v)


def accept_among(
    drafts: Sequence[int], p: Tensor, q: Tensor, u: Tensor, v: Tensor
) -> tuple[int, int]:
    """Keep one of several drafts for the same place, or none, so that p alone is said.

    Drafts `[k]` were drawn in turn, each from its row of q `[k, V]`, which may be zero at those
    before it; p `[V]` are probabilities of the backbone. Rejection in rounds (SpecInfer, arXiv
    2305.09781; for draws without replacement DySpec, arXiv 2410.11744): behind a draft that falls,
    norm(max(p - q, 0)) takes the place of p for the next. u `[k]` in [0, 1) decides on drafts, v
    `[1]` on the token where all fall. Returns the place of the draft that stands, k where none
    does, and the token.
    """
    wanted = p
    for place, draft in enumerate(drafts):
        if bool(u[place] * q[place, draft] < wanted[draft]):
            return place, draft
        rest = (wanted - q[place]).clamp_(min=0)
        total = rest.sum()
        if not total > 0:  # p is q up to rounding, and as good
            break
        wanted = rest / total
    return len(drafts), int(draw(wanted[None], v))


def accept_close(
    drafts: Tensor, logits: Tensor, most: float, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Keep drafts while the backbone finds them not too unlikely: they may not be its own words.

    A draft stands where its cross-entropy `-log p(d)` is at most `most` nats: the rollback of BiLD
    (arXiv 2302.07863). Up to `log 2` only likeliest tokens stand. Drafts `[B, n]` and `logits`
    `[B, n + 1, V]`; the result is as of `accept_greedy`.
    """
    losses = -logits[:, :-1].log_softmax(-1).gather(-1, drafts[..., None]).squeeze(-1)
    accepted = _leading(losses <= most, counts)
    return accepted, logits.argmax(-1).gather(1, accepted[:, None]).squeeze(1)


def accept_typical(drafts: Tensor, p: Tensor, epsilon: float) -> int:
    """Count the drafts `[n]` of a stream that are likely enough for how open the place is.

    A draft stands where `p(d) >= min(epsilon, sqrt(epsilon) * exp(-H(p)))`: the more certain the
    backbone, the likelier a draft must be. `p` `[n, V]` are probabilities of the backbone.
    """
    chances = p.gather(-1, drafts[:, None]).squeeze(-1)
    stand: list[bool] = (chances >= epsilon).tolist()  # however open the place is
    below = [i for i, stands in enumerate(stand) if not stands]
    if not below:
        return len(stand)
    entropy = torch.special.entr(p[below]).sum(-1)
    stand = (chances[below] >= entropy.neg_().exp_().mul_(epsilon**0.5)).tolist()
    return len(p) if all(stand) else below[stand.index(False)]


def _leading(stand: Tensor, counts: Tensor) -> Tensor:
    places = torch.arange(stand.shape[1], device=stand.device)
    return (stand & (places < counts[:, None])).long().cumprod(1).sum(1)


@dataclass(frozen=True)
class PassStats:
    """Tokens that one pass of the backbone, and the drafts behind it, made certain.

    `tokens` now stand, in order, without forced ones; `accepted` drafts are among them. `passes`
    are those of the backbone, `draft_passes` those of draft modules; `forced` counts forced tokens
    that were put in.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    passes: int
    draft_passes: int
    forced: int = 0


@dataclass
class Stats:
    """Sums over the steps of one stream.

    `tokens` are chosen by the backbone or a module. `by_place` has per draft number, from 0, how
    many were verified and how many stood (a draft behind one that fell is not verified); `by_book`
    the same per codebook. `widths` counts main passes by the tokens they read.
    """

    tokens: int = 0
    forced: int = 0
    passes: int = 0
    draft_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    by_place: list[list[int]] = field(default_factory=list)
    by_book: dict[int, list[int]] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)

    def add(self, step: PassStats) -> None:
        """Count a step."""
        self.tokens += len(step.tokens)
        for name in ("forced", "passes", "draft_passes", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(step, name))

    def verified(self, place: int, book: int | None, stood: bool) -> None:
        """Count a draft that was verified."""
        while len(self.by_place) <= place:
            self.by_place.append([0, 0])
        counters = [self.by_place[place]]
        if book is not None:
            counters.append(self.by_book.setdefault(book, [0, 0]))
        for counter in counters:
            counter[0] += 1
            counter[1] += stood

    @property
    def acceptance(self) -> float:
        """Share of the verified drafts that stood; 1 where nothing is verified."""
        tried = sum(tries for tries, _ in self.by_place)
        return sum(stood for _, stood in self.by_place) / tried if tried else 1.0
