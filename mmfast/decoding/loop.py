"""The loop: a pass of the backbone over all it has not read, then drafts, as a schedule says.

The pass that reads the drafts of the cycle before is the one that verifies them, so verification
costs the output head at a few more places and no pass of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mmfast.core.errors import ModelError
from mmfast.decoding.accept import Rule, parse_rule
from mmfast.decoding.adapt import Costs
from mmfast.decoding.drafting import draft_rows
from mmfast.decoding.guide import Guide
from mmfast.decoding.reading import Prompt, feed, judge, read
from mmfast.decoding.row import Row, new_row
from mmfast.decoding.sampling import Sampling
from mmfast.decoding.schedule import Schedule, parse_schedule
from mmfast.decoding.stats import Stats, Step


class BatchDecoder:
    """Says what several streams say, each exactly as it would alone.

    Args:
        backbone: A `mmfast.models.backbone.Backbone`, or what does the same.
        head: A head that drafts along time; None says one token per pass.
        guides: One per stream.
        schedule: When drafts are made; see `parse_schedule`.
        verify: `none`, `exact` or `typical:ε`; see `parse_rule`.
        sampling: How tokens are chosen; stream i is seeded with `sampling.seed + i`.
        costs: Of passes, for the length of drafts; None measures them where no choice depends
            on chance, and assumes usual ones elsewhere, so that a seed says everything.
        reserve: Tokens per stream to make room for at once.
    """

    def __init__(
        self,
        backbone: Any,
        head: Any | None,
        guides: Sequence[Guide],
        *,
        schedule: str | Sequence[int] | Schedule = "turbo",
        verify: str | Rule = "none",
        sampling: Sampling | None = None,
        costs: Costs | None = None,
        reserve: int = 512,
    ) -> None:
        self.backbone, self.head = backbone, head
        self.rule = parse_rule(verify)
        self.schedule = parse_schedule(schedule if head is not None else "vanilla")
        chosen = sampling or Sampling()
        self.costs = costs or Costs(live=chosen.greedy)
        self.rows = [new_row(g, chosen, self.rule, i, self.costs) for i, g in enumerate(guides)]
        self._runs = self.schedule.runs()
        # Of this thread where it does the work: what else the machine runs is not measured then.
        on_cpu = torch.device(backbone.device).type == "cpu"
        self._clock = time.thread_time if on_cpu else time.perf_counter
        with torch.inference_mode():
            self.state = backbone.state(len(self.rows), reserve)
            self.heads = None if head is None else head.init_state(len(self.rows), reserve)
        self._cancelled = False

    # --- from outside -------------------------------------------------------------------------

    def feed(self, prompts: Sequence[Prompt]) -> None:
        """Put prompts behind what stands; the schedule starts anew.

        Args:
            prompts: Per stream ids or embeddings; may be empty where a stream has said something.

        Raises:
            ModelError: A prompt is of ids the model does not have, or of another width.
        """
        with torch.inference_mode():
            for row, prompt in zip(self.rows, prompts, strict=True):
                feed(self, row, prompt)
        self._runs = self.schedule.runs()
        self._cancelled = False

    def guide(self, guides: Sequence[Guide]) -> None:
        """Go on with other guides, as for the next turn of a conversation."""
        for row, guide in zip(self.rows, guides, strict=True):
            row.guide = guide

    def cancel(self) -> None:
        """Stop before the next pass; what stands, stands. Safe from another thread."""
        self._cancelled = True

    def crop(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths` tokens of each stream, prompts and unread ones included."""
        with torch.inference_mode():
            for i, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
                row.drop_drafts()
                over = max(0, self.lengths[i] - length)
                cut = min(over, len(row.unseen))
                del row.unseen[len(row.unseen) - cut :]
                row.sure = len(row.unseen)
                del row.history[len(row.history) - min(over, len(row.history)) :]
                if row.before is not None and over > cut:
                    kept = max(0, len(row.before) - (over - cut))
                    row.before = row.before[:kept] if kept else None
            self.settle(
                [min(n, length) for n, length in zip(self.state.lengths, lengths, strict=True)]
            )

    @property
    def lengths(self) -> list[int]:
        """Tokens that stand, per stream."""
        return [
            n + row.waiting - len(row.unseen) + row.sure
            for n, row in zip(self.state.lengths, self.rows, strict=True)
        ]

    @property
    def stats(self) -> list[Stats]:
        """Counts per stream."""
        return [row.stats for row in self.rows]

    def __iter__(self) -> Iterator[list[Step | None]]:
        """Per pass of the backbone what it made certain, per stream; None for those that ended."""
        try:
            while not self._cancelled and any(not row.guide.done for row in self.rows):
                yield self._cycle(next(self._runs))
        finally:  # also where the caller stops listening
            for row in self.rows:
                row.drop_drafts()
            self.settle(self.state.lengths)

    # --- a cycle ------------------------------------------------------------------------------

    @torch.inference_mode()
    def _cycle(self, most: int) -> list[Step | None]:
        began = self._clock()
        live = [not row.guide.done for row in self.rows]
        for row, alive in zip(self.rows, live, strict=True):
            row.said, row.accepted, row.forced = [], 0, 0
            if alive:
                row.take_forced()
                if not row.waiting:
                    raise ModelError("nothing to read: feed a prompt of at least one token first")
        width, normed = read(self, live)
        tokens = judge(self, live, normed)
        judged = self._clock()
        ran, drafted = 0, [0] * len(self.rows)
        if most and self.head is not None:
            ran, drafted = draft_rows(self, tokens, most)
        self.costs.time(width, judged - began, ran, self._clock() - judged)
        return [
            self._step(row, drafted[i], ran, width) if live[i] else None
            for i, row in enumerate(self.rows)
        ]

    def settle(self, lengths: Sequence[int]) -> None:
        """Keep what stands of what was read."""
        self.state.crop(lengths)
        if self.head is not None:
            self.head.crop(self.heads, lengths)

    def _step(self, row: Row, drafted: int, ran: int, width: int) -> Step:
        step = Step(tuple(row.said), drafted, row.accepted, 1, ran, row.forced)
        row.stats.add(step)
        row.stats.widths[width] = row.stats.widths.get(width, 0) + 1
        return step


class Decoder:
    """Says what one stream says: see `BatchDecoder`, of which it is the case of one.

    Iterating yields a `Step` per pass of the backbone:

        decoder = Decoder(backbone, head, guide, schedule="turbo", verify="exact")
        decoder.feed(prompt)
        for step in decoder:
            play(step.tokens)
    """

    def __init__(self, backbone: Any, head: Any | None, guide: Guide, **options: Any) -> None:
        self.batch = BatchDecoder(backbone, head, [guide], **options)

    def feed(self, prompt: Prompt) -> None:
        """Put ids `[n]` or embeddings `[n, D]` behind what stands."""
        self.batch.feed([prompt])

    def guide(self, guide: Guide) -> None:
        """Go on with another guide, as for the next turn of a conversation."""
        self.batch.guide([guide])

    def cancel(self) -> None:
        """Stop before the next pass; safe from another thread."""
        self.batch.cancel()

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, prompts and unread ones included."""
        self.batch.crop([length])

    @property
    def length(self) -> int:
        """Tokens that stand."""
        return self.batch.lengths[0]

    @property
    def stats(self) -> Stats:
        """Counts."""
        return self.batch.stats[0]

    def __iter__(self) -> Iterator[Step]:
        for steps in self.batch:
            assert steps[0] is not None
            yield steps[0]
