"""All codes of a frame drafted at once and checked by one pass of the depth transformer.

A depth transformer (Moshi arXiv 2410.00037, CSM) defines a frame's codes one after the other:
K small passes. Here a drafter proposes all K, one teacher-forced pass gives what the depth
transformer says at every codebook, and the rejection rule of speculative sampling
(arXiv 2302.01318) along the codebooks keeps the output what it was: the same codes when greedy,
the same distribution when sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.decoding.accept import accept_greedy, accept_sampled
from mmfast.decoding.codebook_plan import BlockPlan, FrameCount
from mmfast.decoding.codebook_types import Choice, Depth, Drafter, Drafts


def copy_frame(_hidden: Tensor, _first: Tensor, before: Tensor, _choice: Choice) -> Drafts:
    """The codes of the frame before, again: costs nothing."""
    return Drafts(before)


def pick(logits: Tensor, choice: Choice) -> Tensor:
    """Logits `[..., V]` to codes `[...]`."""
    return logits.argmax(-1) if choice.greedy else choice.draw(choice.probs(logits))


@torch.no_grad()
def one_by_one(
    depth: Depth, hidden: Tensor, first: Tensor, choice: Choice, count: FrameCount | None = None
) -> Tensor:
    """The codes `[B, K]` of a frame, a pass each: what every faster way must agree with."""
    frame = depth.begin(hidden)
    token, codes = first, []
    for at in range(depth.codes):
        token = pick(depth.run(frame, token[:, None], at)[:, 0], choice)
        codes.append(token)
        if count is not None:
            count.ran(1)
    if count is not None:
        count.frames += len(first)
    return torch.stack(codes, dim=1)


@torch.no_grad()
def draft_and_check(
    depth: Depth,
    hidden: Tensor,
    first: Tensor,
    drafts: Drafts,
    choice: Choice,
    plan: BlockPlan | None = None,
    count: FrameCount | None = None,
) -> Tensor:
    """The codes of a frame with as few passes as the drafts allow.

    Where a code is refused, the pass itself has already said what it would put behind: that is
    the draft for the rest. `plan` decides how many codes the next pass takes, down to one.

    Args:
        depth: The depth transformer.
        hidden: `[B, D]` of the backbone.
        first: `[B]` the token in front of the codes.
        drafts: Of any drafter.
        choice: Greedy, or the processors that the probabilities of both sides go through.
        plan: How many codes a pass takes; None takes all that are left.
        count: Counts passes and acceptance per codebook.

    Returns:
        `[B, K]`.
    """
    plan = plan or BlockPlan(depth.codes)
    frame = depth.begin(hidden)
    line = _Line(depth, first, drafts, choice)
    while line.at < depth.codes:
        n = plan.length(line.at, len(first), line.again)
        logits = depth.run(frame, line.tokens[:, line.at : line.at + n], line.at)
        line.settle(logits, plan, count)
    if count is not None:
        count.frames += len(first)
    return line.tokens[:, 1:]


class _Line:
    """The codes of one frame on their way from drafted to settled, several streams abreast."""

    def __init__(self, depth: Depth, first: Tensor, drafts: Drafts, choice: Choice) -> None:
        self.choice = choice
        self.tokens = torch.cat([first[:, None], drafts.codes], dim=1)  # [B, K + 1]
        self.odds = None if choice.greedy else _odds(drafts, depth.size)  # [B, K, V]
        self.done = torch.zeros_like(first)  # [B] codes that are settled
        self.original = torch.ones_like(drafts.codes, dtype=torch.bool)  # [B, K]
        self.place = torch.arange(depth.codes, device=first.device)
        self.at = 0  # the first code that some stream still needs
        self.again = False

    def settle(self, logits: Tensor, plan: BlockPlan, count: FrameCount | None) -> None:
        """Take what a pass says `[B, n, V]` of the codes at, at + 1, …."""
        at, n = self.at, logits.shape[1]
        place, drafted = self.place[:n], self.tokens[:, at + 1 : at + n + 1]  # a view
        held = place < (self.done - at)[:, None]  # [B, n] settled by an earlier pass
        if self.odds is None:
            says = logits.argmax(-1)
            lead, instead = _greedy(drafted, says, held)
        else:
            probs, odds = self.choice.probs(logits), self.odds[:, at : at + n]
            says = self.choice.draw(probs)
            lead, instead = _sampled(drafted, probs, odds, held, self.choice)
        behind, here = place > lead[:, None], place == lead[:, None]
        self._note(held, lead, plan, count)
        if self.odds is not None:
            self.odds[:, at : at + n] = torch.where(behind[..., None], probs, odds)
        drafted.copy_(torch.where(behind, says, torch.where(here, instead[:, None], drafted)))
        self.original[:, at : at + n] &= ~behind
        self.done = torch.maximum(self.done, at + (lead + 1).clamp(max=n))
        self.at = int(self.done.min())
        self.again = True

    def _note(self, held: Tensor, lead: Tensor, plan: BlockPlan, count: FrameCount | None) -> None:
        n = held.shape[1]
        if count is not None:
            count.ran(n)
        elif plan.share <= 0:
            return  # nobody asks
        checked = ~held & (self.place[:n] <= lead[:, None])
        right = self.place[:n] < lead[:, None]
        original = self.original[:, self.at : self.at + n]
        masks = [checked & original, checked & ~original]
        sums = torch.stack([m.sum(0) for mask in masks for m in (mask, mask & right)]).tolist()
        plan.learn(False, self.at, sums[0], sums[1])
        plan.learn(True, self.at, sums[2], sums[3])
        if count is not None:
            where = slice(self.at, self.at + n)
            count.drafted[where] += torch.tensor(sums[0])
            count.accepted[where] += torch.tensor(sums[1])


def _greedy(drafted: Tensor, says: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """The first code that is refused `[B]` (n: none), and what stands there instead `[B]`."""
    best = torch.where(held, drafted, says)
    return accept_greedy(drafted, F.pad(best, (0, 1)), _all(drafted))


def _sampled(
    drafted: Tensor, probs: Tensor, odds: Tensor, held: Tensor, choice: Choice
) -> tuple[Tensor, Tensor]:
    """As `_greedy`; codes that are settled already are certain on both sides."""
    sure = F.one_hot(drafted, probs.shape[-1]).to(probs.dtype)
    p, q = (torch.where(held[..., None], sure, x) for x in (probs, odds))
    u, v = choice.uniform(p[..., 0]), choice.uniform(p[:, 0, 0])
    # Behind the last draft nothing is said: what would be is not asked for here.
    return accept_sampled(drafted, torch.cat([p, p[:, -1:]], dim=1), q, _all(drafted), u, v)


def _all(drafted: Tensor) -> Tensor:
    return torch.full_like(drafted[:, 0], drafted.shape[1])


def _odds(drafts: Drafts, size: int) -> Tensor:
    if drafts.probs is not None:
        return drafts.probs.clone()
    return F.one_hot(drafts.codes, size).float()


class FrameDecoder:
    """The codes of frame after frame: drafted and checked, or one by one without a drafter.

    Args:
        depth: The depth transformer.
        drafter: Proposes all codes of a frame, as `copy_frame`; None decodes one by one.
        plan: How many codes a pass takes; it learns from what is accepted.
    """

    def __init__(
        self, depth: Depth, drafter: Drafter | None = None, plan: BlockPlan | None = None
    ) -> None:
        self.depth = depth
        self.drafter = drafter
        self.plan = plan or BlockPlan(depth.codes)
        self.count = FrameCount(depth.codes)

    def frame(self, hidden: Tensor, first: Tensor, before: Tensor, choice: Choice) -> Tensor:
        """Codes `[B, K]` of a frame.

        Args:
            hidden: `[B, D]` of the backbone.
            first: `[B]` the token in front of the codes.
            before: `[B, K]` codes of the frame before.
            choice: How they are chosen.
        """
        if self.drafter is None:
            return one_by_one(self.depth, hidden, first, choice, self.count)
        drafts = self.drafter(hidden, first, before, choice)
        return draft_and_check(self.depth, hidden, first, drafts, choice, self.plan, self.count)
