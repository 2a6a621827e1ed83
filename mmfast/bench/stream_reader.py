"""Reading a long file at one frame per second: slices in parallel against PyAV on one thread."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.timing import Sample, frozen, interleave, noise, paired, quantile
from mmfast.core.errors import MmfastError
from mmfast.frontends.clip import Frame
from mmfast.frontends.video.reader import iter_video
from mmfast.frontends.video.threads import cores

ROUNDS = 5
FPS = 1.0


@dataclass(frozen=True)
class ClipShape:
    """The clip that is generated and read."""

    width: int = 1280
    height: int = 720
    seconds: int = 60
    rate: int = 30
    gop: int = 250

    def __str__(self) -> str:
        size = f"{self.width}x{self.height}"
        return f"{size}, {self.seconds} s, {self.rate}/s, H.264, GOP {self.gop}"


def rows(progress: Tick, shape: ClipShape | None = None, rounds: int = ROUNDS) -> list[Row]:
    """A row per way of reading the clip: times, ratio to the baseline, whether frames are equal.

    Wall clock, which is what threads are for, and beside it the processor time, which the load
    of the machine does not change: `of_cores` is what the wall clock can show at best.

    Raises:
        MmfastError: The frames differ, and no time is worth telling.
    """
    shape = shape or ClipShape()
    with tempfile.TemporaryDirectory() as folder:
        path = write_clip(Path(folder) / "clip.mp4", shape)
        jobs: dict[str, Callable[[], list[Frame]]] = {
            "PyAV, one thread": lambda: list(_one_decoder(path, "NONE")),
            "PyAV, frame threads": lambda: list(_one_decoder(path, "FRAME")),
            "slices": lambda: [frame for frame, _ in iter_video(path, fps=FPS)],
        }
        want = jobs["PyAV, one thread"]()
        for name, job in jobs.items():
            _check(name, job(), want)
        timed = {name: _timed(job) for name, job in _with_again(jobs).items()}
        steps = itertools.count(1)
        with frozen():
            found = interleave(
                timed, rounds, lambda: progress("read", next(steps), rounds * len(timed))
            )
    return _table(found, shape, len(want))


def _with_again(jobs: Mapping[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """The jobs, and the baseline once more: how far two runs of the same thing lie apart."""
    return {**jobs, "again": next(iter(jobs.values()))}


def _timed(job: Callable[[], object]) -> Callable[[], Sample]:
    def run() -> Sample:
        wall, used = time.perf_counter(), time.process_time()
        job()
        return {
            "ms": (time.perf_counter() - wall) * 1e3,
            "cpu_ms": (time.process_time() - used) * 1e3,
        }

    return run


def _check(name: str, got: list[Frame], want: list[Frame]) -> None:
    same = len(got) == len(want) and all(map(np.array_equal, got, want))
    if not same:
        raise MmfastError(f"{name!r} reads other frames: run pytest tests/test_long_file*.py")


def _table(found: Mapping[str, list[Sample]], shape: ClipShape, frames: int) -> list[Row]:
    ms = {name: [s["ms"] for s in samples] for name, samples in found.items()}
    cpu = {name: [s["cpu_ms"] for s in samples] for name, samples in found.items()}
    base = next(iter(found))
    floor = noise(ms[base], ms["again"])
    return [
        {
            "job": name,
            "median_ms": statistics.median(ms[name]),
            "p20_ms": quantile(ms[name], 0.2),
            "p80_ms": quantile(ms[name], 0.8),
            "speedup": 1.0 if name == base else paired(ms[base], ms[name]),
            "cpu_median_ms": statistics.median(cpu[name]),
            "cpu_speedup": 1.0 if name == base else paired(cpu[base], cpu[name]),
            "noise": floor,
            "n": len(ms[name]),
            "clock": "wall",
            "threads": 1 if name == base else cores(),
            "device": "cpu",
            "clip": str(shape),
            "fps": FPS,
            "frames": frames,
            "identical": True,
        }
        for name in found
        if name != "again"
    ]


def _one_decoder(path: Path, threads: str) -> Iterator[Frame]:
    """Decode every frame, convert the one on screen at each second."""
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
    """Encode a camera that pans over a textured scene with things moving in it and sensor noise."""
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
    thing = _texture(rng, height // 4, width // 8)
    grain = rng.integers(-3, 4, (height + 64, width + 64), dtype=np.int8)
    for number in range(shape.seconds * shape.rate):
        top = round((np.sin(number / 70) + 1) / 2 * (len(wall) - height))
        left = round((np.cos(number / 110) + 1) / 2 * (wall.shape[1] - width))
        luma = wall[top : top + height, left : left + width].astype(np.int16)
        for each in range(4):
            y = (number * (each + 1) + each * 97) % (height - len(thing))
            x = (number * (5 - each) + each * 211) % (width - thing.shape[1])
            luma[y : y + len(thing), x : x + thing.shape[1]] = thing
        dy, dx = rng.integers(0, 64, 2)
        luma += grain[dy : dy + height, dx : dx + width]
        chroma = np.roll(colour, (number // 2, number), axis=(0, 1)).reshape(-1, width)
        yield np.concatenate([luma.clip(16, 235).astype(np.uint8), chroma, chroma[::-1]])


def _texture(rng: np.random.Generator, height: int, width: int) -> Frame:
    """Noise at four scales, coarse ones stronger, as in natural pictures."""
    total = np.zeros((height, width))
    for scale in (4, 12, 36, 108):
        coarse = rng.standard_normal((height // scale + 2, width // scale + 2))
        y, x = (
            np.linspace(0, len(coarse) - 1.01, height),
            np.linspace(0, coarse.shape[1] - 1.01, width),
        )
        rows, columns = y.astype(int)[:, None], x.astype(int)
        dy, dx = (y - y.astype(int))[:, None], x - columns
        upper = coarse[rows, columns] * (1 - dx) + coarse[rows, columns + 1] * dx
        lower = coarse[rows + 1, columns] * (1 - dx) + coarse[rows + 1, columns + 1] * dx
        total += scale**0.5 * (upper * (1 - dy) + lower * dy)
    total = (total - total.min()) / (total.max() - total.min())
    return np.asarray(16 + 219 * total, dtype=np.uint8)
