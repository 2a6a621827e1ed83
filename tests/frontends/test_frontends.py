"""Every format gives the frames it says, at the times it says, with either decoder."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from media_factory import (
    numbers_of,
    patched,
    write_video,
)

from mmfast.frontends.image import kind_of
from mmfast.frontends.video.reader import iter_video, read_video

QUIET_265 = "log-level=none"
UNEVEN = [Fraction(n * n, 500) for n in range(48)]  # 0, 2, 8, 18, ... ms
FORMATS = {
    # name: (suffix, how to write, backend that `auto` must choose)
    "h264": ("mp4", {}, "decord"),
    "no B-frames": ("mp4", {"bframes": 0}, "decord"),
    "one long GOP": ("mp4", {"gop": 250, "count": 120}, "decord"),
    "audio track": ("mp4", {"audio": True}, "decord"),
    "index in front": ("mp4", {"container": {"movflags": "faststart"}}, "decord"),
    "matroska": ("mkv", {}, "decord"),
    "open GOP": ("mp4", {"options": {"x264-params": "open-gop=1:keyint=12"}}, "pyav"),
    "gradual refresh": (
        "mp4",
        {"bframes": 0, "options": {"x264-params": "intra-refresh=1:keyint=12"}},
        "pyav",
    ),
    "10-bit h264": ("mp4", {"pix_fmt": "yuv420p10le"}, "pyav"),
    "10-bit hevc": (
        "mp4",
        {"codec": "libx265", "pix_fmt": "yuv420p10le", "options": {"x265-params": QUIET_265}},
        "pyav",
    ),
    "odd size": ("mp4", {"size": (97, 65), "pix_fmt": "yuv444p"}, "pyav"),
    "odd size, halved colour": (
        "mkv",
        {"size": (97, 65), "codec": "ffv1", "bframes": None},
        "pyav",
    ),
    "interlaced": ("mp4", {"options": {"flags": "+ildct+ilme"}}, "pyav"),
    "vp9": ("webm", {"codec": "libvpx-vp9", "bframes": None}, "pyav"),
    "vp8 with hidden frames": (
        "webm",
        {"codec": "libvpx", "bframes": None, "options": {"auto-alt-ref": "1"}},
        "pyav",
    ),
    "mpeg4 avi": ("avi", {"codec": "mpeg4", "bframes": 0}, "pyav"),
    "h264 avi with B-frames": ("avi", {}, "pyav"),
    "transport stream": ("ts", {}, "pyav"),
    "prores": ("mov", {"codec": "prores_ks", "pix_fmt": "yuv422p10le", "bframes": None}, "pyav"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory):
    folder, made = tmp_path_factory.mktemp("formats"), {}

    def write(name: str) -> Path:
        if name not in made:
            suffix, how, _ = FORMATS[name]
            made[name] = write_video(folder / f"{len(made)}.{suffix}", **how)
        return made[name]

    return write


@pytest.mark.parametrize("name", FORMATS)
def test_every_frame_is_the_one_it_says(written, name: str) -> None:
    how, backend = FORMATS[name][1:]
    count = how.get("count", 48)
    clip = read_video(written(name), frames=10_000)
    assert clip.backend == backend
    assert clip.indices == tuple(range(count)) and clip.total_frames == count
    assert numbers_of(clip.frames) == list(range(count))
    assert np.allclose(clip.times, np.arange(count) / 30, atol=6e-4)  # Matroska rounds to ms
    assert (clip.width, clip.height) == how.get("size", (96, 64))
    assert clip.fps == pytest.approx(30, abs=1e-6)
    assert clip.duration == pytest.approx(count / 30, abs=2e-3)
    assert kind_of(written(name)) == "video"


@pytest.mark.parametrize("name", FORMATS)
def test_a_sparse_read_gives_the_same_frames(written, name: str) -> None:
    """Seeking must not change a frame; open GOPs are where decoders get it wrong."""
    path = written(name)
    whole = read_video(path, frames=10_000, backend="pyav")
    for frames in (1, 7, 16):
        for backend in ("auto", "pyav"):
            clip = read_video(path, frames=frames, backend=backend)
            assert numbers_of(clip.frames) == list(clip.indices)
            assert np.array_equal(clip.frames, whole.frames[list(clip.indices)])
            assert clip.times == tuple(whole.times[i] for i in clip.indices)
    late = [whole.times[i] + 0.001 for i in (13, 25, 37)]
    assert read_video(path, times=late).indices == (13, 25, 37)


@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_gives_the_same_frames(written, name: str) -> None:
    path = written(name)
    for fps in (None, 7.0):
        sampling = {"frames": 10_000} if fps is None else {"fps": fps}
        clip = read_video(path, backend="pyav", **sampling)
        pairs = list(iter_video(path, fps=fps))
        assert np.array_equal(np.stack([frame for frame, _ in pairs]), clip.frames)
        assert np.allclose([time for _, time in pairs], clip.times, atol=1e-9)


@pytest.mark.parametrize("name", [n for n, row in FORMATS.items() if row[2] == "decord"])
def test_both_decoders_give_identical_frames(written, name: str) -> None:
    by_decord = read_video(written(name), fps=10, backend="decord")
    by_pyav = read_video(written(name), fps=10, backend="pyav")
    assert by_decord.backend == "decord" and by_pyav.backend == "pyav"
    assert np.array_equal(by_decord.frames, by_pyav.frames)
    assert (by_decord.times, by_decord.indices) == (by_pyav.times, by_pyav.indices)
    assert (by_decord.fps, by_decord.duration) == (by_pyav.fps, by_pyav.duration)


@pytest.mark.parametrize("backend", ["decord", "pyav"])
@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_uneven_times_are_the_true_ones(tmp_path: Path, suffix: str, backend: str) -> None:
    path = write_video(tmp_path / f"uneven.{suffix}", times=UNEVEN)
    clip = read_video(path, frames=48, backend=backend)
    assert numbers_of(clip.frames) == list(range(48))
    assert np.allclose(clip.times, [float(t) for t in UNEVEN], atol=1e-9)
    assert clip.fps == pytest.approx(47 / float(UNEVEN[-1]))
    asked = [float(UNEVEN[20]), float(UNEVEN[20]) - 0.001, float(UNEVEN[21]) - 0.001]
    assert read_video(path, times=asked, backend=backend).indices == (20, 19, 20)
    assert numbers_of(read_video(path, times=asked, backend=backend).frames) == [20, 19, 20]
    backward = read_video(path, times=[float(UNEVEN[i]) for i in (30, 9, 21)], backend=backend)
    assert numbers_of(backward.frames) == list(backward.indices) == [30, 9, 21]


@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_a_late_start_is_kept(tmp_path: Path, backend: str) -> None:
    path = write_video(tmp_path / "late.mp4", times=[Fraction(n, 10) + 2 for n in range(48)])
    clip = read_video(path, frames=5, backend=backend)
    assert clip.times[0] == pytest.approx(2.0) and clip.times[-1] == pytest.approx(6.7)
    assert numbers_of(clip.frames) == list(clip.indices)
    assert read_video(path, times=[0.0, 2.15], backend=backend).indices == (0, 1)


def test_a_transport_stream_starts_at_zero(tmp_path: Path) -> None:
    path = write_video(tmp_path / "late.ts", times=[Fraction(n, 10) + 500 for n in range(48)])
    assert read_video(path, frames=2).times == pytest.approx((0.0, 4.7))


@pytest.mark.parametrize("backend", ["auto", "pyav"])
def test_an_edit_list_cuts_the_start(tmp_path: Path, backend: str) -> None:
    """Frames before the edit are needed to decode, but are not shown and not counted."""
    data = write_video(tmp_path / "whole.mp4").read_bytes()
    at = data.index(b"elst") + 12  # version 0: flags, count, then duration, media time
    start = int.from_bytes(data[at + 4 : at + 8], "big")
    step = read_ticks_per_frame(data)
    path = tmp_path / "cut.mp4"
    path.write_bytes(patched(data, b"elst", 16, (start + 10 * step).to_bytes(4, "big")))
    clip = read_video(path, frames=5, backend=backend)
    assert clip.total_frames == 38
    assert numbers_of(clip.frames) == [i + 10 for i in clip.indices]
    assert clip.times == pytest.approx([i / 30 for i in clip.indices])


def read_ticks_per_frame(data: bytes) -> int:
    at = data.index(b"stts") + 16
    return int.from_bytes(data[at : at + 4], "big")


def test_a_clip_of_one_frame(tmp_path: Path) -> None:
    path = write_video(tmp_path / "one.mp4", count=1)
    for sampling in ({"frames": 8}, {"fps": 2.0}, {"times": [0.0]}):
        clip = read_video(path, **sampling)
        assert numbers_of(clip.frames) == [0] and clip.times == (0.0,)
        assert clip.fps == 30 and clip.duration == pytest.approx(1 / 30)
    assert read_video(path, times=[0.0, 0.03]).indices == (0, 0)


def test_reads_in_threads_agree(clip_path: Path) -> None:
    want = read_video(clip_path, frames=9).frames
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: read_video(clip_path, frames=9).frames, range(8)):
            assert np.array_equal(got, want)


def test_a_sparse_read_does_not_hold_the_video(tmp_path: Path) -> None:
    """200 frames of 640x480 are 184 MB of RGB; reading four must not cost a fraction of that."""
    fast = {"preset": "ultrafast"}
    path = write_video(tmp_path / "l.mp4", count=200, size=(640, 480), gop=100, options=fast)
    code = (
        "import resource, sys\n"
        "from mmfast.frontends.video.reader import read_video\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "read_video(sys.argv[1], frames=1, backend=sys.argv[2]); before = peak()\n"
        "assert len(read_video(sys.argv[1], frames=4, backend=sys.argv[2])) == 4\n"
        "print(peak() - before)\n"
    )
    for backend in ("decord", "pyav"):
        run = [sys.executable, "-c", code, str(path), backend]
        kib = int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
        assert kib < 60_000, f"{backend} grew by {kib} KiB"


def test_the_front_end_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, mmfast.frontends.live.source, mmfast.frontends.video.reader\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
