"""Changes between frames: a gate for similar ones, a rule for changed patches, global motion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.spec import count
from mmfast.ops.ranking import stable_topk

Pixels = NDArray[Any]
CELLS = 32  # a frame is compared as a raster of this many cells each way
_SAMPLES = 8  # pixels read of a cell each way: enough to average sensor noise away


@dataclass(frozen=True, eq=False)
class GateState:
    """State of a gate, of fixed size."""

    cells: Tensor | None = None  # `[rows, columns, 3]` float32 in [0, 1] of the last frame let in
    size: tuple[int, int] = (0, 0)  # height and width of that frame
    run: int = 0  # frames skipped since then
    seen: int = 0  # frames so far
    skipped: int = 0  # how many of them were skipped

    def snapshot(self) -> dict[str, Any]:
        """Return the state as plain containers and tensors."""
        return {**vars(self), "size": list(self.size)}

    @classmethod
    def restore(cls, tree: Mapping[str, Any]) -> GateState:
        """Return the state of a snapshot."""
        height, width = tree["size"]
        return cls(**{**tree, "size": (height, width)})


class FrameGate:
    """Gate before an encoder, which skips at most `longest` frames in a row.

    A frame passes if any cell of a 32 x 32 raster differs from the last frame THAT PASSED by more
    than `threshold` (mean change of colour, 0 to 1): small moving things and slow drifts show.

    With `similar` = eta, a frame that would pass is skipped by chance all the same, the more often
    the more it resembles the last one that passed: with probability (s - eta) / (1 - eta), where s
    is the cosine similarity of the rasters. That is the stochastic similarity filter of
    StreamDiffusion (arXiv 2312.12491), alone at `threshold=0`: a scene that moves all the time
    costs less, and no frame is frozen out for good. Draws depend on `seed` and on the number of
    the frame alone, so a stream that is restored or cut into other pieces skips the same frames.
    """

    def __init__(
        self,
        threshold: float = 0.03,
        longest: int | None = None,
        similar: float | None = None,
        seed: int = 0,
    ) -> None:
        if not 0.0 <= threshold < 1.0:
            raise MmfastError(f"gate threshold {threshold} is no change of colour; 0 to 1")
        if longest is not None and longest < 1:
            raise MmfastError(f"longest={longest} skips nothing; give 1 or more, or no gate")
        if similar is not None and not 0.0 <= similar < 1.0:
            raise MmfastError(f"gate similar={similar} is no similarity to skip from; 0 to below 1")
        self.threshold, self.longest = threshold, longest
        self.similar, self.seed = similar, seed

    @property
    def settings(self) -> list[float | int | None]:
        """All that its choices depend on beside the frames."""
        chance = [] if self.similar is None else [self.similar, self.seed]
        return [self.threshold, self.longest, *chance]

    def start(self) -> GateState:
        """Return the state before the first frame."""
        return GateState()

    def step(self, state: GateState, frame: Pixels | Tensor) -> tuple[GateState, bool]:
        """Judge a frame `[H, W, 3]` uint8; return the next state, and True where it passes."""
        pixels = _pixels(frame)
        size = (pixels.shape[0], pixels.shape[1])
        cells = cell_means(pixels)
        if self._passes(state, size, cells):
            return GateState(cells, size, 0, state.seen + 1, state.skipped), True
        run, skipped = state.run + 1, state.skipped + 1
        return GateState(state.cells, state.size, run, state.seen + 1, skipped), False

    def _passes(self, state: GateState, size: tuple[int, int], cells: Tensor) -> bool:
        if state.cells is None or size != state.size or state.run == self.longest:
            return True
        if float((cells - state.cells).abs().mean(-1).max()) <= self.threshold:
            return False
        if self.similar is None:
            return True
        near = (similarity(cells, state.cells) - self.similar) / (1.0 - self.similar)
        return float(np.random.default_rng([self.seed, state.seen]).random()) >= near


def similarity(cells: Tensor, others: Tensor) -> float:
    """Cosine similarity of two rasters of colours; black frames resemble black ones alone."""
    a, b = cells.double().flatten(), others.double().flatten()
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale else float(torch.equal(a, b))


def cell_means(pixels: Pixels) -> Tensor:
    """Mean colours `[rows, columns, 3]` in [0, 1], of at most 8 x 8 evenly spaced pixels a cell."""
    for axis in (0, 1):
        stride = max(1, pixels.shape[axis] // (CELLS * _SAMPLES))
        pixels = pixels[::stride] if axis == 0 else pixels[:, ::stride]
    sums: Pixels = pixels.astype(np.float32)
    for axis in (0, 1):
        length = pixels.shape[axis]
        cells = min(CELLS, length)
        starts = np.arange(cells) * length // cells
        counts = np.diff(starts, append=length).astype(np.float32)
        sums = np.add.reduceat(sums, starts, axis=axis)
        sums /= counts[:, None, None] if axis == 0 else counts[:, None]
    return torch.from_numpy(sums / np.float32(255.0))


def _pixels(frame: Pixels | Tensor) -> Pixels:
    pixels: Pixels = frame.cpu().numpy() if isinstance(frame, Tensor) else np.asarray(frame)
    if pixels.ndim != 3 or pixels.shape[-1] != 3 or pixels.dtype != np.uint8 or 0 in pixels.shape:
        raise MmfastError(
            f"the gate got a frame of shape {list(pixels.shape)} and dtype {pixels.dtype}; give "
            "[H, W, 3] uint8"
        )
    return pixels


@dataclass(frozen=True)
class Refresh:
    """Rule that chooses the patches of a frame to compute anew; unchanged ones never are."""

    share: float | None = 0.25  # share of a frame's patches, the most changed ones, at most
    threshold: float | None = None  # instead of a share, the change from which a patch counts
    cut: float | None = 0.05  # mean change of the patches left out above which all are computed
    every: int | None = 32  # frames between two computed whole, not counting equal frames

    def __post_init__(self) -> None:
        if (self.share is None) == (self.threshold is None):
            raise MmfastError(
                f"frame cache with refresh={self.share} and threshold={self.threshold}; "
                "give one of them, for example refresh=0.25"
            )
        if self.share is not None and not 0.0 < self.share <= 1.0:
            raise MmfastError(f"refresh={self.share} is no share of patches; choose 0 to 1")
        for name in ("threshold", "cut"):
            value = getattr(self, name)
            if value is not None and not value >= 0.0:
                raise MmfastError(f"{name}={value} is no change of a patch; choose 0 or more")
        if self.every is not None and self.every < 1:
            raise MmfastError(
                f"every={self.every} never computes a frame; choose 1 or more, or None"
            )

    @property
    def whole(self) -> bool:
        """True if every frame is computed whole."""
        return self.share == 1.0 or self.every == 1

    def choose(self, change: Tensor, since: int) -> Tensor | None:
        """Choose the patches to compute anew by their `change` `[n]`; None for all of them."""
        n = change.shape[0]
        rows = self.most_changed(change)
        if not bool(change.any()):
            return rows  # the frame is the reference, however old that is
        if len(rows) == n or (self.every is not None and since >= self.every):
            return None
        if self.cut is not None and left_out(change, rows) > self.cut:
            return None  # too much change would be left out
        return rows

    def most_changed(self, change: Tensor) -> Tensor:
        """Return the patches that share or threshold choose by `change` `[n]`, ascending."""
        if self.share is None:
            return (change > (self.threshold or 0.0)).nonzero()[:, 0]
        first = stable_topk(change, count(self.share, change.shape[0]) or 1)
        return first[change[first] > 0].sort().values


def left_out(change: Tensor, rows: Tensor) -> float:
    """Return the mean `change` `[n]` of the patches that are not among `rows` `[k]`."""
    stale = torch.ones_like(change).index_fill(0, rows, 0.0)
    return float((change * stale).sum() / stale.sum().clamp_min(1.0))


def changes(patches: Tensor, reference: Tensor) -> Tensor:
    """Change of each embedded patch `[n, D]` from its reference `[n, D]`: `[n]` float32.

    The squared distance relative to the spread of the patches of both frames around their mean: 0
    where nothing changed, about 1 on average where one picture follows another.
    """
    x, r = patches.float(), reference.float()
    spread = sum((each - each.mean(0)).square().sum(-1).mean() for each in (x, r))
    distance = (x - r).square().sum(-1)
    return distance / torch.as_tensor(spread).clamp_min(torch.finfo(torch.float32).tiny)


NEARER = 0.7  # a shifted picture must differ this much less than the picture as it stood


def global_shift(now: Tensor, before: Tensor) -> tuple[int, int]:
    """Estimate by how many pixels (down, right) a picture `[H, W]` moved as a whole.

    The peak of the phase correlation (Kuglin and Hines, 1975) of both pictures under a Hann window:
    three Fourier transforms. A shift that does not bring the pictures clearly nearer, where they
    overlap, is none: (0, 0).
    """
    if now.shape != before.shape or torch.equal(now, before):
        return 0, 0
    height, width = now.shape
    window = torch.hann_window(height, periodic=False, device=now.device)[:, None]
    window = window * torch.hann_window(width, periodic=False, device=now.device)
    a, b = (torch.fft.rfft2((each - each.mean()) * window) for each in (now, before))
    cross = a * b.conj()
    peak = int(torch.fft.irfft2(cross / cross.abs().clamp_min(1e-9), s=(height, width)).argmax())
    down, right = (
        (at + size // 2) % size - size // 2
        for at, size in zip(divmod(peak, width), (height, width), strict=True)
    )
    moved = _difference(now, before, down, right)
    return (down, right) if moved < NEARER * _difference(now, before, 0, 0) else (0, 0)


def _difference(now: Tensor, before: Tensor, down: int, right: int) -> float:
    """Mean difference of `now` from `before` moved down and right, where both overlap."""
    height, width = now.shape
    new = now[max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)]
    old = before[max(-down, 0) : height + min(-down, 0), max(-right, 0) : width + min(-right, 0)]
    return float((new - old).abs().mean()) if new.numel() else float("inf")
