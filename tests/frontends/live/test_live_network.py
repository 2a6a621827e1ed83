"""Addresses: nothing unless allowed, never a private host by accident, no hang, no secret shown."""

from __future__ import annotations

import base64
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from long_file_clips import moving
from media_factory import number_of, numbers_of, picture, refused, write_video
from PIL import Image
from serving import serving

from mmfast.core.errors import MediaError
from mmfast.frontends.live.inputs import check_address, is_public
from mmfast.frontends.live.source import live_frames
from mmfast.frontends.source import Limits

HERE = ("127.0.0.1",)
Page = Callable[[BaseHTTPRequestHandler], None]


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.asked: list[dict[str, str]] = []
        self.release = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)

    def url(self, path: str, user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.server_address[1]}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(dict(self.headers))
        page = self.server.pages.get(self.path.split("?")[0])
        try:
            page(self) if page else self.send_error(404)
        except OSError:  # the client has gone
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as found:
        yield found


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("net")
    how = {"count": 30, "options": {"preset": "ultrafast"}, "bframes": 0}
    made = {
        name: write_video(folder / f"a.{name}", **how).read_bytes() for name in ("mp4", "ts", "mkv")
    }
    how |= {"count": 150, "stored": moving, "gop": 10}
    return {**made, "long": write_video(folder / "long.ts", **how).read_bytes()}


def whole(data: bytes, ranges: bool = False, kind: str = "video/mp4", sized: bool = True) -> Page:
    def page(handler: BaseHTTPRequestHandler) -> None:
        start = 0
        asked = handler.headers.get("Range")
        if ranges and asked:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            handler.send_response(200)
        if ranges:
            handler.send_header("Accept-Ranges", "bytes")
        handler.send_header("Content-Type", kind)
        if sized:
            handler.send_header("Content-Length", str(len(data) - start))
        handler.end_headers()
        handler.wfile.write(data[start:])

    return page


def moved(to: str) -> Page:
    def page(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", to)
        handler.end_headers()

    return page


def broken(data: bytes, server: Server, stall: bool) -> Page:
    """Half of the data, then nothing, or the end of the connection."""

    def page(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: len(data) * 2 // 3])
        handler.wfile.flush()
        if stall:
            server.release.wait(30)
        handler.close_connection = True

    return page


def read(url: str, **how: Any) -> list[int]:
    return numbers_of(frame for frame, _ in live_frames(url, allow_network=HERE, timeout=5, **how))


@pytest.mark.parametrize("name", ["mp4", "ts", "mkv"])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_video_over_http(server: Server, clips, name: str, ranges: bool) -> None:
    server.pages["/a"] = whole(clips[name], ranges)
    if name == "mp4" and not ranges:  # its index comes last, and nothing can be sought
        refused(lambda: read(server.url("/a")), "broke off")
    else:
        assert read(server.url("/a")) == list(range(30))


def test_an_endless_reply_without_a_length(server: Server, clips) -> None:
    server.pages["/live.ts"] = whole(clips["ts"], sized=False)
    frames = live_frames(server.url("/live.ts"), allow_network=HERE, fps=10)
    times = [time for _, time in frames]
    assert times == pytest.approx([n / 10 for n in range(10)])


def test_a_camera_of_single_pictures(server: Server) -> None:
    parts = b""
    for number in range(5):
        file = io.BytesIO()
        Image.fromarray(picture(number)).save(file, "JPEG", quality=95, subsampling=0)
        jpeg = file.getvalue()
        head = f"--cut\r\nContent-Type: image/jpeg\r\nContent-Length: {len(jpeg)}\r\n\r\n"
        parts += head.encode() + jpeg + b"\r\n"
    server.pages["/mjpeg"] = whole(
        parts, kind="multipart/x-mixed-replace; boundary=cut", sized=False
    )
    assert read(server.url("/mjpeg")) == [0, 1, 2, 3, 4]


def test_a_reply_that_stalls_is_an_error_in_time(server: Server, clips) -> None:
    server.pages["/a"] = broken(clips["long"], server, stall=True)
    live = live_frames(server.url("/a"), allow_network=HERE, timeout=0.7)
    start, got = time.monotonic(), 0
    with pytest.raises(MediaError, match=r"gave no frame for|timed out") as caught:
        for _ in live:
            got += 1
    assert got >= 50 and time.monotonic() - start < 20 and "\n" not in str(caught.value)


def test_a_server_that_never_answers(server: Server) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/a"
        refused(
            lambda: live_frames(url, allow_network=HERE, timeout=0.3), "does not answer", "timeout="
        )
    refused(lambda: live_frames(url, allow_network=HERE, timeout=0.3), "does not answer")


def test_a_connection_that_dies(server: Server, clips) -> None:
    server.pages["/a"] = broken(clips["long"], server, stall=False)
    live = live_frames(server.url("/a"), allow_network=HERE)
    with pytest.raises(MediaError, match="died after") as caught:
        list(live)
    assert live.frames >= 50 and f"of {len(clips['long'])} bytes" in str(caught.value)


def test_redirects_are_checked_like_addresses(server: Server, clips) -> None:
    port = server.server_address[1]
    server.pages["/a"] = whole(clips["ts"])
    server.pages["/near"] = moved("/a")
    server.pages["/loop"] = moved("/loop")
    server.pages["/in"] = moved(f"http://localhost:{port}/a")
    server.pages["/meta"] = moved("http://169.254.169.254/latest")
    server.pages["/file"] = moved("file:///etc/passwd")
    server.pages["/rtsp"] = moved("rtsp://127.0.0.1/a")
    assert read(server.url("/near")) == list(range(30))
    refused(lambda: read(server.url("/loop")), "answers 302")
    refused(lambda: read(server.url("/in")), "'localhost' is not among those allowed")
    refused(lambda: read(server.url("/meta")), "'169.254.169.254' is not among")
    refused(lambda: read(server.url("/file")), "'file' is refused")
    refused(lambda: read(server.url("/rtsp")), "moves to")


def test_what_is_behind_an_address_must_be_a_video(server: Server) -> None:
    png = io.BytesIO()
    Image.fromarray(picture(1)).save(png, "PNG")
    for data, part in (
        (b"#EXTM3U\n#EXTINF:9,\nhttp://127.0.0.1:9/x.ts\n", "neither an image nor a video"),
        (b"<html>hello</html>", "neither an image nor a video"),
        (png.getvalue(), "is a picture (png)"),
        (b"\0\0\0\x20ftypisom" + bytes(300), "cannot be opened"),
        (b"", "neither"),
    ):
        server.pages["/a"] = whole(data)
        refused(lambda: read(server.url("/a")), part)
    refused(lambda: read(server.url("/none")), "answers 404 Not Found")
    refused(lambda: read(server.url("/ä")), "does not answer")
    server.pages["/a"] = whole(bytes(5000))
    refused(lambda: read(server.url("/a"), limits=Limits(bytes=999)), "Limits(bytes=...)")


def test_user_and_password_are_sent_and_never_shown(server: Server, clips) -> None:
    server.pages["/a"] = whole(clips["ts"])
    live = live_frames(server.url("/a?token=t0p", "me:s3cret%21@"), allow_network=HERE)
    assert number_of(next(live)[0]) == 0
    live.close()
    sent = server.asked[0]["Authorization"].removeprefix("Basic ")
    assert base64.b64decode(sent) == b"me:s3cret!"
    with pytest.raises(MediaError) as caught:
        live_frames(server.url("/b?token=t0p", "me:s3cret@"), allow_network=HERE)
    for text in (live.name, str(caught.value)):
        assert "s3cret" not in text and "t0p" not in text and "127.0.0.1" in text


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("http://example.com/a.mp4", "network sources are off; allow them with allow_network"),
        ("rtsp://example.com/a", "network sources are off"),
        ("file:///etc/passwd", "'file' is refused"),
        ("concat://a.mp4|b.mp4", "'concat' is refused"),
        ("ftp://example.com/a", "'ftp' is refused"),
        ("tcp://example.com:9/", "'tcp' is refused"),
        ("crypto+http://example.com/a", "is refused"),
    ],
)
def test_off_by_default(address: str, part: str) -> None:
    refused(lambda: live_frames(address), part)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.9",
        "169.254.169.254",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[fe80::1]",
        "0.0.0.0",
        "100.64.0.1",
        "224.0.0.1",
        "2130706433",
        "127.1",
    ],
)
def test_private_hosts_are_refused(host: str) -> None:
    for scheme in ("http", "rtsp"):
        refused(
            lambda s=scheme: live_frames(f"{s}://{host}/a", allow_network=True), "allow_network=["
        )


def test_a_name_is_as_good_as_its_worst_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        ips = {"good.example": ["93.184.216.34"], "two.example": ["93.184.216.34", "10.0.0.1"]}
        if host not in ips:
            raise socket.gaierror(-2, "Name or service not known")
        return [(2, 1, 6, "", (ip, port)) for ip in ips[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    found = check_address("https://good.example/a?b=c", True)
    assert (found.ip, found.port, found.name) == ("93.184.216.34", 443, "'https://good.example/a'")
    assert check_address("rtsp://two.example:8554/a", {"Two.Example"}).port == 8554
    refused(lambda: check_address("http://two.example/", True), "10.0.0.1 is a private address")
    refused(lambda: check_address("http://none.example/", True), "the host is unknown")
    refused(lambda: check_address("http://good.example/", {"other"}), "not among those allowed")
    for wrong in (
        "http:///a",
        "http://",
        "http://good.example:99999/",
        "http://a b/",
        "rtsp://x\n/",
    ):
        refused(lambda wrong=wrong: check_address(wrong, True), "give rtsp://")
    assert is_public("93.184.216.34") and is_public("2606:2800:220:1::1")
    assert is_public("64:ff9b::5db8:d822") and not is_public("64:ff9b::a00:1")
    assert check_address("http://good.example/", "good.example").host == "good.example"


def test_files_named_like_addresses_do_not_reach_the_network(tmp_path: Path) -> None:
    refused(lambda: live_frames("concat:a.mp4|b.mp4"), "does not exist")
    refused(lambda: live_frames("data:video/mp4;base64,AAAA"), "data: addresses are refused")
