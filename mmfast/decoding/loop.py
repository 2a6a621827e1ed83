"""The loop: a pass of the backbone over all it has not read, then drafts, as a schedule says.

The pass that reads the drafts of the cycle before is the one that verifies them, so verification
costs the output head at a few more places and no pass of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.decoding.accept import Rule, parse_rule
from mmfast.decoding.adapt import Costs
from mmfast.decoding.drafting import draft_rows
from mmfast.decoding.guide import Guide
from mmfast.decoding.row import Row, new_row
from mmfast.decoding.sampling import Sampling
from mmfast.decoding.schedule import Schedule, parse_schedule
from mmfast.decoding.stats import Stats, Step

Prompt = Sequence[int] | Tensor  # ids [n], or embeddings [n, D]


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
        self._batch, self._reserve = len(self.rows), reserve
        with torch.inference_mode():
            self.state = backbone.state(self._batch, reserve)
            self.heads = None if head is None else head.init_state(self._batch, reserve)
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
                self._feed(row, prompt)
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
            self._crop(
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
        while not self._cancelled and any(not row.guide.done for row in self.rows):
            yield self._cycle(next(self._runs))
        for row in self.rows:
            row.drop_drafts()

    # --- a cycle ------------------------------------------------------------------------------

    @torch.inference_mode()
    def _cycle(self, most: int) -> list[Step | None]:
        began = time.perf_counter()
        live = [not row.guide.done for row in self.rows]
        for row, alive in zip(self.rows, live, strict=True):
            row.said, row.accepted, row.forced = [], 0, 0
            if alive:
                row.take_forced()
                if not row.waiting:
                    raise ModelError("nothing to read: feed a prompt of at least one token first")
        width, normed = self._read(live)
        tokens = self._judge(live, normed)
        read = time.perf_counter()
        ran, drafted = 0, [0] * self._batch
        if most and self.head is not None:
            ran, drafted = draft_rows(self, tokens, most)
        self.costs.time(width, read - began, ran, time.perf_counter() - read)
        times = (read - began, time.perf_counter() - read)
        return [
            self._step(row, drafted[i], ran, width, times) if live[i] else None
            for i, row in enumerate(self.rows)
        ]

    def _read(self, live: list[bool]) -> tuple[int, Tensor]:
        """Read all that waits; how wide that was, and the normed hidden states `[B, n, D]`."""
        embeds = [
            self._waiting(row) if alive else None
            for row, alive in zip(self.rows, live, strict=True)
        ]
        counts = [0 if e is None else e.shape[0] for e in embeds]
        width = max(counts)
        if self._batch == 1 and embeds[0] is not None:
            stacked = embeds[0][None]
        else:
            like = next(e for e in embeds if e is not None)
            stacked = like.new_zeros(self._batch, width, like.shape[1])
            for i, e in enumerate(embeds):
                if e is not None:
                    stacked[i, : len(e)] = e
        raw = self.backbone.run(self.state, stacked, counts)
        normed: Tensor = self.backbone.norm(raw)
        if self.head is not None:
            fed = normed if self.head.reads == "normed" else raw
            self.head.observe(self.heads, stacked, fed, counts)
        return width, normed

    def _waiting(self, row: Row) -> Tensor:
        if not row.unseen:
            assert row.before is not None
            return row.before
        ids = torch.tensor(row.unseen, device=self.backbone.device)
        embeds: Tensor = self.backbone.embed(ids)
        return embeds if row.before is None else torch.cat((row.before, embeds))

    def _judge(self, live: list[bool], normed: Tensor) -> list[int | None]:
        """The backbone's token per stream, None where it has none now; wrong drafts go."""
        found: list[int | None] = [None] * self._batch
        kept = list(self.state.lengths)
        for i, row in enumerate(self.rows):
            if not live[i]:
                continue
            token, back, left = self._judge_row(row, normed[i])
            kept[i] -= back
            row.read(left)
            if token is not None:
                row.say(token)
                row.unseen.append(token)
                row.sure += 1
            found[i] = token
        if kept != self.state.lengths or self.rule.kind != "none":
            self._crop(kept)
        return found

    def _judge_row(self, row: Row, hidden: Tensor) -> tuple[int | None, int, list[int]]:
        """The token to say, how many of the tokens just read go, and forced ones to read next."""
        places, rows, drafts, ahead = row.wanted(), row.rows(), row.drafts, row.ahead
        chosen = hidden[places] if ahead else hidden[places[0] : places[-1] + 1]
        logits = self.backbone.logits(chosen, rows)
        accepted, token = row.judge(logits, rows.indices(self.backbone.vocabulary)[0])
        row.verified(accepted)
        for i, draft in enumerate(drafts[:accepted]):
            row.accepted += 1
            if not row.say(draft):
                return None, len(drafts) - i - 1 + len(ahead), []
        if accepted < len(drafts) or not drafts:
            return token, len(drafts) - accepted + len(ahead), []
        forced = list(row.guide.forced())
        row.history += forced
        row.forced += len(forced)
        if forced == ahead:
            same = row.guide.rows() == rows
            return token if same else self._again(row, chosen[-1]), 0, []
        # Not foreseen: what was read behind the drafts goes.
        last = hidden[places[0] + len(drafts)]
        return None if forced else self._again(row, last), len(ahead), forced

    def _again(self, row: Row, hidden: Tensor) -> int:
        """The token behind accepted drafts, of the rows that the guide says now."""
        rows = row.guide.rows()
        start = rows.indices(self.backbone.vocabulary)[0]
        return row.choose(self.backbone.logits(hidden, rows), start)

    def _crop(self, lengths: Sequence[int]) -> None:
        self.state.crop(lengths)
        if self.head is not None:
            self.head.crop(self.heads, lengths)

    def _step(
        self, row: Row, drafted: int, ran: int, width: int, times: tuple[float, float]
    ) -> Step:
        step = Step(tuple(row.said), drafted, row.accepted, 1, ran, row.forced)
        row.stats.add(step)
        row.stats.widths[width] = row.stats.widths.get(width, 0) + 1
        row.stats.main_seconds += times[0]
        row.stats.draft_seconds += times[1]
        return step

    def _feed(self, row: Row, prompt: Prompt) -> None:
        row.drop_drafts()
        if not len(prompt):
            return
        if isinstance(prompt, Tensor) and prompt.is_floating_point():
            if prompt.ndim != 2 or prompt.shape[1] != self.backbone.width:
                raise ModelError(
                    f"a prompt of shape {list(prompt.shape)} is no list of embeddings of width "
                    f"{self.backbone.width}; use [n, {self.backbone.width}]"
                )
            embeds = prompt.to(self.backbone.device, self.backbone.dtype)
        else:
            ids = [int(token) for token in prompt]
            if min(ids) < 0 or max(ids) >= self.backbone.entries:
                raise ModelError(
                    f"token {min(ids) if min(ids) < 0 else max(ids)} of the prompt is not in "
                    f"0..{self.backbone.entries - 1}; encode it with the model's own tokenizer"
                )
            row.history += ids
            embeds = self.backbone.embed(torch.tensor(ids, device=self.backbone.device))
        if row.waiting:
            embeds = torch.cat((self._waiting(row), embeds))
        row.before, row.unseen, row.sure = embeds, [], 0


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
