"""A bank of training clips: drawn, encoded to H.264, read back, resized, with their labels."""

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as vision

from mmfast.tiny.render import draw
from mmfast.tiny.scene import TRAIN, Scene, make_scene
from mmfast.tiny.table import CELLS, PATCHES, Table, make_table, patch_owners
from mmfast.tiny.video_io import decode, encode

INPUT = 96  # side of the pictures that the tower sees


@dataclass(frozen=True)
class Row:
    """One clip of the bank."""

    frames: NDArray[np.uint8]  # [T, 3, INPUT, INPUT]
    patches: NDArray[np.int8]  # [T, PATCHES ** 2]
    cells: NDArray[np.int8]  # [T, CELLS ** 2]
    table: Table


@dataclass(frozen=True)
class Bank:
    """All clips; index i is scene i of the seed."""

    frames: torch.Tensor  # uint8 [n, T, 3, INPUT, INPUT]
    patches: torch.Tensor  # int8 [n, T, PATCHES ** 2]
    cells: torch.Tensor  # int8 [n, T, CELLS ** 2]
    tables: list[Table]

    def first(self, count: int) -> "Bank":
        """The first clips alone."""
        part = slice(count)
        return Bank(self.frames[part], self.patches[part], self.cells[part], self.tables[part])


def shrink(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Resize as the model's processor does: [T, H, W, 3] -> [T, 3, INPUT, INPUT]."""
    pictures = torch.from_numpy(frames).permute(0, 3, 1, 2)
    small = vision.resize(pictures, [INPUT, INPUT], InterpolationMode.BICUBIC, antialias=True)
    resized: NDArray[np.uint8] = small.numpy()
    return resized


def make_row(scene: Scene) -> Row:
    """Draw, encode, read back, resize and label one scene."""
    drawing = draw(scene)
    frames = shrink(decode(encode(drawing.frames)))
    patches = patch_owners(drawing, PATCHES, 0.3)
    return Row(frames, patches, patch_owners(drawing, CELLS, 0.15), make_table(scene, drawing))


def _numbered(task: tuple[int, int]) -> Row:
    torch.set_num_threads(1)
    return make_row(make_scene(TRAIN, *task))


def make_bank(count: int, seed: int, workers: int, report: Callable[[int], None]) -> Bank:
    """Make clips 0 to count - 1 of a seed in parallel; the result does not depend on workers."""
    rows: list[Row] = []
    with get_context("spawn").Pool(workers) as pool:
        for row in pool.imap(_numbered, ((seed, i) for i in range(count)), chunksize=16):
            rows.append(row)
            report(len(rows))
    return Bank(
        torch.from_numpy(np.stack([r.frames for r in rows])),
        torch.from_numpy(np.stack([r.patches for r in rows])),
        torch.from_numpy(np.stack([r.cells for r in rows])),
        [r.table for r in rows],
    )
