"""Frames of the parallel reader are those of one decoder that starts at the beginning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long_file_clips import CLIPS, File, cut_by_edit, rotated, same, write
from media_factory import write_video

from mmfast.frontends.source import Mismatch
from mmfast.frontends.video import threads
from mmfast.frontends.video.reader import iter_video, read_video
from mmfast.frontends.video.threads import Ahead

FALLS_BACK = ("gradual refresh",)  # one entry only: nothing to divide, but nothing wrong either


@pytest.fixture(autouse=True)
def two_cores_and_short_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 2)
    monkeypatch.setattr(threads, "_WORTH", 0)
    monkeypatch.setattr("mmfast.frontends.video.threads.SLICE", 8)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory):
    folder, made = tmp_path_factory.mktemp("long"), {}

    def opened(name: str) -> File:
        if name not in made:
            if name == "rotated":
                media: object = rotated(write(folder, "GOP 12"))
            elif name == "edit list":
                media = cut_by_edit(write(folder, "GOP 12"), 17)
            else:
                media = write(folder, name)
            made[name] = File(media)
        return made[name]

    return opened


NAMES = (*CLIPS, "rotated", "edit list")


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("name", NAMES)
def test_every_sampling_gives_identical_frames(file, name: str) -> None:
    clip = file(name)
    for fps in (0.4, 1.0, 2.0, 7.0, 30.0):
        assert same(clip.sliced(fps), clip.sequential(fps)), fps


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("name", NAMES)
def test_the_front_end_gives_identical_frames(file, name: str) -> None:
    clip = file(name)
    media = clip.source.data
    assert same(iter_video(media, fps=3), clip.sequential(3))
    read = read_video(media, frames=11)
    want = [clip.all[row] for row in read.indices]
    assert same(zip(read.frames, read.times, strict=True), want)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(NAMES),
    fps=st.floats(0.2, 40),
    frames=st.integers(1, 9),
    size=st.integers(1, 60),
    packets=st.integers(1, 60),
)
def test_any_sampling_and_any_bound(file, name, fps, frames, size, packets) -> None:
    clip = file(name)
    slices = pytest.MonkeyPatch()
    with slices.context() as patch:
        patch.setattr("mmfast.frontends.video.threads.SLICE", packets)
        ahead = Ahead(frames=frames, bytes=size * 1000)
        assert same(clip.sliced(fps, ahead), clip.sequential(fps))


@pytest.mark.parametrize("name", ["GOP 12", "open GOP", "hevc, open GOP", "B-pyramid", "GOP 250"])
def test_less_is_decoded(file, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups without a wanted frame, what follows the last one, and spare pictures are left out."""
    sent: list[int] = []  # packets of each job
    whole = threads.SliceThreads._decode

    def count(self, reader, lane, jobs) -> None:
        sent.extend(job.cost for job in jobs)
        whole(self, reader, lane, jobs)

    monkeypatch.setattr(threads.SliceThreads, "_decode", count)
    clip = file(name)
    assert same(clip.sliced(1.0), clip.sequential(1.0))
    share = sum(sent) / len(clip.all)
    assert share < 0.75, share
    assert len(sent) >= 2  # cut at every entry point, also that of an open group


def test_long_groups_share_the_work(file, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slices are decoded at a time, unless what must wait does not fit."""
    crews: list[int] = []
    items = threads.SliceThreads.items

    def noted(self):
        crews.append(self.workers)
        return items(self)

    monkeypatch.setattr(threads.SliceThreads, "items", noted)
    clip = file("GOP 12")
    monkeypatch.setattr("mmfast.frontends.video.threads.SLICE", 1)
    assert same(clip.sliced(7.0, Ahead(frames=64)), clip.sequential(7.0))
    assert same(clip.sliced(7.0, Ahead(frames=1)), clip.sequential(7.0))
    assert crews == [2, 1]


@pytest.mark.parametrize("cut", ["key frame", "tail", "middle", "nothing"])
def test_a_transport_stream_is_read_from_its_start(tmp_path: Path, cut: str) -> None:
    """No slices: broadcast packets say little, and what is missing shows while decoding."""
    data = write_video(tmp_path / "a.ts", options={"preset": "ultrafast"}).read_bytes()
    packets = len(data) // 188
    start, stop = {"key frame": (packets // 6, packets), "tail": (0, packets * 2 // 3)}.get(
        cut, (0, packets)
    )
    data = data[start * 188 : stop * 188]
    if cut == "middle":
        data = data[: packets // 3 * 188] + data[packets // 2 * 188 :]
    clip = File(data)
    assert same(iter_video(data, fps=5), clip.sequential(5))


def test_a_first_packet_that_is_no_entry_is_refused(file, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = file("GOP 12")
    monkeypatch.setattr(
        "mmfast.frontends.video.packets.unit_reader",
        lambda header: lambda packet: long_file_facts(False, False),
    )
    with pytest.raises(Mismatch):
        next(clip.sliced(1.0))
    assert same(iter_video(clip.source.data, fps=5), clip.sequential(5))


def long_file_facts(entry: bool, fresh: bool):
    from mmfast.frontends.video.packets import Facts

    return Facts(entry, fresh)


def test_a_read_in_slices_says_pyav(file) -> None:
    clip = read_video(file("GOP 12").source.data, frames=11)
    assert clip.backend == "pyav"
    assert np.array_equal(
        clip.frames, read_video(file("GOP 12").source.data, frames=11, backend="decord").frames
    )
