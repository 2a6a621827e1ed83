"""Benchmark of reading a long file at one frame per second: parallel slices against PyAV."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np

from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.timing import AGAIN, PairedTimes, Sample, frozen, interleave, timed
from mmfast.core.errors import MmfastError
from mmfast.frontends.clip import Frame
from mmfast.frontends.video.reader import iter_video
from mmfast.frontends.video.threads import cores

FPS = 1.0


class ClipShape(NamedTuple):
    """Size, length and encoding of the generated clip."""

    width: int = 1280
    height: int = 720
    seconds: int = 60
    rate: int = 30
    gop: int = 250

    def __str__(self) -> str:
        size = f"{self.width}x{self.height}"
        return f"{size}, {self.seconds} s, {self.rate}/s, H.264, GOP {self.gop}"


@benchmark("stream", "reader")
def reader(tick: Tick, shape: ClipShape | None = None, rounds: int = 5) -> list[Row]:
    """Compare PyAV on one thread, PyAV with frame threads, and slices in parallel."""
    shape = shape or ClipShape()
    with tempfile.TemporaryDirectory() as folder:
        path = write_clip(Path(folder) / "clip.mp4", shape)
        jobs: dict[str, Callable[[], list[Frame]]] = {
            "PyAV, one thread": lambda: list(_one_decoder(path, "NONE")),
            "PyAV, frame threads": lambda: list(_one_decoder(path, "FRAME")),
            "slices": lambda: [frame for frame, _ in iter_video(path, fps=FPS)],
        }
        expected = jobs["PyAV, one thread"]()
        for name, job in jobs.items():
            frames = job()
            same = len(frames) == len(expected) and all(map(np.array_equal, frames, expected))
            if not same:
                raise MmfastError(f"{name!r} reads other frames: run pytest tests/frontends/video")
        ways = {name: partial(_timed, job) for name, job in jobs.items()}
        ways[AGAIN] = ways["PyAV, one thread"]
        steps, total = itertools.count(1), rounds * len(ways)
        with frozen():
            found = interleave(ways, rounds, lambda: tick("read", next(steps), total))
    return _rows(found, shape, len(expected))


def _timed(job: Callable[[], object]) -> Sample:
    used, ms = time.process_time(), timed(job)[1]
    return {"ms": ms, "cpu_ms": (time.process_time() - used) * 1e3}


def _rows(found: Mapping[str, list[Sample]], shape: ClipShape, frames: int) -> list[Row]:
    wall, cpu = PairedTimes.of(found), PairedTimes.of(found, "cpu_ms")
    shared = {"clock": "wall", "device": "cpu", "clip": str(shape), "fps": FPS, "frames": frames}
    return [
        {**wall.row(name), "cpu_median_ms": statistics.median(cpu.times[name])}
        | {"cpu_speedup": cpu.speedup(name), "threads": 1 if name == wall.first else cores()}
        | {**shared, "identical": True}
        for name in wall.times
    ]


def _one_decoder(path: Path, threads: str) -> Iterator[Frame]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = threads
        if threads == "NONE":
            stream.codec_context.thread_count = 1
        due, seconds = 0, float(stream.time_base or 0)
        for frame in container.decode(stream):
            # A constant rate that divides by the second: a frame lies at every instant.
            if frame.pts is not None and frame.pts * seconds * FPS > due - 1e-6:
                due += 1
                yield np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)


def write_clip(path: Path, shape: ClipShape) -> Path:
    """Encode a camera that pans over a textured scene with moving patches and sensor noise."""
    with av.open(str(path), "w") as file:
        stream: Any = file.add_stream("libx264", rate=shape.rate, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = shape.width, shape.height, "yuv420p"
        stream.codec_context.gop_size = shape.gop
        for number, planes in enumerate(_scene(shape)):
            frame = av.VideoFrame.from_ndarray(planes, format="yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, shape.rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def _scene(shape: ClipShape) -> Iterator[Frame]:
    """Yield YUV 4:2:0 pictures, planes below each other [H * 3 / 2, W]."""
    rng = np.random.default_rng(0)
    width, height = shape.width, shape.height
    wall = _texture(rng, height * 3 // 2, width * 3 // 2)
    colour = _texture(rng, height // 2, width // 2)
    patch = _texture(rng, height // 4, width // 8)
    grain = rng.integers(-3, 4, (height + 64, width + 64), dtype=np.int8)
    for number in range(shape.seconds * shape.rate):
        top = round((np.sin(number / 70) + 1) / 2 * (len(wall) - height))
        left = round((np.cos(number / 110) + 1) / 2 * (wall.shape[1] - width))
        luma = wall[top : top + height, left : left + width].astype(np.int16)
        for each in range(4):
            y = (number * (each + 1) + each * 97) % (height - len(patch))
            x = (number * (5 - each) + each * 211) % (width - patch.shape[1])
            luma[y : y + len(patch), x : x + patch.shape[1]] = patch
        dy, dx = rng.integers(0, 64, 2)
        luma += grain[dy : dy + height, dx : dx + width]
        chroma = np.roll(colour, (number // 2, number), axis=(0, 1)).reshape(-1, width)
        yield np.concatenate([luma.clip(16, 235).astype(np.uint8), chroma, chroma[::-1]])


def _texture(rng: np.random.Generator, height: int, width: int) -> Frame:
    total = np.zeros((height, width))
    for scale in (4, 12, 36, 108):
        coarse = rng.standard_normal((height // scale + 2, width // scale + 2))
        y = np.linspace(0, len(coarse) - 1.01, height)
        x = np.linspace(0, coarse.shape[1] - 1.01, width)
        rows, columns = y.astype(int)[:, None], x.astype(int)
        dy, dx = (y - y.astype(int))[:, None], x - columns
        upper = coarse[rows, columns] * (1 - dx) + coarse[rows, columns + 1] * dx
        lower = coarse[rows + 1, columns] * (1 - dx) + coarse[rows + 1, columns + 1] * dx
        total += scale**0.5 * (upper * (1 - dy) + lower * dy)
    total = (total - total.min()) / (total.max() - total.min())
    return np.asarray(16 + 219 * total, dtype=np.uint8)
