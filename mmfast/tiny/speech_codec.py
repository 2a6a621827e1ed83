"""The codebooks of the embedded speech codec, fitted to recordings.

Residual k-means with a price on rare entries (P. Chou, T. Lookabaugh, R. Gray, "Entropy-constrained
vector quantization", 1989). Book 0 sees the envelope alone, so that its codes do not depend on
pitch; book 1 what is left of it, pitch and voicing. Entry 0 of both is silence.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import MediaError
from mmfast.frontends.codecs.embedded_features import COEFFICIENTS, FRAME, PAST, STEPS, features

ENTRIES = 1024
PRICES = (15.0, 22.0)  # of one nat, in squared distance
ROUNDS = 20
SAMPLE = 120_000  # frames to fit to
ENVELOPE = COEFFICIENTS * STEPS
Books = tuple[Tensor, Tensor]


def recording_features(pcm: Tensor) -> Tensor:
    """Features of one recording `[n]`: `[ceil(n / 640), 100]`, float64."""
    rest = -pcm.shape[-1] % FRAME
    return features(F.pad(pcm.double(), (PAST, rest))[None])[0]


def _nearest(frames: Tensor, book: Tensor, price: Tensor) -> Tensor:
    base = book.square().sum(-1) + price
    return torch.cat([(base - 2.0 * part @ book.mT).argmin(-1) for part in frames.split(8192)])


def fit_book(frames: Tensor, entries: int, price: float, seed: int) -> Books:
    """One book.

    Args:
        frames: `[N, D]`.
        entries: V.
        price: Squared distance that a nat of surprise is worth.
        seed: Of the first entries.

    Returns:
        Entries `[V, D]`, the first one zero, and their prices `[V]`.
    """
    draw = torch.Generator().manual_seed(seed)
    book = frames[torch.randperm(len(frames), generator=draw)[:entries]].clone()
    cost = frames.new_zeros(entries)
    for turn in range(ROUNDS):
        book[0] = 0.0
        own = _nearest(frames, book, cost)
        count = torch.bincount(own, minlength=entries).to(frames.dtype)
        total = torch.zeros_like(book).index_add_(0, own, frames)
        fresh = frames[torch.randint(len(frames), (entries,), generator=draw)]
        unused = count == 0
        book = torch.where(unused[:, None], fresh, total / count.clamp(min=1.0)[:, None])
        cost = -price * ((count + 1.0) / (count + 1.0).sum()).log()
        if turn < ROUNDS - 3:  # a new entry gets a chance
            cost[unused] = cost.min()
    book[0] = 0.0
    return book, cost


def fit_codec(corpus: Iterable[Tensor], seed: int = 0) -> Books:
    """Codebooks for recordings.

    Args:
        corpus: Recordings `[n]` at 16 kHz; an hour of all voices is enough.
        seed: The same seed and recordings give the same books.

    Returns:
        `books [2, V, 100]` rounded to float16 and `bias [2, V]` float32, as they are stored.

    Raises:
        MediaError: Fewer frames than entries.
    """
    frames = torch.cat([recording_features(pcm) for pcm in corpus]).float()
    if len(frames) < ENTRIES:
        raise MediaError(f"{len(frames)} frames are too few for {ENTRIES} entries; add recordings")
    draw = torch.Generator().manual_seed(seed)
    left = frames[torch.randperm(len(frames), generator=draw)[:SAMPLE]]
    books, costs = [], []
    for index, price in enumerate(PRICES):
        seen = left.clone()
        if index == 0:
            seen[:, ENVELOPE:] = 0.0
        book, cost = fit_book(seen, ENTRIES, price, seed + index)
        book = book.half().float()
        books.append(book)
        costs.append(cost)
        left = left - book[_nearest(seen, book, cost)]
    return torch.stack(books).half(), torch.stack(costs)
