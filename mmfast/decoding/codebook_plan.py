"""How many codes of a frame the next depth pass takes, from what was accepted so far."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_FORGET = 0.98  # of what was seen, per pass: about the last fifty frames count


@dataclass(eq=False)
class FrameCount:
    """What was spent and what was accepted, per codebook.

    Attributes:
        codes: Codebooks K that depth passes predict.
        frames: Frames, of all streams.
        rounds: Passes of the depth transformer, each for the whole batch.
        tokens: Codebooks these passes took together.
        drafted: `[K]` codes of the drafter that were checked.
        accepted: `[K]` of them, accepted.
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

    A pass over n codes costs 1 + share x (n - 1) passes over one. A stretch settles every code
    up to the first that is refused, and that one too; how many that will be follows from the
    share accepted per codebook so far, of first drafts and of later ones apart.

    Args:
        codes: Codebooks K.
        share: What each further code of a pass costs, in passes over one code: near 0 where
            the pass waits for weights that all codes share (CSM), more where it computes or
            where every codebook has weights of its own (Moshi); `measure_share` finds it.
    """

    def __init__(self, codes: int, share: float = 0.0) -> None:
        self.codes = codes
        self.share = share
        self._tried = [[2.0] * codes, [2.0] * codes]  # two codes each of which one was right
        self._right = [[1.0] * codes, [1.0] * codes]

    def length(self, at: int, batch: int, again: bool) -> int:
        """How many codes from `at` on the next pass takes, 1 at least.

        Args:
            at: The first code that is not settled.
            batch: Streams that go together: the slowest holds up the others.
            again: The first draft of this frame has been refused somewhere.
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
    """What a further code of a pass costs here, in passes over one code.

    Args:
        one: Runs a pass over one code.
        many: Runs a pass over n codes.
        n: Two at least.
        clock: Seconds; `time.process_time` on a processor that others use too.

    Returns:
        (time of many / time of one - 1) / (n - 1), in 0..1; medians of interleaved runs.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(9):
        for run, taken in ((one, times[0]), (many, times[1])):
            start = clock()
            run()
            taken.append(clock() - start)
    ratio = statistics.median(times[1]) / max(statistics.median(times[0]), 1e-9)
    return min(max((ratio - 1) / (n - 1), 0.0), 1.0)
