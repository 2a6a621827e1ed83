"""All codes of a frame drafted at once and checked by one pass of the depth transformer.

A depth transformer (Moshi arXiv 2410.00037, CSM) defines a frame's codes one after the other:
K small passes. Here a drafter proposes all K, one teacher-forced pass gives what the depth
transformer says at every codebook, and the rejection rule of speculative sampling
(arXiv 2302.01318) along the codebooks keeps the output what it was: the same codes when greedy,
the same distribution when sampling.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import SpecError
from mmfast.decoding.accept import accept_greedy, accept_sampled
from mmfast.decoding.sampling import Sampling, draw, process


class DepthModel(Protocol):
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


class CodeChoice:
    """Greedy choice (`sampling` None), or a draw after temperature, top-k, top-p and min-p.

    Numbers are drawn in the order of the calls: the same calls after the same seed give the same
    codes. Where temperatures differ by codebook, that of code i of a frame is number i + `first`:
    of CSM, whose backbone says codebook 0 itself, `first` is 1. A penalty and processors are
    refused (SpecError), since codes of a frame have no history.
    """

    def __init__(self, sampling: Sampling | None = None, first: int = 0) -> None:
        self.sampling, self.first = sampling or Sampling(), first
        if self.sampling.penalty != 1:
            raise SpecError(
                f"penalty {self.sampling.penalty!r} is not possible for codes of a frame; use 1"
            )
        if self.sampling.processors:
            raise SpecError("logits processors are not possible for codes of a frame; leave them")
        self._sources: dict[torch.device, torch.Generator] = {}

    @property
    def greedy(self) -> bool:
        """The likeliest is taken."""
        return self.sampling.greedy

    def probs(self, logits: Tensor, check: bool = True, at: int = 0) -> Tensor:
        """Turn logits into probabilities: `[B, V]` of code `at`, or `[B, n, V]` of n from there.

        `check` for NaN waits for the device.
        """
        if len(self.sampling.heats) == 1:
            return process(logits, self.sampling, (), check=check).softmax(-1)
        lines = logits if logits.ndim > 2 else logits[:, None]
        start = at + self.first
        books = range(start, start + lines.shape[1])
        found = process(lines, self.sampling, (), check=check, books=books).softmax(-1)
        return found.view_as(logits)

    def draw(self, probs: Tensor) -> Tensor:
        """Probabilities `[..., V]` to codes `[...]`."""
        return draw(probs, self.uniform(probs[..., 0]))

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers in [0, 1) of that shape."""
        if like.device not in self._sources:
            source = torch.Generator(like.device).manual_seed(self.sampling.seed)
            self._sources[like.device] = source
        return torch.rand(like.shape, generator=self._sources[like.device], device=like.device)


@dataclass(frozen=True, eq=False)
class FrameDrafts:
    """Codes `[B, K]` of a frame, and the `probs` `[B, K, V]` they were drawn from; None: a copy."""

    codes: Tensor
    probs: Tensor | None = None


# (hidden [B, D], first [B], codes of the frame before [B, K], how codes are chosen) -> drafts
Drafter = Callable[[Tensor, Tensor, Tensor, CodeChoice], FrameDrafts]


def parallel(guess: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Drafter:
    """Make a drafter of a network that gives logits `[B, K, V]` of all codes at once.

    Such are `heads.code_base.CodeMlp.guess` and `heads.groups.GroupsHead.guess`.
    """

    def draft(hidden: Tensor, first: Tensor, before: Tensor, choice: CodeChoice) -> FrameDrafts:
        logits = guess(hidden, first, before)
        if choice.greedy:
            return FrameDrafts(logits.argmax(-1))
        probs = choice.probs(logits)
        return FrameDrafts(choice.draw(probs), probs)

    return draft


_FORGET = 0.98  # of what was seen, per pass: about the last fifty frames count


@dataclass(eq=False)
class FrameCount:
    """Counts of passes, and of drafts checked and accepted per codebook `[K]`.

    `rounds` are passes of the depth transformer, each for the whole batch, over `tokens` codebooks
    together; `frames` are those of all streams.
    """

    codes: int
    frames: int = 0
    rounds: int = 0
    tokens: int = 0
    drafted: Tensor = field(init=False)
    accepted: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.drafted = torch.zeros(self.codes, dtype=torch.long)
        self.accepted = torch.zeros(self.codes, dtype=torch.long)

    def ran(self, n: int) -> None:
        """Note one pass over n codebooks."""
        self.rounds += 1
        self.tokens += n

    def to_dict(self) -> dict[str, object]:
        """Figures for a trace: passes, and the share accepted per codebook."""
        share = self.accepted / self.drafted.clamp(min=1)
        return {
            "frames": self.frames,
            "depth_passes": self.rounds,
            "depth_tokens": self.tokens,
            "acceptance": [round(float(s), 4) for s in share],
        }


class BlockPlan:
    """The number of codes per pass that promises the most codes for the time.

    A pass over n codes costs 1 + share x (n - 1) passes over one. A stretch settles every code up
    to the first that is refused, and that one too; how many that will be follows from the share
    accepted per codebook so far, of first drafts and of later ones apart.

    `share`, the cost of each further code, is near 0 where the pass waits for weights that all
    codes share (CSM), more where it computes or where every codebook has weights of its own
    (Moshi); `measure_share` finds it.
    """

    def __init__(self, codes: int, share: float = 0.0) -> None:
        self.codes = codes
        self.share = share
        self._tried = [[2.0] * codes, [2.0] * codes]  # two codes each of which one was right
        self._right = [[1.0] * codes, [1.0] * codes]

    def length(self, at: int, batch: int, again: bool) -> int:
        """Return the number of codes from `at` on that the next pass takes, 1 at least.

        `again`: the first draft of this frame has been refused somewhere.
        """
        left = self.codes - at
        if self.share <= 0:
            return left
        best, best_rate, chance, settled = 1, 0.0, 1.0, 0.0
        for n in range(1, left + 1):
            settled += chance
            rate = settled / (1 + self.share * (n - 1))
            if rate > best_rate:
                best, best_rate = n, rate
            place = at + n - 1
            chance *= (self._right[again][place] / self._tried[again][place]) ** batch
        return best

    def learn(self, again: bool, at: int, tried: list[int], right: list[int]) -> None:
        """Note drafts that were checked at the codes at, at + 1, …, and how many were right."""
        for place, (t, r) in enumerate(zip(tried, right, strict=True), start=at):
            if t:
                self._tried[again][place] = self._tried[again][place] * _FORGET + t
                self._right[again][place] = self._right[again][place] * _FORGET + r


def measure_share(
    one: Callable[[], object],
    many: Callable[[], object],
    n: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Measure the cost of a further code of a pass, in passes over one code (0..1).

    `one` runs a pass over one code, `many` over n >= 2: (time of many / time of one - 1) / (n - 1),
    medians of interleaved runs. `clock` gives seconds; take `time.process_time` on a processor that
    others use too.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(9):
        for run, taken in ((one, times[0]), (many, times[1])):
            start = clock()
            run()
            taken.append(clock() - start)
    ratio = statistics.median(times[1]) / max(statistics.median(times[0]), 1e-9)
    return min(max((ratio - 1) / (n - 1), 0.0), 1.0)


def copy_frame(_hidden: Tensor, _first: Tensor, before: Tensor, _choice: CodeChoice) -> FrameDrafts:
    """The codes of the frame before, again: costs nothing."""
    return FrameDrafts(before)


def pick(logits: Tensor, choice: CodeChoice, at: int = 0) -> Tensor:
    """Logits `[B, V]` of code `at` to codes `[B]`."""
    return logits.argmax(-1) if choice.greedy else choice.draw(choice.probs(logits, at=at))


@torch.no_grad()
def one_by_one(
    depth: DepthModel,
    hidden: Tensor,
    first: Tensor,
    choice: CodeChoice,
    count: FrameCount | None = None,
) -> Tensor:
    """The codes `[B, K]` of a frame, a pass each: what every faster way must agree with."""
    frame = depth.begin(hidden)
    token, codes = first, []
    for at in range(depth.codes):
        token = pick(depth.run(frame, token[:, None], at)[:, 0], choice, at)
        codes.append(token)
        if count is not None:
            count.ran(1)
    if count is not None:
        count.frames += len(first)
    return torch.stack(codes, dim=1)


@torch.no_grad()
def draft_and_check(
    depth: DepthModel,
    hidden: Tensor,
    first: Tensor,
    drafts: FrameDrafts,
    choice: CodeChoice,
    plan: BlockPlan | None = None,
    count: FrameCount | None = None,
) -> Tensor:
    """The codes `[B, K]` of a frame with as few passes as the drafts allow.

    Where a code is refused, the pass itself has already said what it would put behind: that is the
    draft for the rest. `hidden` `[B, D]` is the backbone's, `first` `[B]` the token in front of the
    codes. `plan` decides how many codes the next pass takes, None takes all that are left; `count`
    counts passes and acceptance.
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

    def __init__(
        self, depth: DepthModel, first: Tensor, drafts: FrameDrafts, choice: CodeChoice
    ) -> None:
        self.choice = choice
        self.tokens = torch.cat([first[:, None], drafts.codes], dim=1)  # [B, K + 1]
        self.odds = None if choice.greedy else _odds(drafts, depth.size)  # [B, K, V]
        self.done = torch.zeros_like(first)  # [B] codes that are settled
        self.original = torch.ones_like(drafts.codes, dtype=torch.bool)  # [B, K]
        self.place = torch.arange(depth.codes, device=first.device)
        self.at = 0  # the first code that some stream still needs
        self.again = False

    def settle(self, logits: Tensor, plan: BlockPlan, count: FrameCount | None) -> None:
        """Take the logits `[B, n, V]` that a pass gives for the codes at, at + 1, …."""
        at, n = self.at, logits.shape[1]
        place, drafted = self.place[:n], self.tokens[:, at + 1 : at + n + 1]  # a view
        held = place < (self.done - at)[:, None]  # [B, n] settled by an earlier pass
        if self.odds is None:
            says = logits.argmax(-1)
            lead, instead = _greedy(drafted, says, held)
        else:
            probs, odds = self.choice.probs(logits, at=at), self.odds[:, at : at + n]
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
            return  # neither is counted
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
    drafted: Tensor, probs: Tensor, odds: Tensor, held: Tensor, choice: CodeChoice
) -> tuple[Tensor, Tensor]:
    """As `_greedy`; codes that are settled already are certain on both sides."""
    sure = F.one_hot(drafted, probs.shape[-1]).to(probs.dtype)
    p, q = (torch.where(held[..., None], sure, x) for x in (probs, odds))
    u, v = choice.uniform(p[..., 0]), choice.uniform(p[:, 0, 0])
    # Behind the last draft nothing is said: what would be is not asked for here.
    return accept_sampled(drafted, torch.cat([p, p[:, -1:]], dim=1), q, _all(drafted), u, v)


def _all(drafted: Tensor) -> Tensor:
    return torch.full_like(drafted[:, 0], drafted.shape[1])


def _odds(drafts: FrameDrafts, size: int) -> Tensor:
    if drafts.probs is not None:
        return drafts.probs.clone()
    return F.one_hot(drafts.codes, size).float()


class FrameDecoder:
    """The codes of frame after frame: drafted and checked, or one by one without a drafter."""

    def __init__(
        self, depth: DepthModel, drafter: Drafter | None = None, plan: BlockPlan | None = None
    ) -> None:
        self.depth = depth
        self.drafter = drafter
        self.plan = plan or BlockPlan(depth.codes)
        self.count = FrameCount(depth.codes)

    def frame(self, hidden: Tensor, first: Tensor, before: Tensor, choice: CodeChoice) -> Tensor:
        """Codes `[B, K]` of a frame, from hidden `[B, D]`, first `[B]`, codes before `[B, K]`."""
        if self.drafter is None:
            return one_by_one(self.depth, hidden, first, choice, self.count)
        drafts = self.drafter(hidden, first, before, choice)
        return draft_and_check(self.depth, hidden, first, drafts, choice, self.plan, self.count)
