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
        stretch, behind_first = slice(at, at + n), slice(at + 1, at + n + 1)
        place, drafted = self.place[:n], self.tokens[:, behind_first]  # a view
        held = place < (self.done - at)[:, None]  # [B, n] settled by an earlier pass
        if self.choice.greedy:
            says = logits.argmax(-1)
            right, instead = drafted == says, says
        else:
            probs = self.choice.probs(logits)
            odds = self.odds[:, stretch]  # type: ignore[index]
            right = accepted(probs, odds, drafted, self.choice)
            says = self.choice.draw(probs)
        lead = (right | held).long().cumprod(1).sum(1)  # [B] the first that is refused, or n
        self._note(right, held, lead, plan, count)
        if not self.choice.greedy:
            spot = lead.clamp(max=n - 1)[:, None, None].expand(-1, 1, probs.shape[-1])
            left = remainder(probs.gather(1, spot)[:, 0], odds.gather(1, spot)[:, 0])
            instead = self.choice.draw(left)[:, None]
        behind = place > lead[:, None]
        new = torch.where(behind, says, torch.where(place == lead[:, None], instead, drafted))
        if not self.choice.greedy:
            self.odds[:, stretch] = torch.where(behind[..., None], probs, odds)  # type: ignore[index]
        self.tokens[:, behind_first] = new
        self.original[:, stretch] &= ~behind
        self.done = torch.maximum(self.done, at + (lead + 1).clamp(max=n))
        self.at = int(self.done.min())
        self.again = True

    def _note(
        self, right: Tensor, held: Tensor, lead: Tensor, plan: BlockPlan, count: FrameCount | None
    ) -> None:
        n = right.shape[1]
        if count is not None:
            count.ran(n)
        elif plan.share <= 0:
            return
        checked = ~held & (self.place[:n] <= lead[:, None])
        original = self.original[:, self.at : self.at + n]
        masks = [checked & original, checked & ~original]
        sums = torch.stack([m.sum(0) for mask in masks for m in (mask, mask & right)]).tolist()
        plan.learn(False, self.at, sums[0], sums[1])
        plan.learn(True, self.at, sums[2], sums[3])
        if count is not None:
            where = slice(self.at, self.at + n)
            count.drafted[where] += torch.tensor(sums[0])
            count.accepted[where] += torch.tensor(sums[1])


def accepted(probs: Tensor, odds: Tensor, drafted: Tensor, choice: Choice) -> Tensor:
    """`[B, n]`: a draft of probability q where the target gives it p stays with min(1, p / q).

    Args:
        probs: `[B, n, V]` of the target.
        odds: `[B, n, V]` that the drafts were drawn from.
        drafted: `[B, n]`.
        choice: Source of the numbers that decide.
    """
    at = drafted[..., None]
    p, q = probs.gather(-1, at)[..., 0], odds.gather(-1, at)[..., 0]
    return choice.uniform(p) * q < p


def remainder(probs: Tensor, odds: Tensor) -> Tensor:
    """What a refused code is replaced from: max(p - q, 0), scaled; `[B, V]` each."""
    left = (probs - odds).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.clamp(min=1e-30), probs)  # p = q refuses nothing


def _odds(drafts: Drafts, size: int) -> Tensor:
    if drafts.probs is not None:
        return drafts.probs.clone()
    return torch.nn.functional.one_hot(drafts.codes, size).float()


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
