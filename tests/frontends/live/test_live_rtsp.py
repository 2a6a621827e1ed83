"""RTSP against a server of a few lines: H.264 over RTP, interleaved in the one TCP connection.

RFC 2326 (RTSP 1.0), RFC 6184 (H.264 over RTP, single NAL unit packets).
"""

from __future__ import annotations

import re
import socketserver
import struct
import threading
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import pytest
from media_factory import numbers_of, picture, refused
from serving import serving

from mmfast.core.errors import MediaError
from mmfast.frontends.live.source import live_frames

RATE, COUNT = 10, 30
HERE = ["127.0.0.1"]


def units() -> list[list[bytes]]:
    """NAL units of each picture of a small stream without B-frames."""
    options = {"preset": "ultrafast", "tune": "zerolatency", "x264-params": "keyint=10"}
    encoder: Any = av.CodecContext.create("libx264", "w")
    encoder.width, encoder.height, encoder.pix_fmt = 96, 64, "yuv420p"
    encoder.time_base, encoder.options = Fraction(1, RATE), options
    found = []
    for number in range(COUNT):
        frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
        frame.pts, frame.time_base = number, Fraction(1, RATE)
        found += encoder.encode(frame)
    found += encoder.encode(None)
    return [[u for u in re.split(rb"\x00\x00\x00?\x01", bytes(packet)) if u] for packet in found]


class Camera(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

    def __init__(self, pictures: list[list[bytes]]) -> None:
        self.pictures, self.password = pictures, False
        self.stop_after, self.release = COUNT, threading.Event()
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Talk)

    def url(self, user: str = "") -> str:
        return f"rtsp://{user}127.0.0.1:{self.server_address[1]}/cam"


class Talk(socketserver.StreamRequestHandler):
    server: Camera

    def handle(self) -> None:
        try:
            while request := self._request():
                method, headers = request
                self.server.asked.append(method)
                if method == "PLAY":
                    self._say(headers, "Session: 1\r\n")
                    return self._play()
                self._answer(method, headers)
        except OSError:
            pass

    def _request(self) -> tuple[str, dict[str, str]] | None:
        lines = []
        while (line := self.rfile.readline().decode().strip()) or not lines:
            if not line:
                return None
            lines.append(line)
        pairs = (line.partition(":") for line in lines[1:])
        return lines[0].split()[0], {key.lower(): value.strip() for key, _, value in pairs}

    def _answer(self, method: str, headers: dict[str, str]) -> None:
        if method == "DESCRIBE":
            sdp = (
                "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nt=0 0\r\n"
                "m=video 0 RTP/AVP 96\r\nc=IN IP4 0.0.0.0\r\na=rtpmap:96 H264/90000\r\n"
                "a=fmtp:96 packetization-mode=1\r\na=control:track0\r\n"
            )
            kind = f"Content-Type: application/sdp\r\nContent-Length: {len(sdp)}\r\n"
            self._say(headers, kind, sdp)
        elif method == "SETUP":
            self._say(headers, "Session: 1\r\nTransport: RTP/AVP/TCP;unicast;interleaved=0-1\r\n")
        else:
            self._say(headers, "Public: OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN\r\n")

    def _say(self, headers: dict[str, str], more: str, body: str = "") -> None:
        head = f"RTSP/1.0 200 OK\r\nCSeq: {headers['cseq']}\r\n{more}\r\n{body}"
        self.wfile.write(head.encode())

    def _play(self) -> None:
        sequence = 0
        for number, parts in enumerate(self.server.pictures[: self.server.stop_after]):
            for place, unit in enumerate(parts):
                last = 0x80 if place == len(parts) - 1 else 0
                head = struct.pack(
                    ">BBHII", 0x80, last | 96, sequence, 7000 + number * 90000 // RATE, 1
                )
                packet = head + unit
                self.wfile.write(b"$\0" + struct.pack(">H", len(packet)) + packet)
                sequence += 1
        if self.server.stop_after < COUNT:
            self.server.release.wait(30)


@pytest.fixture(scope="module")
def pictures() -> list[list[bytes]]:
    return units()


@pytest.fixture
def camera(pictures: list[list[bytes]]) -> Iterator[Camera]:
    with serving(Camera(pictures)) as found:
        yield found


def test_frames_of_an_rtsp_camera(camera: Camera) -> None:
    live = live_frames(camera.url(), allow_network=HERE, timeout=10)
    got: list[Any] = []
    try:
        got.extend(live)
    except MediaError as error:  # how a server that hangs up shows depends on FFmpeg
        assert "broke off" in str(error)
    numbers = numbers_of(frame for frame, _ in got)
    assert len(numbers) >= COUNT - 2 and numbers == list(
        range(numbers[0], numbers[0] + len(numbers))
    )
    times = [time for _, time in got]
    assert times == pytest.approx([n / RATE for n in range(len(times))], abs=1e-3)
    assert camera.asked[:4] == ["OPTIONS", "DESCRIBE", "SETUP", "PLAY"]


def test_an_rtsp_camera_that_hangs(camera: Camera) -> None:
    camera.stop_after = 20
    live = live_frames(camera.url(), allow_network=HERE, timeout=1.0)
    with pytest.raises(MediaError, match=r"gave no frame for 1 s|broke off") as caught:
        list(live)
    assert live.frames >= 15 and "\n" not in str(caught.value)


def test_rtsp_is_off_and_private_by_default(camera: Camera) -> None:
    refused(lambda: live_frames(camera.url()), "network sources are off")
    refused(lambda: live_frames(camera.url(), allow_network=True), "is a private address")
    assert camera.asked == []
