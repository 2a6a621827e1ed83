"""The bank of rendered clips that the recipe trains on, made once and kept as a file.

Clips outside the world follow those of the world; pictures are single frames of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmfast.tiny.scenes import looks, outside
from mmfast.tiny.video import scene
from mmfast.tiny.video.clips import Bank, ClipRow, decode, encode, shrink

_KNOWN = tuple(kind for kind in outside.PICTURES if kind not in outside.KEPT_PICTURES)
TRAINED = (*_KNOWN, *outside.PRACTICE, "tinted", *["shaped"] * 4)
LONE, SHADED = 4, 3
_TABLE = tuple(field.name for field in fields(scene.Table))


@dataclass(frozen=True)
class SceneBank:
    """A bank and the views of its first clips; clips behind them are outside the world."""

    clips: Bank
    views: list[looks.SceneView]

    def first(self, many: int) -> SceneBank:
        """The first clips of the world, and as large a share of those outside it."""
        if many == len(self.views):
            return self
        inside, total = len(self.views), len(self.clips.tables)
        end = inside + (total - inside) * many // inside
        chosen = [*range(many), *range(inside, end)]
        clips, tables = self.clips, [self.clips.tables[i] for i in chosen]
        part = Bank(clips.frames[chosen], clips.patches[chosen], clips.cells[chosen], tables)
        return SceneBank(part, self.views[:many])


SHOWN = scene.sampled_indices(scene.FRAMES)


def through_codec(frames: scene.Bytes, zoom: float) -> NDArray[np.uint8]:
    """Sampled frames as the tower sees them once they were a file: `[T, 3, S, S]`."""
    return shrink(decode(encode(looks.resize(frames[SHOWN], zoom), 1)))


def view_row(view: looks.SceneView) -> ClipRow:
    """Draw, encode, read back, resize and label one view."""
    drawing = looks.draw(view, SHOWN.tolist())
    frames = through_codec(drawing.frames, view.look.zoom)
    patches = scene.patch_owners(drawing, scene.PATCHES, 0.3)
    cells = scene.patch_owners(drawing, scene.CELLS, 0.15)
    return ClipRow(frames, patches, cells, scene.make_table(view.scene, drawing))


def outside_row(kind: str, rng: np.random.Generator) -> ClipRow:
    """The same of a clip outside the world, whose things have places, but no labels."""
    nothing = scene.Scene((), None, None, np.zeros((scene.FRAMES, 2)), 0)
    none = np.zeros((scene.FRAMES, scene.PIXELS, scene.PIXELS), np.uint8)
    blank = scene.Drawing(none[..., None], none, np.zeros(0, np.int64))
    table = scene.make_table(nothing, blank)
    if kind in outside.THINGS_OF:
        row = view_row(outside.THINGS_OF[kind](rng, int(rng.integers(2**31))))
        return row._replace(table=replace(table, place=row.table.place))
    frames = through_codec(outside.pictures(kind, rng), 1.0)
    patches, cells = (
        np.zeros((scene.SAMPLED, side**2), np.int8) for side in (scene.PATCHES, scene.CELLS)
    )
    return ClipRow(frames, patches, cells, table)


def lesson_view(seed: int, index: int) -> looks.SceneView:
    """View of a bank; every fourth one shows a thing on its own, half have other shades."""
    lone = index % LONE == 0
    return looks.make_view(scene.TRAIN, seed, index, lone, shades=lone or index % SHADED == 0)


def _numbered(seed: int, many: int, index: int) -> tuple[ClipRow, looks.SceneView | None]:
    torch.set_num_threads(1)
    if index < many:
        view = lesson_view(seed, index)
        return view_row(view), view
    rng = np.random.default_rng([scene.TRAIN, seed, index, 23])
    return outside_row(TRAINED[index % len(TRAINED)], rng), None


def make_bank(
    path: Path, many: int, strangers: int, seed: int, workers: int, report: Callable[[int], None]
) -> SceneBank:
    """Read the bank from a file, or make it in parallel and keep it there."""
    if path.exists():
        with np.load(path) as kept:
            columns: dict[str, Any] = {name: kept[name] for name in kept.files}
        many, strangers, seed = columns.pop("settings").tolist()
        views = [lesson_view(seed, index) for index in range(many)]
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        columns, views = _drawn_columns(many, strangers, seed, workers, report)
        part = path.with_suffix(".part.npz")
        np.savez(part, settings=np.array([many, strangers, seed]), **columns)
        part.replace(path)
    frames, patches, cells = (torch.from_numpy(columns[k]) for k in ("frames", "patches", "cells"))
    tables = [_table(columns, i) for i in range(many + strangers)]
    return SceneBank(Bank(frames, patches, cells, tables), views)


def _drawn_columns(
    many: int, strangers: int, seed: int, workers: int, report: Callable[[int], None]
) -> tuple[dict[str, Any], list[looks.SceneView]]:
    """Arrays of all clips, and the views of those of the world."""
    rows: list[ClipRow] = []
    views: list[looks.SceneView] = []
    with get_context("spawn").Pool(workers) as pool:
        task = partial(_numbered, seed, many)
        for row, view in pool.imap(task, range(many + strangers), chunksize=16):
            rows.append(row)
            views += [view] if view is not None else []
            report(len(rows))
    *arrays, made = zip(*rows, strict=True)
    columns: dict[str, Any] = dict(
        zip(("frames", "patches", "cells"), map(np.stack, arrays), strict=True)
    )
    return columns | {f"table_{k}": np.stack([getattr(t, k) for t in made]) for k in _TABLE}, views


def _table(columns: dict[str, Any], index: int) -> scene.Table:
    row: dict[str, Any] = {name: columns[f"table_{name}"][index] for name in _TABLE}
    return scene.Table(**{**row, "number": int(row["number"])})
