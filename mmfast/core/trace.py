"""Trace: tokens in and out, time and memory of every stage, and the fate of every token."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError, warn
from mmfast.core.reduction import Reduction

SELECT = "select"  # stage of the row that sums up `Trace.reads`


@dataclass(frozen=True)
class View:
    """Places of the tokens of one image or clip.

    `place` `[N, 3]` is frame, row and column, `tile` `[N]` the tile of an image (0 = overview,
    which has a raster of its own), `source` the kind of media and the number among those of its
    kind. `start` counts the reductions before this item; `loose` is True where the model defines no
    layout of tiles, so `place` has them side by side.
    """

    place: Tensor
    tile: Tensor | None = None
    source: tuple[str, int] = ("image", 0)
    start: int = 0
    loose: bool = False

    def shaped(self, aspect: float) -> View:
        """Lay loose tiles out in the rows and columns nearest to `aspect`, width by height."""
        if not self.loose or self.tile is None:
            return self
        count = int(self.tile.max())
        shapes = [(count // c, c) for c in range(1, count + 1) if count % c == 0]
        _, columns = min(shapes, key=lambda shape: abs(shape[1] / shape[0] - aspect))
        place = tile_places(self.tile, columns)
        return self if place is None else replace(self, place=place)

    def rasters(self) -> list[Tensor]:
        """Tokens of each frame, `[n]`; of a tiled image the mosaic, then the overview."""
        if self.tile is not None and bool((self.tile > 0).any()):
            parts = [(self.tile > 0).nonzero()[:, 0], (self.tile == 0).nonzero()[:, 0]]
            return [part for part in parts if len(part)]
        time = self.place[:, 0]
        return [(time == t).nonzero()[:, 0] for t in time.unique()]


def tile_places(tile: Tensor, columns: int | None = None) -> Tensor | None:
    """Places `(0, y, x)` `[N, 3]` of whole square tiles in `columns` columns, one row if None.

    `tile` `[N]` is the tile of each token, 0 = overview. None where tiles are not squares of one
    size.
    """
    counts = tile.bincount()
    counts = counts[counts > 0]
    side = math.isqrt(int(counts[0]))
    if bool((counts != side * side).any()):
        return None
    number = (tile - 1).clamp_min(0)
    columns = columns or int(tile.max())
    order = tile.argsort(stable=True)
    inside = torch.empty_like(tile)
    inside[order] = torch.arange(len(tile)) % (side * side)
    y = number // columns * side + inside // side
    x = number % columns * side + inside % side
    return torch.stack([torch.zeros_like(y), y, x], dim=-1)


@dataclass(frozen=True)
class Fate:
    """Fate of N tokens: `owner` `[N]` is the output that holds each one, -1 where it was dropped.

    `share` `[N]` is 1 where a token is kept as it is, its part of the output where it was merged, 0
    where it was dropped; `keep` `[M]` is the token each output stands for.
    """

    share: Tensor
    owner: Tensor
    keep: Tensor


def fate_of(n: int, reductions: Sequence[Reduction]) -> Fate:
    """Return the fate of `n` tokens under reductions one after the other.

    Where one source feeds several outputs (a mix), it counts with its largest part in one.
    MmfastError where a reduction does not start from the tokens that the one before left.
    """
    share, owner, keep = torch.ones(n), torch.arange(n), torch.arange(n)
    for reduction in reductions:
        if reduction.n != len(keep):
            raise MmfastError(
                f"a stage took {reduction.n} tokens where the one before left {len(keep)}: chunked "
                "prefill reduces in parts; leave out prefill_chunk_size to see what was kept"
            )
        slot, gone = owner.clamp_min(0), owner < 0
        part, where = _parts(reduction)
        share = (share * part[slot]).masked_fill(gone, 0)
        owner = where[slot].masked_fill(gone, -1)
        keep = keep[reduction.keep.cpu()]
    return Fate(share, owner, keep)


def _parts(reduction: Reduction) -> tuple[Tensor, Tensor]:
    """Largest part of each source in an output, `[N]`, and that output, -1 if dropped."""
    if reduction.mix is None:
        return reduction.share().cpu().float(), reduction.owner.cpu()
    output, source, weight = (
        value.cpu() for value in (reduction.mix.output, reduction.mix.source, reduction.mix.weight)
    )
    weight = weight.abs().float()
    total = torch.zeros(reduction.m).index_add_(0, output, weight)
    part = weight / total[output].clamp_min(torch.finfo(torch.float32).tiny)
    best, where = torch.zeros(reduction.n), torch.full((reduction.n,), -1)
    for index in part.argsort().tolist():  # the largest part is written last
        best[source[index]], where[source[index]] = part[index], output[index]
    keep = reduction.keep.cpu()
    where[keep] = torch.arange(reduction.m)
    return best, where


@dataclass(frozen=True)
class Cells:
    """One frame as rasters `[rows, columns]`; `share` and `owner` as in `Fate`, 0 and -1 if empty.

    `stands` is True where an output stands.
    """

    share: Tensor
    owner: Tensor
    stands: Tensor


def cells_of(view: View, fate: Fate) -> list[Cells]:
    """Return every frame of an item; see `View.rasters`."""
    stands = torch.zeros(len(fate.share), dtype=torch.bool)
    stands[fate.keep] = True
    found = []
    for tokens in view.rasters():
        row, column = view.place[tokens, 1], view.place[tokens, 2]
        shape = (int(row.max()) + 1, int(column.max()) + 1)
        share, owner = torch.zeros(shape), torch.full(shape, -1)
        standing = torch.zeros(shape, dtype=torch.bool)
        share[row, column], owner[row, column] = fate.share[tokens], fate.owner[tokens]
        standing[row, column] = stands[tokens]
        found.append(Cells(share, owner, standing))
    return found


@dataclass
class Row:
    """One stage: tokens in and out (0 where it has none), milliseconds and peak bytes.

    A stage that reduces says by which method; several stages at one site are a row each.
    """

    stage: str
    tokens_in: int = 0
    tokens_out: int = 0
    ms: float = 0.0
    peak_bytes: int = 0
    method: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the columns of the JSON documents; their rows come in the order of the spec."""
        return {key: value for key, value in vars(self).items() if key != "method"}

    @property
    def label(self) -> str:
        """Stage and method, for people."""
        return f"{self.stage} {self.method}".strip()

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


@dataclass(frozen=True)
class StepRead:
    """Part of a cache that one decode step read under a policy that chooses at every step.

    `held` and `read` are entries of a layer and KV head, means over both and over rows; `nbytes`
    are those of all keys and values read, and of what was read in order to choose. `fetched` bytes
    of them came from host memory, and `awaited` of these were not on their way before they were
    asked for. In `waited_ms` milliseconds nothing was computed because entries were not there yet,
    and `resident` is the largest number of bytes of entries on the device at one time: those that a
    layer reads, and those that have been sent for.
    """

    held: float
    read: float
    nbytes: int
    fetched: int = 0
    awaited: int = 0
    waited_ms: float = 0.0
    resident: int = 0


@dataclass
class Trace:
    """Rows per stage in the order they ended, and every Reduction that was applied.

    Attributes:
        rows: One `Row` per stage.
        reductions: `(site, item, Reduction)` in order of application; `item` counts the images
            and videos of the batch.
        views: Places of the tokens of each item of the latest call, by number.
        merged: Of items merged inside the vision tower, the mean part `[N]` that the patches of
            a token have in their outputs, by kind and number among their kind.
        patches: Places and reduction of the patches of the same items.
        notes: Remarks in words, such as on a prompt that no stage could act on; each once.
        reads: The part of the cache that each decode step read, where a policy chooses it anew.
        calls: Calls of the model that were seen, prompts and decode steps.
    """

    rows: list[Row] = field(default_factory=list)
    reductions: list[tuple[str, int, Reduction]] = field(default_factory=list)
    views: dict[int, View] = field(default_factory=dict, repr=False)
    merged: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict, repr=False)
    patches: dict[tuple[str, int], tuple[View, Reduction]] = field(default_factory=dict, repr=False)
    notes: list[str] = field(default_factory=list)
    reads: list[StepRead] = field(default_factory=list, repr=False)
    calls: int = 0

    def warn(self, note: str) -> None:
        """Note something and warn of it, the first time."""
        if note not in self.notes:
            self.notes.append(note)
            warn(note)

    @contextmanager
    def stage(self, name: str, tokens_in: int = 0, tokens_out: int = 0) -> Iterator[Row]:
        """Time a stage; the caller may set the token counts on the yielded row."""
        row = Row(name, tokens_in, tokens_out)
        start = settled()
        try:
            yield row
        finally:
            row.ms = (settled() - start) * 1e3
            row.peak_bytes = peak_bytes()
            self.rows.append(row)

    def add(self, stage: str, tokens_in: int, tokens_out: int, ms: float, method: str = "") -> None:
        """Append a row that was measured elsewhere."""
        self.rows.append(Row(stage, tokens_in, tokens_out, ms, peak_bytes(), method))

    def split(self, row: Row, parts: list[Row]) -> None:
        """Replace a row by `parts`; other threads may have added rows since."""
        at = next(i for i in reversed(range(len(self.rows))) if self.rows[i] is row)
        self.rows[at : at + 1] = parts

    def record(self, site: str, item: int, reduction: Reduction) -> None:
        """Record that `reduction` was applied at `site` to image or video `item`."""
        self.reductions.append((site, item, reduction))

    def mark(self) -> tuple[int, int]:
        """Return where the trace stands, for `take`."""
        return len(self.rows), len(self.reductions)

    def take(self, other: Trace, mark: tuple[int, int]) -> None:
        """Take what `other` has recorded of a call since its `mark`."""
        rows, start = mark
        moved = len(self.reductions) - start
        self.rows += other.rows[rows:]
        self.reductions += other.reductions[start:]
        for item, view in other.views.items():
            if view.start >= start:
                self.views[item] = replace(view, start=view.start + moved)
        self.merged |= other.merged
        self.patches |= other.patches

    def see(
        self,
        item: int,
        place: torch.Tensor | None,
        tile: torch.Tensor | None,
        source: tuple[str, int],
    ) -> None:
        """Record the places `[N, 3]` of an item of a new call; None draws tiles side by side."""
        self.views.pop(item, None)
        tile = None if tile is None else tile.cpu()
        loose = place is None and tile is not None
        place = tile_places(tile) if tile is not None and place is None else place
        if place is not None:
            self.views[item] = View(place.cpu(), tile, source, len(self.reductions), loose)

    def fate(self, item: int = 0) -> Fate:
        """Return the fate of every token of image or clip `item`, after all stages.

        Raises:
            MmfastError: There is no such item, or chunked prefill reduced it in parts.
        """
        view = self._view(item)
        fate = fate_of(len(view.place), self._chain(item))
        inside = self.merged.get(view.source)
        if inside is not None and len(inside) == len(fate.share):
            fate = replace(fate, share=fate.share * inside)
        return fate

    def cells(
        self, item: int = 0, patches: bool = False, aspect: float | None = None
    ) -> list[Cells]:
        """Return the frames of `item` as rasters; of tiles the mosaic, then the overview.

        Args:
            item: Its number.
            patches: Show patches in place of tokens where the vision tower merged them and
                no later stage changed the tokens.
            aspect: Width by height of the picture, for models without a layout of tiles.
        """
        view = self._view(item)
        inside = self.patches.get(view.source)
        if patches and inside is not None and not self._chain(item):
            return cells_of(inside[0], fate_of(inside[1].n, [inside[1]]))
        view = view if aspect is None else view.shaped(aspect)
        return cells_of(view, self.fate(item))

    def _chain(self, item: int) -> list[Reduction]:
        return [
            reduction
            for site, number, reduction in self.reductions[self._view(item).start :]
            if number == item and site != "vit"
        ]

    def heatmap(self, frame: int = 0, item: int = 0) -> Any:
        """Return the share of each token of a frame that reached the answer.

        Args:
            frame: Frame of a clip, as the model sees it (Qwen joins two); of an image cut into
                tiles 0 is the mosaic (tiles side by side where the model defines no layout:
                InternVL) and 1 the overview.
            item: Image or clip of the batch, in reading order.

        Returns:
            A float array `[rows, columns]`: 1 where a token is kept as it is, its part of the
            output where it was merged, 0 where it was dropped, of all stages together.

        Raises:
            MmfastError: There is no such frame or item.
        """
        cells = self.cells(item)
        if not 0 <= frame < len(cells):
            raise MmfastError(
                f"frame {frame} of item {item} does not exist; choose 0 to {len(cells) - 1}"
            )
        return cells[frame].share.numpy()

    def _view(self, item: int) -> View:
        if item not in self.views:
            known = ", ".join(map(str, sorted(self.views))) or "none"
            raise MmfastError(
                f"the trace has no picture of item {item}; items: {known} (it needs a call with "
                "media and a stage of site pixel, vit, pre or llm<K>, or a pipeline)"
            )
        return self.views[item]

    def to_dict(self) -> dict[str, Any]:
        """Return rows and reductions as plain lists and numbers, ready for JSON."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "reductions": [
                {
                    "site": site,
                    "item": item,
                    "n": reduction.n,
                    "m": reduction.m,
                    "keep": reduction.keep.tolist(),
                    "owner": reduction.owner.tolist(),
                }
                for site, item, reduction in self.reductions
            ],
            **self.noted,
        }

    @property
    def noted(self) -> dict[str, list[str]]:
        """The notes as a field `notes` of a JSON document; empty without any."""
        return {"notes": list(self.notes)} if self.notes else {}

    def __str__(self) -> str:
        lines = [f"{'stage':<16}{'tokens in':>10}{'out':>8}{'ms':>10}{'peak MB':>10}"]
        for r in self.rows:
            counts = f"{r.label:<16}{r.tokens_in:>10}{r.tokens_out:>8}"
            lines.append(f"{counts}{r.ms:>10.1f}{r.peak_bytes / 1e6:>10.0f}")
        return "\n".join([*lines, *self.notes])


def peak_bytes() -> int:
    """Peak bytes so far: of the CUDA allocator where it is in use, else of this process."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but macOS


def free_bytes(device: torch.device, group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Free bytes of a device, on the host within the limit of a container; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        free = int(text.partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return None
    with suppress(OSError, ValueError):  # no control group of version 2, or one of "max" bytes
        most, used = (int((group / f"memory.{n}").read_text("ascii")) for n in ("max", "current"))
        free = min(free, max(most - used, 0))
    return free


def synchronize() -> None:
    """Wait for the device, where one is in use, so that a clock counts its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def settled() -> float:
    """The time on the wall in seconds, once the device has done its work."""
    synchronize()
    return time.perf_counter()
