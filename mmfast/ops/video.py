"""Videos as tokens: change over time, unusual tokens, static windows, shots and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import ROUNDING, snap, stable_topk
from mmfast.ops.similarity import TABLE_CHUNK, paired_cosine, sum_of, unit_rows
from mmfast.ops.temporal_difference import temporal_difference


def temporal_cosine(x: Tensor, frames: int) -> Tensor:
    """Cosine of tokens `[..., T * n, D]` with the same place a frame later: `[..., T - 1, n]`."""
    video = x.unflatten(-2, (frames, -1))  # [..., T, n, D]
    lead, n = video.shape[:-3], video.shape[-2]
    flat = video.reshape(-1, n, x.shape[-1])
    cosine = temporal_difference(flat, [frames] * (len(flat) // frames), l1=False).cosine
    return cosine.reshape(*lead, frames, n)[..., 1:, :]


_WIDTHS = (0.125, 0.25, 0.5, 1.0, 2.0)


def closeness(x: Tensor, centre: Tensor) -> Tensor:
    """Sum of `exp(-|x - centre|^2 / (2 a))` over five widths a from 1/8 to 2: 5 at the centre."""
    square = (x - centre).square().sum(-1)
    total = (-square / (2 * _WIDTHS[0])).exp()
    for width in _WIDTHS[1:]:
        total = total + (-square / (2 * width)).exp()
    return total


def spatial_novelty(frame: Tensor, rows: int, columns: int) -> Tensor:
    """One minus the larger cosine with the token on the left and above; infinite for the first."""
    image = frame.unflatten(-2, (rows, columns))
    alike = torch.full(image.shape[:-1], -torch.inf, dtype=torch.float64, device=image.device)
    alike[..., 1:] = paired_cosine(image[..., 1:, :], image[..., :-1, :])
    above = paired_cosine(image[..., 1:, :, :], image[..., :-1, :, :])
    alike[..., 1:, :] = torch.maximum(alike[..., 1:, :], above)
    return 1.0 - alike.flatten(-2)


Floats = NDArray[np.floating[Any]]


class SinceKept:
    """Changes of tokens since the last one kept at their place, for any threshold."""

    def __init__(self, x: Tensor, frames: int) -> None:
        places = rearrange(x.detach(), "(t n) d -> n t d", t=frames)
        self._change: Floats = _changes(places).cpu().numpy()  # [n, T, T]

    def changes(self, threshold: float) -> Floats:
        """Change of every later token since the last one kept, above `threshold`: `[T - 1, n]`."""
        n, frames, _ = self._change.shape
        place, last = np.arange(n), np.zeros(n, dtype=np.int64)
        seen = np.empty((frames - 1, n))
        for t in range(1, frames):
            seen[t - 1] = self._change[place, last, t]
            last[seen[t - 1] > threshold] = t
        return seen

    def tuned(self, count: int) -> float:
        """Highest threshold, in steps of 2^-30, that keeps at least `count` later tokens."""
        low, high = -round(1 / ROUNDING), round(2 / ROUNDING)  # nothing is above 2
        while high - low > 1:
            middle = (low + high) // 2
            if int((self.changes(middle * ROUNDING) > middle * ROUNDING).sum()) >= count:
                low = middle
            else:
                high = middle
        return low * ROUNDING


def _changes(places: Tensor) -> Tensor:
    """One minus the cosine of every two frames, of each place of `[n, T, D]`: `[n, T, T]`."""
    n, frames, width = places.shape
    few = n if places.is_cuda else max(1, TABLE_CHUNK // max(1, frames * width))
    change = places.new_empty(n, frames, frames, dtype=torch.float64)
    for spot in range(0, n, max(1, few)):
        rows = unit_rows(places[spot : spot + few].double())
        change[spot : spot + few] = 1.0 - snap(rows @ rows.transpose(-1, -2))
    return change


_CHANNEL_CHUNK = TABLE_CHUNK // 2  # the sums hold two temporaries


def steady_channels(x: Tensor, count: int) -> Tensor:
    """The `count` channels of `[..., N, D]` of least variance, smallest first: `[..., count]`."""
    n = x.shape[-2]
    # From the first token on: a channel that never changes then has a variance of exactly 0.
    first = x[..., :1, :].double()
    mean = sum_of((part.double() - first).sum(-2, keepdim=True) for part in parts(x)) / n
    start = first + mean
    square = sum_of((part.double() - start).square_().sum(-2) for part in parts(x))
    return (square / n).sort(dim=-1, stable=True).indices[..., :count]


def parts(x: Tensor, least: int = 1) -> tuple[Tensor, ...]:
    """Split `x` `[..., N, D]` into a multiple of `least` tokens each; one part on a device."""
    if x.device.type != "cpu" or not x.numel():
        return (x,)
    rows = max(1, _CHANNEL_CHUNK * x.shape[-2] // (x.numel() * least)) * least
    some: tuple[Tensor, ...] = x.split(rows, -2)
    return some


def take_channels(x: Tensor, channels: Tensor) -> Tensor:
    """Channels `[..., C]` of `x` `[..., N, D]`: `[..., N, C]`."""
    if channels.shape[:-1].numel() == 1:  # an index per number is slow to read
        return x.index_select(-1, channels.flatten())
    index = channels[..., None, :].expand(*x.shape[:-1], channels.shape[-1])
    return x.gather(-1, index)


Segment = tuple[int, int]  # first and last frame


def static_windows(alike: Tensor, longest: int) -> tuple[list[Segment], int]:
    """Maximise the tokens saved when static places of a window are kept once.

    A place is static in frames a..b if it is `alike` (`[T - 1, n]` bool) in all steps between. A
    window of at most `longest` frames saves `static places * (b - a)` tokens; ties go to no window,
    then to the shortest. Returns segments that cover all frames, and the tokens saved.
    """
    saved = _tokens_saved(alike.cpu().numpy())
    frames = len(saved)
    best = np.zeros(frames + 1, dtype=np.int64)  # best[i]: tokens saved in the first i frames
    start = list(range(frames))  # of the segment that ends with a frame
    for last in range(1, frames):
        best[last + 1] = best[last]
        low = max(0, last + 1 - longest)
        gains = best[low:last] + saved[last, low:last]
        if low < last:
            shortest = last - 1 - int(gains[::-1].argmax())
            if gains[shortest - low] > best[last]:
                best[last + 1], start[last] = gains[shortest - low], shortest
    segments: list[Segment] = []
    last = frames - 1
    while last >= 0:
        segments.append((start[last], last))
        last = start[last] - 1
    return segments[::-1], int(best[frames])


def _tokens_saved(alike: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Entry (b, a): tokens that a window of frames a..b saves, 0 unless a < b; `[T, T]`."""
    frames, n = len(alike) + 1, alike.shape[1]
    frame = np.arange(frames)
    # The next change of a place: it is static in every window that ends there or before.
    change = np.full((frames, n), frames - 1)
    change[:-1] = np.where(alike, frames - 1, frame[:-1, None])
    until = np.minimum.accumulate(change[::-1], axis=0)[::-1]
    spots = np.bincount((frame[:, None] * frames + until).ravel(), minlength=frames * frames)
    static = spots.reshape(frames, frames)[:, ::-1].cumsum(axis=1)[:, ::-1]  # [a, b]
    saved: NDArray[np.int64] = np.ascontiguousarray(static.T)
    saved *= np.maximum(frame[:, None] - frame, 0)
    return saved


def static_places(alike: Tensor, segment: Segment) -> Tensor:
    """Places `[n]` that are static in a segment; none in a single frame."""
    first, last = segment
    if first == last:
        return torch.zeros(alike.shape[-1], dtype=torch.bool, device=alike.device)
    return alike[first:last].all(0)


@dataclass
class Quota:
    """Tokens to keep of a video of T frames with n places."""

    clusters: list[int]  # clusters of each window
    chosen: Tensor  # `[T, n]` bool, tokens that are not static and stay
    released: Tensor  # `[T, n]` bool, static tokens that leave their mean and stay for themselves


def paper_quota(places: list[int], dynamic: Tensor, attn: Tensor, ratio: float) -> Quota:
    """Counts of the paper from static places by window, and `dynamic` and `attn` `[T, n]`."""
    score = attn.masked_fill(~dynamic, -torch.inf)
    rank = stable_topk(score, dynamic.shape[-1]).argsort(-1)
    quota = [math.ceil(int(count) * ratio) for count in dynamic.sum(-1)]
    chosen = (rank < torch.tensor(quota, device=rank.device)[:, None]) & dynamic
    return Quota([round(count * ratio) for count in places], chosen, torch.zeros_like(chosen))


def exact_quota(
    quota: Quota, places: list[int], dynamic: Tensor, late: Tensor, attn: Tensor, budget: int
) -> Quota:
    """Move a quota to exactly `budget` tokens.

    Too many: the least attended chosen tokens go, then clusters of the fullest window. Too few: the
    most attended tokens left out come back, then clusters where most places share one, and at last
    static tokens leave their mean. `places` are the static places of each window; `dynamic` tokens
    `[T, n]` are not static, `late` ones are and lie after the first frame of their window.
    """
    clusters = list(quota.clusters)
    missing = budget - sum(clusters) - int(quota.chosen.sum())
    number = max(int(quota.chosen.sum()) + min(missing, 0), 0)
    chosen = _best(quota.chosen, attn, number)
    missing = budget - sum(clusters) - number
    if missing > 0:
        chosen = chosen | _best(dynamic & ~chosen, attn, missing)
    missing = budget - sum(clusters) - int(chosen.sum())
    while missing < 0:
        clusters[clusters.index(max(clusters))] -= 1
        missing += 1
    while missing > 0 and clusters != places:
        room = [size - used for size, used in zip(places, clusters, strict=True)]
        clusters[room.index(max(room))] += 1
        missing -= 1
    return Quota(clusters, chosen, _best(late, attn, missing))


def _best(candidates: Tensor, attn: Tensor, count: int) -> Tensor:
    """The `count` most attended candidates `[T, n]`, or all of them if they are fewer."""
    count = min(count, int(candidates.sum()))
    best = torch.zeros_like(candidates).flatten()
    best[stable_topk(attn.masked_fill(~candidates, -torch.inf).flatten(), count)] = True
    return best.reshape(candidates.shape)


def shots(video: Tensor, least: int, tau: float) -> list[tuple[int, int]]:
    """First and last frames of segments of `[T, n, D]`, cut where frames are least alike.

    Frames are compared by their mean token, cut below `tau`, and into `least` segments at least.
    """
    if video.device.type != "cpu":
        frames = video.double().mean(1)  # [T, D]
    else:
        frames = torch.stack([frame.double().mean(0) for frame in video])
    alike = snap(paired_cosine(frames[:-1], frames[1:]))  # [T - 1]
    cut = alike < tau
    cut[stable_topk(-alike, min(max(least, 1), len(frames)) - 1)] = True
    last = [*torch.nonzero(cut)[:, 0].tolist(), len(frames) - 1]
    return list(zip([0, *(end + 1 for end in last[:-1])], last, strict=True))


def first_frame(x: Tensor, grid: tuple[int, int, int], budget: int) -> Tensor:
    """Places of the first frame to keep, for methods that then keep only changes.

    The whole frame, if the budget holds it. Otherwise a quarter of it (all for an image), which of
    the shares tried on the embedded model answered best at 10 %, of the tokens least like both the
    token on their left and the one above.
    """
    frames, rows, columns = grid
    n = rows * columns
    if budget >= n:
        return torch.arange(n, device=x.device).expand(*x.shape[:-2], n)
    share = budget if frames == 1 else (budget + 3) // 4
    return stable_topk(spatial_novelty(x[..., :n, :], rows, columns), share)


@dataclass(frozen=True)
class ChunkMemory:
    """Memory of the chunks so far, of fixed size for a stream of any length."""

    total: Tensor  # `[..., C]` float64, sum of the chunks' means over their steady channels
    chunks: int  # number of chunks


@dataclass(frozen=True)
class Familiarity:
    """Scores of one chunk."""

    score: Tensor  # `[..., T, n]` float64, high near the memory and near the frame's mean
    channels: Tensor  # `[..., C]` channels used, steadiest first
    memory: ChunkMemory  # the memory with this chunk in it


def familiarity(x: Tensor, frames: int, memory: ChunkMemory | None = None) -> Familiarity:
    """Score the tokens of a chunk `[..., T * n, D]` against the memory and their own frame.

    Only the half of the channels that vary least over the chunk counts. As these differ between
    chunks, the memory holds levels by rank, not a picture.
    """
    channels = steady_channels(x, max(1, x.shape[-1] // 2))
    n = x.shape[-2] // frames
    chunks = [take_channels(part, channels) for part in parts(x, n)]  # of whole frames
    mean = sum_of(part.double().sum(-2) for part in chunks) / x.shape[-2]  # [..., C]
    old = memory or ChunkMemory(mean.new_zeros(mean.shape), 0)
    new = ChunkMemory(old.total + mean, old.chunks + 1)
    remembered = unit_rows((new.total / new.chunks)[..., None, :])[..., None, :]

    def score(part: Tensor) -> Tensor:
        video = unit_rows(part.double()).unflatten(-2, (-1, n))  # [..., t, n, C]
        return closeness(video, remembered) + closeness(video, video.mean(-2, keepdim=True))

    return Familiarity(snap(torch.cat([score(part) for part in chunks], -2)), channels, new)


def regions(item: Tokens) -> Tensor:
    """Number the region of each token, `[N]` int64: its tile, or its frame where there are none."""
    tile = item.signal("tile")
    if tile is not None:
        number: Tensor = tile.unique(return_inverse=True)[1]
        return number
    frames = 1 if item.grid is None else item.grid[0]
    return torch.arange(frames, device=item.x.device).repeat_interleave(item.n // frames)


BEFORE, LEFT, ABOVE = (1, 0, 0), (0, 0, 1), (0, 1, 0)


def raster_links(tokens: Tokens, step: tuple[int, int, int]) -> Tensor:
    """Return the token `step` earlier in the raster or mosaic, `[N]` int64; -1 where none is."""
    place, tile = tokens.need("place").long(), tokens.signal("tile")
    plane = torch.zeros_like(place[:, 0]) if tile is None else (tile > 0).long()
    sizes = (place.amax(0) + 1).tolist()

    def code(where: Tensor) -> Tensor:
        t, y, x = where.unbind(-1)
        flat: Tensor = ((plane * sizes[0] + t) * sizes[1] + y) * sizes[2] + x
        return flat

    table = torch.full((2 * sizes[0] * sizes[1] * sizes[2],), -1, device=place.device)
    table[code(place)] = torch.arange(tokens.n, device=place.device)
    earlier = place - torch.tensor(step, device=place.device)
    found = table[code(earlier.clamp_min(0))]
    return found.masked_fill((earlier < 0).any(-1), -1)


def likeness(x: Tensor, link: Tensor) -> Tensor:
    """Cosine of each token `[N, D]` with its linked token, `[N]`; -inf without a link."""
    alike = paired_cosine(x, x.index_select(0, link.clamp_min(0)))
    return alike.masked_fill(link < 0, -torch.inf)
