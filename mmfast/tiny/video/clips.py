"""Clips as H.264 files, and the bank of clips that the video model is trained on.

`python -m mmfast.tiny.video.clips [FOLDER]` writes the sample clips and their questions.
"""

from __future__ import annotations

import io
import json
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, count
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as vision

from mmfast.tiny.video import scene
from mmfast.tiny.video.questions import Fact, facts


def encode(frames: Iterable[NDArray[np.uint8]], fps: int = scene.FPS) -> bytes:
    """Encode RGB frames as the bytes of the file that `write` makes."""
    buffer = io.BytesIO()
    write(buffer, frames, fps)
    return buffer.getvalue()


def write(file: Path | io.BytesIO, frames: Iterable[scene.Bytes], fps: int = scene.FPS) -> None:
    """Encode RGB frames `[H, W, 3]`, at least one, of even sides, as an H.264 mp4."""
    pictures = iter(frames)
    first = next(pictures)
    target = file if isinstance(file, io.BytesIO) else str(file)
    with av.open(target, "w", format="mp4") as box:
        stream = box.add_stream("libx264", rate=fps)
        stream.height, stream.width = first.shape[:2]
        stream.pix_fmt = "yuv420p"
        # One thread: the same bytes on any machine, and no start-up cost per clip.
        stream.options = {"preset": "veryfast", "crf": "20", "threads": "1"}
        if platform.machine() in ("x86_64", "AMD64"):
            # With newer instruction sets libx264 chooses differently from run to run: on an AMD
            # EPYC equal frames gave four different files in thirty. SSE2 gives those of plain C.
            stream.options["x264-params"] = "asm=sse2"
        for picture in chain([first], pictures):
            box.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        box.mux(stream.encode())


def decode(clip: bytes, frames: int = scene.SAMPLED) -> NDArray[np.uint8]:
    """Decode uniformly sampled frames of a small clip: uint8 `[frames, H, W, 3]`."""
    with av.open(io.BytesIO(clip), "r") as box:
        box.streams.video[0].codec_context.thread_count = 1  # threads start as slowly as they read
        pictures = [frame.to_ndarray(format="rgb24") for frame in box.decode(video=0)]
    return np.stack([pictures[i] for i in scene.sampled_indices(len(pictures), frames)])


Wish = Callable[[scene.Scene, list[Fact]], bool]


def _asks(known: list[Fact], kind: str, *slots: str) -> bool:
    return any(f.kind == kind and f.slots[: len(slots)] == slots for f in known)


WISHES: dict[str, Wish] = {
    "red-circle": lambda s, k: len(s.things) == 2 and _asks(k, "direction", "red circle"),
    "four-shapes": lambda s, k: len(s.things) == 4 and _asks(k, "count"),
    "number": lambda s, k: len(s.things) == 2 and _asks(k, "number"),
    "fast-and-slow": lambda s, k: len(s.things) == 2 and _asks(k, "speed") and not s.panel,
    "latecomer": lambda s, k: len(s.things) == 3 and _asks(k, "first"),
    "behind-a-bar": lambda s, k: s.bar is not None and len(s.things) == 3,
}


def write_clips(folder: Path) -> None:
    """Write one clip per wish, the first that fits, and clips.json with questions and answers."""
    folder.mkdir(parents=True, exist_ok=True)
    listing = {}
    for number, (name, wish) in enumerate(WISHES.items()):
        draft, known = _find(wish, number)
        (folder / f"{name}.mp4").write_bytes(encode(scene.draw(draft).frames))
        listing[f"{name}.mp4"] = [
            {"question": fact.ask(0), "answer": fact.answer, "kind": fact.kind} for fact in known
        ]
    (folder / "clips.json").write_text(json.dumps(listing, indent=1) + "\n")


def _find(wish: Wish, seed: int) -> tuple[scene.Scene, list[Fact]]:
    scenes = (scene.make_scene(scene.CLIPS, seed, index) for index in count())
    tables = ((draft, scene.make_table(draft, scene.draw(draft))) for draft in scenes)
    found = ((draft, facts(table, margin=True)) for draft, table in tables)
    return next((draft, known) for draft, known in found if wish(draft, known))


INPUT = 96  # side of the pictures that the tower sees


class ClipRow(NamedTuple):
    """One clip of the bank."""

    frames: NDArray[np.uint8]  # [T, 3, INPUT, INPUT]
    patches: NDArray[np.int8]  # [T, PATCHES ** 2]
    cells: NDArray[np.int8]  # [T, CELLS ** 2]
    table: scene.Table


@dataclass(frozen=True)
class Bank:
    """All clips; index i is scene i of the seed."""

    frames: torch.Tensor  # uint8 [n, T, 3, INPUT, INPUT]
    patches: torch.Tensor  # int8 [n, T, PATCHES ** 2]
    cells: torch.Tensor  # int8 [n, T, CELLS ** 2]
    tables: list[scene.Table]

    def first(self, count: int) -> Bank:
        """The first clips alone."""
        part = slice(count)
        return Bank(self.frames[part], self.patches[part], self.cells[part], self.tables[part])


def shrink(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Resize as the model's processor does: [T, H, W, 3] -> [T, 3, INPUT, INPUT]."""
    pictures = torch.from_numpy(rearrange(frames, "t h w c -> t c h w"))
    small = vision.resize(pictures, [INPUT, INPUT], InterpolationMode.BICUBIC, antialias=True)
    resized: NDArray[np.uint8] = small.numpy()
    return resized


def make_row(draft: scene.Scene) -> ClipRow:
    """Draw, encode, read back, resize and label one scene."""
    drawing = scene.draw(draft)
    frames = shrink(decode(encode(drawing.frames)))
    patches = scene.patch_owners(drawing, scene.PATCHES, 0.3)
    cells = scene.patch_owners(drawing, scene.CELLS, 0.15)
    return ClipRow(frames, patches, cells, scene.make_table(draft, drawing))


def _numbered(task: tuple[int, int]) -> ClipRow:
    torch.set_num_threads(1)
    return make_row(scene.make_scene(scene.TRAIN, *task))


def make_bank(many: int, seed: int, workers: int, report: Callable[[int], None]) -> Bank:
    """Make clips 0 to many - 1 of a seed in parallel; the result does not depend on workers."""
    rows: list[ClipRow] = []
    with get_context("spawn").Pool(workers) as pool:
        for row in pool.imap(_numbered, ((seed, i) for i in range(many)), chunksize=16):
            rows.append(row)
            report(len(rows))
    *arrays, tables = zip(*rows, strict=True)
    frames, patches, cells = (torch.from_numpy(np.stack(each)) for each in arrays)
    return Bank(frames, patches, cells, list(tables))


if __name__ == "__main__":
    write_clips(Path(sys.argv[1] if len(sys.argv) > 1 else "assets/clips"))
