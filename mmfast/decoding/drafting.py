"""Draft modes and schedules, and a run of draft modules for all streams of a batch at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.decoding.accept import AcceptRule, parse_rule
from mmfast.decoding.row import DecodeRow
from mmfast.decoding.sampling import not_finite


def draft_rows(decoder: Any, tokens: list[int | None], most: int) -> tuple[int, list[int]]:
    """Draft behind the tokens that the backbone has just chosen, `most` at most.

    `tokens` are per stream, None where it chose none; the rows of the `BatchDecoder` are changed.
    Returns modules that ran, and drafts per stream.
    """
    rows: list[DecodeRow] = decoder.rows
    none = decoder.rule.kind == "none"
    limits = [_limit(row, token, most, none) for row, token in zip(rows, tokens, strict=True)]
    if not any(limits):
        return 0, [0] * len(rows)
    kinds = {(r.start, r.stop) for r in (row.guide.draft_rows for row in rows)}
    if len(kinds) > 1:
        raise ModelError("streams of a batch draft from different rows; decode them one by one")
    run = _DraftRun(decoder, tokens, limits, none)
    first = torch.tensor([token or 0 for token in tokens], device=decoder.backbone.device)
    ran = decoder.head.draft(decoder.heads, first, max(limits), run.rows_at, run.pick)
    run.settle()
    _finish(decoder, rows, limits, none)
    return ran, run.made


def _limit(row: DecodeRow, token: int | None, most: int, none: bool) -> int:
    guide = row.guide
    if token is None or guide.done or guide.rows() != guide.draft_rows:
        return 0
    if none:
        return most
    return 0 if guide.stops(token) else row.length.begin(most)


class _DraftRun:
    def __init__(
        self, decoder: Any, tokens: Sequence[int | None], limits: list[int], none: bool
    ) -> None:
        rows: list[DecodeRow] = decoder.rows
        self.rows, self.limits, self.none = rows, limits, none
        self.plain, self.tokens = rows[0].sampling.plain, tokens
        self.vocabulary = decoder.backbone.vocabulary
        self.open = list(limits)  # drafts that are still wanted
        self.peaks: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self.made = [0] * len(rows)
        self._rows: list[slice] = []

    def rows_at(self, i: int) -> slice:
        """Rows of draft i: all of them where streams differ, and where chances are compared."""
        while len(self._rows) <= i:
            self._rows.append(self._rows_of(len(self._rows)))
        return self._rows[i]

    def _rows_of(self, i: int) -> slice:
        every = self.rows[0].guide.draft_rows
        if self.none or not self.plain:
            return every
        drafting = zip(self.rows, self.tokens, self.limits, strict=True)
        asked = [row.guide.guesses(token or 0, i) for row, token, limit in drafting if limit]
        return asked[0] if asked.count(asked[0]) == len(asked) else every

    def pick(self, logits: Tensor, i: int) -> Tensor | None:
        """Drafts `[B]` from logits `[B, rows]`; None when no stream wants more."""
        start = self.rows_at(i).indices(self.vocabulary)[0]
        if self.plain and self.none:  # nothing is decided here: the device need not be asked
            peaks, best = logits.max(-1)
            self.peaks.append(peaks)
            self.chosen.append(best + start if start else best)
            return self.chosen[-1]
        tokens = self._plain(logits, start) if self.plain else self._any(logits, start)
        return tokens if any(self.open) else None

    def _plain(self, logits: Tensor, start: int) -> Tensor:
        peaks, best = logits.softmax(-1).max(-1)
        if start:
            best += start
        found = zip(self.rows, best.tolist(), peaks.tolist(), strict=True)
        for b, (row, token, peak) in enumerate(found):
            if self.open[b]:
                if not math.isfinite(peak):
                    raise ModelError(not_finite())
                if row.length.doubts(peak):
                    self.open[b] = 0
                    continue
                row.keep_draft(token, peak)
                self._kept(b, row, token, peak)
        return best

    def _any(self, logits: Tensor, start: int) -> Tensor:
        tokens = [start] * len(self.rows)
        for b, row in enumerate(self.rows):
            if not self.open[b]:
                continue
            token = row.draw_draft(logits[b], start, doubts=not self.none)
            if token is None:
                self.open[b] = 0
                continue
            tokens[b] = token
            self._kept(b, row, token, row.confidences[-1])
        return torch.tensor(tokens, device=logits.device)

    def _kept(self, b: int, row: DecodeRow, token: int, confidence: float) -> None:
        self.made[b] += 1
        self.open[b] -= 1
        ended = not self.none and (row.guide.stops(token) or not row.length.more(confidence))
        if ended:
            self.open[b] = 0

    def settle(self) -> None:
        """Hand over what was chosen without asking the device."""
        if not self.chosen:
            return
        if not torch.isfinite(torch.stack(self.peaks)).all():
            raise ModelError(not_finite())
        for b, tokens in enumerate(torch.stack(self.chosen, 1).tolist()):
            if self.limits[b]:
                self.rows[b].drafts = tokens[: self.limits[b]]
                self.made[b] = len(self.rows[b].drafts)


def _finish(decoder: Any, rows: list[DecodeRow], limits: list[int], none: bool) -> None:
    """Drafts that nothing verifies stand at once; the others wait for the next pass."""
    stale = list(decoder.state.lengths)
    for b, row in enumerate(rows):
        if not limits[b]:
            continue
        if not none:
            row.ahead = list(row.guide.ahead(row.drafts)) if row.drafts else []
            row.unseen += [*row.drafts, *row.ahead]
            continue
        drafts, row.drafts, row.chances, row.confidences = row.drafts, [], [], []
        for draft in drafts:
            row.accepted += 1
            row.unseen.append(draft)
            if not row.say(draft):
                break
        else:
            stale[b] += decoder.head.modules_count + 1
        row.sure = len(row.unseen)
    if none:  # keys that saw drafts of streams that do not draft, or not so many
        decoder.head.crop(decoder.heads, stale)


# Main passes, drafts, main passes, drafts, …; the last pair repeats.
SCHEDULES: dict[str, tuple[int, ...]] = {
    "vanilla": (1, 0),
    "balance": (1, 4, 3, 8, 4, 10),
    "boost": (1, 10, 4, 10),
}


@dataclass(frozen=True)
class Schedule:
    """Pairs of main passes and the drafts behind the last of them; the last pair repeats."""

    pairs: tuple[tuple[int, int], ...]

    def runs(self) -> Iterator[int]:
        """For every main pass, how many drafts follow it; without end."""
        for main, drafts in self.pairs:
            yield from (0,) * (main - 1)
            yield drafts
        while True:
            yield from (0,) * (main - 1)
            yield drafts

    @property
    def most(self) -> int:
        """Most drafts in a row."""
        return max(drafts for _, drafts in self.pairs)


def parse_schedule(spec: str | Sequence[int] | Schedule) -> Schedule:
    """Read a schedule; SpecError for anything else.

    It is `vanilla`, `balance` or `boost` (VITA-Audio, arXiv 2505.03739); letters such as `MmmmMM`;
    or counts such as `1,4,3,8`, as text or numbers.
    """
    if isinstance(spec, Schedule):
        return spec
    if not isinstance(spec, str):
        return _of_counts(tuple(spec), spec)
    if spec in SCHEDULES:
        return _of_counts(SCHEDULES[spec], spec)
    if re.fullmatch(r"(M+m*)+", spec):
        runs = re.findall(r"(M+)(m*)", spec)
        return Schedule(tuple((len(main), len(drafts)) for main, drafts in runs))
    if re.fullmatch(r"\d+(,\d+)+", spec):
        return _of_counts(tuple(int(part) for part in spec.split(",")), spec)
    raise SpecError(
        f"{unknown('schedule', spec, SCHEDULES)}; or letters such as 'MmmmM', or counts such as "
        "'1,4,3,8'"
    )


def _of_counts(counts: Sequence[int], spec: object) -> Schedule:
    mains, drafts = counts[::2], counts[1::2]
    if len(counts) < 2 or len(counts) % 2 or min(mains) < 1 or min(drafts) < 0:
        raise SpecError(
            f"schedule {spec!r} is no list of pairs: main passes (1 or more), drafts (0 or more)"
        )
    return Schedule(tuple(zip(mains, drafts, strict=True)))


@dataclass(frozen=True)
class DraftMode:
    """Schedule of drafts, rule that verifies them, and the least confidence of one.

    A run of drafts ends in front of the first whose head is less confident than `confidence`.
    """

    schedule: Schedule
    rule: AcceptRule
    confidence: float = 0.0


DEFAULT_MODE = "exact"
_FULL = parse_schedule((1, 10))  # behind every pass as many drafts as promise to be worth it
MODES: dict[str, DraftMode] = {
    "exact": DraftMode(_FULL, AcceptRule("exact")),
    "fast": DraftMode(_FULL, AcceptRule("typical", 0.1)),
    "turbo": DraftMode(parse_schedule((1, 14)), AcceptRule("typical", 0.01), 0.1),
}


def parse_mode(
    mode: str | DraftMode = DEFAULT_MODE,
    verify: str | AcceptRule | None = None,
    schedule: str | Sequence[int] | Schedule | None = None,
) -> DraftMode:
    """Read a mode; `verify` and `schedule` replace its rule and its schedule.

    `exact` says what one token per pass says, `fast` accepts typical drafts, `turbo` accepts more
    and drafts only what the head is confident of. All are verified: only `verify="none"` lets
    drafts stand as they are. SpecError for anything else.
    """
    if not isinstance(mode, DraftMode):
        if not isinstance(mode, str) or mode not in MODES:
            schedule_given = not isinstance(mode, str) or mode in SCHEDULES
            hint = f"; a schedule is given as schedule={mode!r}" if schedule_given else ""
            raise SpecError(f"{unknown('mode', mode, MODES)}{hint}")
        mode = MODES[mode]
    return DraftMode(
        mode.schedule if schedule is None else parse_schedule(schedule),
        mode.rule if verify is None else parse_rule(verify),
        mode.confidence,
    )
