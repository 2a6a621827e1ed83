"""Cameras and RTSP: what FFmpeg is told, and what happens when the device misbehaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import pytest
from media_factory import number_of, numbers_of, refused, write_video

from mmfast.frontends.live import inputs
from mmfast.frontends.live.inputs import camera_address, check_address, open_rtsp
from mmfast.frontends.live.source import live_frames
from mmfast.frontends.source import Limits


class Device:
    """A container that opens a file instead of a device, and fails where it is told to."""

    def __init__(self, path: Path) -> None:
        self.path, self.calls, self.closed = path, [], 0
        self.fault: Any = None  # called with the number of each packet
        self.FFmpegError = av.FFmpegError

    def open(self, file: str, **how: Any) -> Any:
        self.calls.append((file, how))
        real = av.open(str(self.path))

        def demux(stream: Any) -> Iterator[Any]:
            for number, packet in enumerate(real.demux(stream)):
                yield packet if self.fault is None else self.fault(number, packet)

        return SimpleNamespaceContainer(self, real, demux)


class SimpleNamespaceContainer(SimpleNamespace):
    def __init__(self, device: Device, real: Any, demux: Any) -> None:
        super().__init__(streams=real.streams, demux=demux)
        self._device, self._real = device, real

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._device.closed += 1
        self._real.close()


@pytest.fixture
def device(clip_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device(clip_path)
    monkeypatch.setattr(inputs, "av", found)
    monkeypatch.setattr("mmfast.frontends.live.inputs.sys.platform", "linux")
    return found


def test_names_of_cameras() -> None:
    assert camera_address(0, "linux") == ("v4l2", "/dev/video0")
    assert camera_address("/dev/v4l/by-id/x", "linux") == ("v4l2", "/dev/v4l/by-id/x")
    assert camera_address(1, "darwin") == ("avfoundation", "1:none")
    assert camera_address("FaceTime", "darwin") == ("avfoundation", "FaceTime:none")
    assert camera_address("Integrated Camera", "win32") == ("dshow", "video=Integrated Camera")
    refused(lambda: camera_address(0, "win32"), "Windows names its cameras", "camera:NAME")
    refused(lambda: camera_address(-1, "linux"), "camera -1 does not exist")
    refused(lambda: camera_address("", "linux"), "does not exist")
    refused(lambda: camera_address("webcam", "linux"), "'webcam'", "/dev/video0")
    refused(lambda: camera_address(0, "emscripten"), "no cameras are known on emscripten")


@pytest.mark.parametrize("source", [2, "camera:2", "camera:/dev/video2"])
def test_a_camera(device: Device, source: object) -> None:
    with live_frames(source, timeout=3) as live:
        pairs = list(live)
    assert numbers_of(frame for frame, _ in pairs) == list(range(48))
    assert [time for _, time in pairs] == pytest.approx([n / 30 for n in range(48)])
    assert device.calls == [("/dev/video2", {"format": "v4l2", "timeout": 3})]
    assert device.closed == 1 and not live.events


def test_a_camera_that_is_not_there() -> None:
    refused(lambda: live_frames(97), "camera 97", "cannot be opened", "plugged in")


def test_times_begin_with_the_first_frame(device: Device, tmp_path: Path) -> None:
    """Drivers count from when the machine was started."""
    device.path = write_video(tmp_path / "a.ts", count=12)  # begins at 1.4 s
    assert [time for _, time in live_frames(0, fps=10)] == pytest.approx([0, 0.1, 0.2, 0.3])


def test_a_camera_that_is_unplugged(device: Device) -> None:
    def fault(number: int, packet: Any) -> Any:
        if number == 20:
            raise av.error.OSError(19, "No such device")
        return packet

    device.fault = fault
    live = live_frames(0)
    got = [number_of(frame) for frame, _ in (next(live) for _ in range(10))]
    assert got == list(range(10))
    refused(lambda: list(live), "camera 0 broke off (No such device)")
    assert device.closed == 1


def test_a_camera_that_hangs(device: Device) -> None:
    release = threading.Event()

    def fault(number: int, packet: Any) -> Any:
        if number == 20:
            release.wait(30)
        return packet

    device.fault = fault
    live = live_frames(0, timeout=0.4)
    refused(lambda: list(live), "camera 0 gave no frame for 0.4 s")
    assert live.frames >= 10
    release.set()


def test_damaged_packets_are_counted(device: Device) -> None:
    def fault(number: int, packet: Any) -> Any:
        if number not in (5, 6, 30):
            return packet

        def decode() -> list[Any]:
            raise av.error.InvalidDataError(1094995529, "Invalid data")

        return SimpleNamespace(decode=decode)

    device.fault = fault
    live = live_frames(0)
    assert 30 <= len(list(live)) < 48 and live.events["broken"] == 3


def test_a_picture_over_the_limit(device: Device) -> None:
    live = live_frames(0, limits=Limits(pixels=1000))
    refused(lambda: list(live), "96x64", "Limits(pixels=...)")


def test_a_source_of_sound_alone(device: Device, tmp_path: Path) -> None:
    from media_factory import write_sound

    device.path = write_sound(tmp_path / "sound.mp4")
    refused(lambda: list(live_frames(0)), "camera 0 has no video")


def test_what_ffmpeg_is_told_about_rtsp(device: Device) -> None:
    address = check_address("rtsp://me:s3cret@127.0.0.1:8554/a?b=c", {"127.0.0.1"})
    open_rtsp(address, 2.5)
    url, how = device.calls[0]
    assert url == "rtsp://me:s3cret@127.0.0.1:8554/a?b=c" and how["format"] == "rtsp"
    assert how["options"]["protocol_whitelist"] == "rtsp,rtp,tcp"
    assert how["options"]["rtsp_transport"] == "tcp" and how["options"]["timeout"] == "2500000"
    assert how["timeout"] == (2.5, 2.5)
    pinned = check_address("rtsp://localhost/a", {"localhost"})
    open_rtsp(pinned, 1)
    assert device.calls[1][0] in ("rtsp://127.0.0.1:554/a", "rtsp://[::1]:554/a")
    frames = live_frames("rtsp://127.0.0.1/a", allow_network=["127.0.0.1"])
    assert numbers_of(frame for frame, _ in frames) == list(range(48))


def test_an_rtsp_source_that_is_not_there() -> None:
    url = "rtsp://me:s3cret@127.0.0.1:9/a"
    call = lambda: live_frames(url, allow_network=["127.0.0.1"], timeout=2)
    refused(call, "'rtsp://127.0.0.1:9/a' cannot be opened")
