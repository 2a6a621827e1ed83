"""When the backbone runs and when draft modules do: M and m, VITA-Audio (arXiv 2505.03739)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from mmfast.core.errors import SpecError, unknown

# Main passes, drafts, main passes, drafts, …; the last pair repeats.
SCHEDULES: dict[str, tuple[int, ...]] = {
    "vanilla": (1, 0),
    "balance": (1, 4, 3, 8, 4, 10),
    "boost": (1, 10, 4, 10),
    "turbo": (1, 10),
}


@dataclass(frozen=True)
class Schedule:
    """A schedule.

    Attributes:
        pairs: Main passes and the drafts behind the last of them; the last pair repeats.
    """

    pairs: tuple[tuple[int, int], ...]

    def runs(self) -> Iterator[int]:
        """For every main pass, how many drafts follow it; without end."""
        for main, drafts in self.pairs:
            yield from (0,) * (main - 1)
            yield drafts
        while True:
            yield from (0,) * (main - 1)
            yield drafts

    def letters(self, n: int) -> str:
        """The first `n` passes as M and m."""
        letters = (letter for drafts in self.runs() for letter in "M" + "m" * drafts)
        return "".join(islice(letters, n))

    @property
    def most(self) -> int:
        """Most drafts in a row."""
        return max(drafts for _, drafts in self.pairs)


def parse_schedule(spec: str | Sequence[int] | Schedule) -> Schedule:
    """Read a schedule.

    Args:
        spec: `vanilla`, `balance`, `boost`, `turbo`; letters such as `MmmmMM`; or counts such as
            `1,4,3,8`, as text or numbers.

    Raises:
        SpecError: It is none of these.
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
