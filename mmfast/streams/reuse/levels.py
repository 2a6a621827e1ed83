"""Bits of keys and values chosen as they are fetched, so that a deadline is kept (CacheGen).

What a prompt takes from files are chunks that lie there in several numbers of bits. Before each
chunk its bits are chosen by the bandwidth that the last file had; a chunk may be left out, too, and
its text read again (Liu et al., 2310.07240).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AGAIN = 0  # in the place of bits: nothing is fetched, the text is read again


@dataclass(frozen=True)
class ChunkOffer:
    """A chunk that may be fetched: `bytes` by bits, and milliseconds of reading its text again."""

    sizes: Mapping[int, int]
    again_ms: float = math.inf

    def times(self, bandwidth: float) -> dict[int, float]:
        """Milliseconds by bits, and of `AGAIN`, at a bandwidth in bytes a millisecond."""
        return {AGAIN: self.again_ms} | {b: n / bandwidth for b, n in self.sizes.items()}


def chosen_bits(offers: Sequence[ChunkOffer], bandwidth: float, left_ms: float) -> list[int]:
    """Choose bits of each chunk, or `AGAIN`, so that all of them arrive in `left_ms`.

    The coarsest chunk is as fine as it can be, where text that is read again is the finest; among
    equals the fastest is taken. Where nothing keeps the deadline, each chunk comes the fastest way.
    `bandwidth` is in bytes a millisecond. Other than in the paper, which sends all chunks that are
    left in one number of bits, a chunk comes finer where that is faster.
    """
    times = [offer.times(bandwidth) for offer in offers]
    ranks = sorted({bits for each in times for bits in each if bits != AGAIN}, reverse=True)
    found: list[int] = []
    for worst in [AGAIN, *ranks]:
        fine = [[b for b in each if b == AGAIN or b >= worst > AGAIN] for each in times]
        found = [
            min(some, key=lambda b: (each[b], -b)) for some, each in zip(fine, times, strict=True)
        ]
        if sum(each[b] for each, b in zip(times, found, strict=True)) <= left_ms:
            return found
    return found


class FetchClock:
    """Bandwidth of a folder's files as the last one had it, and the pace of reading text.

    Until a file was fetched there is no bandwidth, and the first comes in the fewest bits.
    """

    def __init__(self) -> None:
        self.bandwidth: float | None = None  # bytes a millisecond
        self.token_ms = math.inf  # of text that is read again

    def fetched(self, size: int, ms: float) -> None:
        """Learn from a file of `size` bytes."""
        self.bandwidth = size / max(ms, 1e-6)

    def read(self, tokens: int, ms: float) -> None:
        """Learn from a prompt of which `tokens` were read; a few tell nothing of many."""
        if tokens >= 64:
            self.token_ms = ms / tokens

    def next_bits(
        self, sizes: Sequence[Mapping[int, int]], n: Sequence[int], left_ms: float
    ) -> int:
        """Choose bits of the first of the chunks that are left, of `n` tokens each, or `AGAIN`."""
        offers = [ChunkOffer(each, self.token_ms * k) for each, k in zip(sizes, n, strict=True)]
        if self.bandwidth is None:
            return min(sizes[0], default=AGAIN)
        return chosen_bits(offers, self.bandwidth, left_ms)[0]
