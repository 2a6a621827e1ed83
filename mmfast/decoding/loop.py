"""The loop: a pass of the backbone over all it has not read, then drafts, as a schedule says.

The pass that reads the drafts of the cycle before is the one that verifies them, so verification
costs the output head at a few more places and no pass of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.decoding.accept import AcceptRule, PassStats, Stats
from mmfast.decoding.drafting import (
    DEFAULT_MODE,
    DraftMode,
    Schedule,
    draft_rows,
    parse_mode,
    parse_schedule,
)
from mmfast.decoding.row import Costs, DecodeRow, DraftLength, Guide, new_row
from mmfast.decoding.sampling import Sampling

Prompt = Sequence[int] | Tensor  # ids [n], or embeddings [n, D]


def read(decoder: Any, live: list[bool]) -> tuple[int, Tensor]:
    """Read all that waits; how wide that was, and the normed hidden states `[B, n, D]`."""
    embeds = [
        _waiting(decoder, row) if alive else None
        for row, alive in zip(decoder.rows, live, strict=True)
    ]
    counts = [0 if e is None else e.shape[0] for e in embeds]
    width = max(counts)
    if len(counts) == 1 and embeds[0] is not None:
        stacked = embeds[0][None]
    else:
        like = next(e for e in embeds if e is not None)
        stacked = like.new_zeros(len(decoder.rows), width, like.shape[1])
        for i, e in enumerate(embeds):
            if e is not None:
                stacked[i, : len(e)] = e
    raw = decoder.backbone.run(decoder.state, stacked, counts)
    normed: Tensor = decoder.backbone.norm(raw)
    if decoder.head is not None:
        fed = normed if decoder.head.reads == "normed" else raw
        decoder.head.observe(decoder.heads, stacked, fed, counts)
    return width, normed


def _waiting(decoder: Any, row: DecodeRow) -> Tensor:
    if not row.unseen:
        assert row.before is not None
        return row.before
    ids = torch.tensor(row.unseen, device=decoder.backbone.device)
    embeds: Tensor = decoder.backbone.embed(ids)
    return embeds if row.before is None else torch.cat((row.before, embeds))


def judge(decoder: Any, live: list[bool], normed: Tensor) -> list[int | None]:
    """The backbone's token per stream, None where it has none now; wrong drafts go."""
    found: list[int | None] = [None] * len(decoder.rows)
    kept = list(decoder.state.lengths)
    for i, row in enumerate(decoder.rows):
        if not live[i]:
            continue
        token, back, left = _judge_row(decoder, row, normed[i])
        kept[i] -= back
        row.read(left)
        if token is not None:
            row.say(token)
            row.unseen.append(token)
            # What is owed behind it comes before any draft, unless drafts need not be exact.
            forced = [] if decoder.rule.kind == "none" or row.guide.done else row.owed()
            row.unseen += forced
            row.sure = len(row.unseen)
            token = None if forced else token
        found[i] = token
    if kept != decoder.state.lengths or decoder.rule.kind != "none":
        decoder.settle(kept)
    return found


def _judge_row(decoder: Any, row: DecodeRow, hidden: Tensor) -> tuple[int | None, int, list[int]]:
    """The token to say, how many of the tokens just read go, and forced ones to read next."""
    places, rows, drafts, ahead = row.wanted(), row.rows(), row.drafts, row.ahead
    chosen = hidden[places] if ahead else hidden[places[0] : places[-1] + 1]
    logits = decoder.backbone.logits(chosen, rows)
    accepted, token = row.judge(logits, rows.indices(decoder.backbone.vocabulary)[0])
    row.verified(accepted)
    forced: list[int] = []
    for i, draft in enumerate(drafts[:accepted]):
        row.accepted += 1
        left = len(drafts) - i - 1
        if not row.say(draft):
            return None, left + len(ahead), []
        forced = row.owed()
        if forced and (left or forced != ahead):  # not foreseen: they are to be read first
            return None, left + len(ahead), forced
    if accepted < len(drafts) or not drafts:
        return token, len(drafts) - accepted + len(ahead), []
    if forced != ahead:
        return _again(decoder, row, hidden[places[0] + len(drafts)]), len(ahead), []
    return token if row.guide.rows() == rows else _again(decoder, row, chosen[-1]), 0, []


def _again(decoder: Any, row: DecodeRow, hidden: Tensor) -> int:
    """Return the token behind accepted drafts, of the rows that the guide allows now."""
    rows = row.guide.rows()
    start = rows.indices(decoder.backbone.vocabulary)[0]
    return row.choose(decoder.backbone.logits(hidden[None], rows)[0], start)


def feed(decoder: Any, row: DecodeRow, prompt: Prompt) -> None:
    """Put ids or embeddings behind what a stream has said."""
    row.drop_drafts()
    if not len(prompt):
        return
    if isinstance(prompt, Tensor) and prompt.is_floating_point():
        if prompt.ndim != 2 or prompt.shape[1] != decoder.backbone.width:
            raise ModelError(
                f"a prompt of shape {list(prompt.shape)} is no list of embeddings of width "
                f"{decoder.backbone.width}; use [n, {decoder.backbone.width}]"
            )
        if getattr(decoder.backbone, "axes", 1) > 1:
            raise ModelError(
                "a prompt of embeddings has no positions along the three axes of this model, as "
                "pictures and sound would need them; feed ids of text"
            )
        embeds = prompt.to(decoder.backbone.device, decoder.backbone.dtype)
    else:
        ids = [int(token) for token in prompt]
        if min(ids) < 0 or max(ids) >= decoder.backbone.entries:
            raise ModelError(
                f"token {min(ids) if min(ids) < 0 else max(ids)} of the prompt is not in "
                f"0..{decoder.backbone.entries - 1}; encode it with the model's own tokenizer"
            )
        row.history += ids
        embeds = decoder.backbone.embed(torch.tensor(ids, device=decoder.backbone.device))
    if row.waiting:
        embeds = torch.cat((_waiting(decoder, row), embeds))
    row.before, row.unseen, row.sure = embeds, [], 0


class BatchDecoder:
    """Decodes several streams, each exactly as it would be alone, one per guide.

    `head` drafts along time; None gives one token per pass. `mode` says when drafts are made and
    how they are verified (`parse_mode`); `verify` replaces its rule (`parse_rule`), `schedule` its
    schedule (`parse_schedule`). Stream i is seeded with `sampling.seed + i`. `costs` of passes
    decide the length of drafts; None assumes usual ones, so that what is said depends on no clock.
    There is room for `reserve` tokens per stream at once.
    """

    def __init__(
        self,
        backbone: Any,
        head: Any | None,
        guides: Sequence[Guide],
        *,
        mode: str | DraftMode = DEFAULT_MODE,
        verify: str | AcceptRule | None = None,
        schedule: str | Sequence[int] | Schedule | None = None,
        sampling: Sampling | None = None,
        costs: Costs | None = None,
        reserve: int = 512,
    ) -> None:
        self.backbone, self.head = backbone, head
        chosen_mode = parse_mode(mode, verify, schedule)
        self.rule = chosen_mode.rule
        self.schedule = parse_schedule("vanilla") if head is None else chosen_mode.schedule
        chosen = sampling or Sampling()
        self.costs = costs or Costs()
        power = self.rule.epsilon**0.5 if self.rule.kind == "typical" else 1.0
        lengths = [DraftLength(self.costs, chosen_mode.confidence, power) for _ in guides]
        self.rows = [
            new_row(guide, chosen, self.rule, i, length, backbone.vocabulary)
            for i, (guide, length) in enumerate(zip(guides, lengths, strict=True))
        ]
        self._runs = self.schedule.runs()
        with torch.inference_mode():
            self.state = backbone.state(len(self.rows), reserve)
            self.heads = None if head is None else head.init_state(len(self.rows), reserve)
        self._cancelled = False

    # --- from outside -------------------------------------------------------------------------

    def feed(self, prompts: Sequence[Prompt]) -> None:
        """Put prompts, ids or embeddings per stream, behind what stands; the schedule starts anew.

        A prompt may be empty where the stream has said something. ModelError: a prompt is of ids
        the model does not have, or of another width.
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

    def __iter__(self) -> Iterator[list[PassStats | None]]:
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
    def _cycle(self, most: int) -> list[PassStats | None]:
        live = [not row.guide.done for row in self.rows]
        for row, alive in zip(self.rows, live, strict=True):
            row.said, row.accepted, row.forced = [], 0, 0
            if alive:
                row.take_forced()
                if not row.waiting:
                    raise ModelError("nothing to read: feed a prompt of at least one token first")
        width, normed = read(self, live)
        tokens = judge(self, live, normed)
        ran, drafted = 0, [0] * len(self.rows)
        if most and self.head is not None:
            ran, drafted = draft_rows(self, tokens, most)
        return [
            self._step(row, drafted[i], ran, width) if live[i] else None
            for i, row in enumerate(self.rows)
        ]

    def settle(self, lengths: Sequence[int]) -> None:
        """Keep what stands of what was read."""
        self.state.crop(lengths)
        if self.head is not None:
            self.head.crop(self.heads, lengths)

    def _step(self, row: DecodeRow, drafted: int, ran: int, width: int) -> PassStats:
        step = PassStats(tuple(row.said), drafted, row.accepted, 1, ran, row.forced)
        row.stats.add(step)
        row.stats.widths[width] = row.stats.widths.get(width, 0) + 1
        return step


class SingleDecoder:
    """Says what one stream says: see `BatchDecoder`, of which it is the case of one.

    Iterating yields `PassStats` per pass of the backbone:

        decoder = SingleDecoder(backbone, head, guide, mode="fast")
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

    @property
    def stats(self) -> Stats:
        """Counts."""
        return self.batch.stats[0]

    def __iter__(self) -> Iterator[PassStats]:
        for steps in self.batch:
            assert steps[0] is not None
            yield steps[0]
