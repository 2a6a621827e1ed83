"""Benchmark of hostile requests: status, time, and memory of the whole server.

Files are huge once decoded, bodies and addresses malformed or endless; all must be refused.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import math
import os
import socket
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import av
import numpy as np
from PIL import Image

from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.timing import process_seconds
from mmfast.serve.guard.fetch import data_url as encode

# Timeouts of the server; by default 10 and 30 seconds.
TIMEOUTS = {"header_seconds": 1.0, "body_seconds": 3.0}
_ROOT = Path(__file__).resolve().parents[4]


@benchmark("serve", "bombs")
def bombs(tick: Tick) -> list[Row]:
    """Send every hostile request to one server, which must still answer a harmless one."""
    found = hostile_requests()
    out = []
    with simulated_internet() as port, serving(port, **TIMEOUTS) as server:
        for number, request in enumerate(found):
            out.append(hostile_row(server, request))
            tick(request.name, number + 1, len(found))
        if server.alive() != 200:
            raise RuntimeError("the server no longer answers a harmless request")
    return out


def hostile_row(server: ServerUnderTest, request: HostileRequest) -> Row:
    """Send one request; measure its time, without the timeout it exhausts, and memory."""
    with server.watched() as watch:
        start = time.perf_counter()
        status = request.send(server.port)
        ms = (time.perf_counter() - start) * 1e3
    allowed = 1e3 * TIMEOUTS.get(request.timeout, 0.0)
    times = {"ms": round(ms - allowed, 1), "allowed_ms": allowed}
    times["cpu_ms"] = round(1e3 * watch.worked)
    load = round(os.getloadavg()[0] / (os.cpu_count() or 1), 1)  # of all processes
    sent = {"job": request.name, "sent_bytes": request.sent, "status": status}
    return {**sent, **times, "mb": round(watch.grown / 1e6, 1), "load": load, "device": "cpu"}


class ServerUnderTest(NamedTuple):
    """A server in its own process."""

    port: int
    pid: int

    def alive(self) -> int:
        """Return the status of a harmless request about a picture."""
        return chat(self.port, "image", encode(picture(), "image/png"))

    @contextlib.contextmanager
    def watched(self) -> Iterator[MemoryWatch]:
        """Measure the memory of the server and all its child processes."""
        watch = MemoryWatch(self.pid)
        watch.start()
        try:
            yield watch
        finally:
            watch.stop.set()
            watch.join()


class MemoryWatch(Thread):
    """Growth of memory (PSS, sampled, and the own peak) and processor time of a process tree."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid, self.stop = pid, Event()
        with contextlib.suppress(OSError):  # the peak from here on
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
        self._first, self._first_peak = self._tree(), _bytes_in(f"/proc/{pid}/status", "VmHWM:")
        self._most = 0
        self._clocks = {each: _cpu(each) for each in _descendants(pid)}
        self._before = sum(self._clocks.values())

    def run(self) -> None:
        """Sample until stopped."""
        while not self.stop.wait(0.002):
            self._most = max(self._most, self._tree() - self._first)
            self._clocks |= {each: _cpu(each) for each in _descendants(self._pid)}

    @property
    def worked(self) -> float:
        """Seconds of processor time, of children up to their last sample."""
        self._clocks[self._pid] = _cpu(self._pid)
        return sum(self._clocks.values()) - self._before

    @property
    def grown(self) -> int:
        """Bytes above those at the start."""
        peak = _bytes_in(f"/proc/{self._pid}/status", "VmHWM:")
        return max(self._most, peak - self._first_peak, 0)

    def _tree(self) -> int:
        pids = _descendants(self._pid)
        return sum(_bytes_in(f"/proc/{pid}/smaps_rollup", "Pss:") for pid in pids)


def _cpu(pid: int) -> float:
    seconds = process_seconds(pid)
    return 0.0 if math.isnan(seconds) else seconds


def _descendants(pid: int) -> list[int]:
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children = (task / "children").read_text(encoding="ascii").split()
            found += [each for child in children for each in _descendants(int(child))]
    return found


def _bytes_in(path: str, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text(encoding="ascii").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return 0


@contextlib.contextmanager
def serving(internet: int, **options: Any) -> Iterator[ServerUnderTest]:
    """Run the real server with an engine without a model, after its first requests."""
    module = "mmfast.bench.suites.serve.hostile_server"
    hosts = json.dumps({"remote_hosts": ["*"], **options})
    command = [sys.executable, "-m", module, str(internet), hosts]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = ServerUnderTest(int(process.stdout.readline()), process.pid)
            clip = encode(picture("GIF"), "image/gif")
            for kind in ("image", "video"):  # load all modules
                chat(found.port, kind, clip)
            yield found
        finally:
            process.terminate()


_CHAT = "/v1/chat/completions"
_WAIT = 60.0  # seconds until the client gives up


class HostileRequest(NamedTuple):
    """One request."""

    name: str
    sent: int  # bytes to send; 0 for an endless one
    send: Callable[[int], int]  # called with the server's port; returns the status
    timeout: str = ""  # the option of the server that ends this one


def chat(port: int, kind: str, url: str) -> int:
    """Ask about an image or a clip; return the status."""
    return post(port, json.dumps(_question(kind, url)).encode())


def _question(kind: str, url: str) -> dict[str, Any]:
    part = {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
    content = [part, {"type": "text", "text": "What is it?"}]
    return {"model": "echo", "messages": [{"role": "user", "content": content}]}


def post(port: int, body: Any, chunked: bool = False) -> int:
    """Send a request; return the status."""
    sent = {"Content-Type": "application/json"}
    sent |= {"Transfer-Encoding": "chunked"} if chunked else {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_WAIT)
    with contextlib.closing(connection):
        # The server may answer and close before it has read all.
        with contextlib.suppress(ConnectionError):
            connection.request("POST", _CHAT, body, sent, encode_chunked=chunked)
        return connection.getresponse().status


def hostile_requests() -> list[HostileRequest]:
    """Return all hostile requests."""
    bodies = [
        *((name, json.dumps(_question(kind, url)).encode()) for name, kind, url in _files()),
        ("JSON, 100,000 deep", b'{"messages":' + b"[" * 100_000),
        ("JSON of 4 million lists", b'{"messages":[' + b"[]," * 4_000_000 + b"[]]}"),
    ]
    return [
        *(HostileRequest(name, len(body), partial(post, body=body)) for name, body in bodies),
        HostileRequest("endless body", 0, _endless),
        HostileRequest("10,000 headers", 100_000, _headers),
        HostileRequest("slow-loris, headers", 0, partial(_slow, start=_START), "header_seconds"),
        HostileRequest("slow-loris, body", 0, partial(_slow, start=_HALF), "body_seconds"),
        *(
            HostileRequest(name, len(url), partial(chat, kind="image", url=url))
            for name, url in _urls()
        ),
    ]


def _files() -> Iterator[tuple[str, str, str]]:
    clip = mp4()
    torn = picture(width=2000, height=2000)[:3000]
    yield "PNG of 500 MB", "image", encode(png(), "image/png")
    yield "mp4 of 4.4 GB", "video", encode(clip, "video/mp4")
    yield "mp4, cut in half", "video", encode(clip[: len(clip) // 2], "video/mp4")
    yield "PNG, cut in half", "image", encode(torn, "image/png")
    yield "animated GIF of 3.6 GB", "video", encode(gif(), "image/gif")
    yield "animated WebP of 48 GB", "video", encode(webp(), "image/webp")
    yield "WebP of 16,383 squared", "image", encode(webp(16_383, 3), "image/webp")
    yield "zip as a video", "video", encode(archive(), "video/mp4")
    playlist = b"#EXTM3U\nfile:///etc/passwd\n" * 9
    yield "playlist as a video", "video", encode(playlist, "video/mp4")
    yield "base64 that is none", "image", "data:image/png;base64,!!"


def _urls() -> Iterator[tuple[str, str]]:
    good = "http://good.example/to?"
    inside = ("127.0.0.1", "169.254.169.254/latest/meta-data", "[::ffff:127.0.0.1]")
    mapped = ("[2002:7f00:1::]", "[64:ff9b::7f00:1]", "inside.example")
    for where in (*(f"http://{host}/" for host in (*inside, *mapped)), "file:///etc/passwd"):
        yield f"redirect to {where}", good + quote(where)
    yield "redirects without end", good + quote(good)
    yield "name that changes", "http://rebind.example/to?" + quote("http://rebind.example/picture")
    yield "name of two addresses", "http://half.example/picture"
    yield "endless file", "http://good.example/endless"
    numbers = ("127.0.0.1", "2130706433", "0177.0.0.1", "0x7f.1", "[::ffff:7f00:1]")
    disguised = ("good.example@127.0.0.1", "good.example\\@127.0.0.1")
    hosts = (f"http://{host}/" for host in (*numbers, *disguised))
    yield from ((where, where) for where in ("file:///etc/passwd", "/etc/passwd", *hosts))


def _endless(port: int) -> int:
    def pieces() -> Iterator[bytes]:
        end = time.monotonic() + _WAIT
        yield b'{"messages": "'
        while time.monotonic() < end:
            yield b"a" * (1 << 16)

    return post(port, pieces(), chunked=True)


_START = b"GET / HTTP/1.1\r\n"
_HALF = f"POST {_CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
_HALF += b"Content-Length: 1000\r\n\r\n{"


def _headers(port: int) -> int:
    lines = b"".join(b"x-%05d: a\r\n" % i for i in range(10_000))
    with socket.create_connection(("127.0.0.1", port), _WAIT) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(_START + b"Host: x\r\n" + lines + b"\r\n")
        return _status(sock)


def _slow(port: int, start: bytes) -> int:
    end = time.monotonic() + _WAIT
    with socket.create_connection(("127.0.0.1", port), 0.1) as sock:
        sock.sendall(start)
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                return _status(sock)
            sock.sendall(b"x")
    raise TimeoutError("the server does not time out")


def _status(sock: socket.socket) -> int:
    line = sock.recv(4096).split(b"\r\n")[0].split()
    return int(line[1]) if len(line) > 1 else 0


class _InternetHandler(BaseHTTPRequestHandler):
    """`/to?URL` redirects, `/endless` never ends, all other paths are a picture."""

    def do_GET(self) -> None:
        path, _, where = self.path.partition("?")
        if path == "/to":
            self.send_response(302)
            self.send_header("Location", unquote(where))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = picture()
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        if path != "/endless":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        with contextlib.suppress(OSError):
            while path == "/endless":
                self.wfile.write(bytes(1 << 16))

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests."""


@contextlib.contextmanager
def simulated_internet() -> Iterator[int]:
    """Run the server behind all names of the simulated internet; yield its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _InternetHandler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def png(side: int = 13_000) -> bytes:
    """Return a black grey picture: 164 kB that decode to 500 MB of RGB."""
    return _saved(Image.new("L", (side, side)), "PNG", compress_level=9)


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def mp4(side: int = 4096, count: int = 88, group: int = 4) -> bytes:
    """Return H.264 of one colour: 50 kB that decode to gigabytes; one group of pictures repeats."""
    return video(np.full((side, side, 3), 90, np.uint8), count, group)


def video(frame: np.ndarray[Any, Any], count: int, group: int = 8) -> bytes:
    """Return an mp4 that shows one picture [H, W, 3] `count` times, 30 a second."""
    height, width = frame.shape[:2]
    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.gop_size, stream.max_b_frames = group, 0
        stream.options = {"preset": "ultrafast", "x264-params": "scenecut=0:threads=1:cabac=1"}
        picture = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="yuv420p")
        packets = [bytes(p) for _ in range(group) for p in stream.encode(picture)]
        packets += [bytes(p) for p in stream.encode(None)]
        for i in range(count):
            packet = av.Packet(packets[i % len(packets)])
            packet.stream, packet.time_base = stream, stream.codec_context.time_base
            packet.pts = packet.dts = i
            packet.duration, packet.is_keyframe = 1, i % len(packets) == 0
            container.mux(packet)
    return target.getvalue()


def gif(side: int = 2000, count: int = 300) -> bytes:
    """Return an animation that repeats one frame."""
    data = _saved(Image.new("P", (side, side)), "GIF")
    start = 13 + 3 * (2 << (data[10] & 7))  # header and colour table
    frame = data[data.index(b"\x2c", start) : -1]
    control = b"\x21\xf9\x04\0\x01\0\0\0"
    return data[:start] + (control + frame) * count + b"\x3b"


def webp(side: int = 4000, count: int = 1000) -> bytes:
    """Return a large canvas on which a small frame is drawn repeatedly, fifty bytes each."""
    still = _saved(Image.new("RGB", (16, 16)), "WEBP", lossless=True)[12:]  # its VP8L chunk
    size, small = struct.pack("<I", side - 1)[:3], b"\x0f\0\0"
    frame = b"\0" * 6 + small * 2 + b"\x01\0\0" + b"\0" + still
    chunks = _riff(b"VP8X", b"\x02\0\0\0" + size * 2) + _riff(b"ANIM", b"\0" * 6)
    return _riff(b"RIFF", b"WEBP" + chunks + _riff(b"ANMF", frame) * count)


def _riff(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def archive() -> bytes:
    """Return a zip file."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("clip.mp4", bytes(1 << 20))
    return target.getvalue()


def picture(kind: str = "PNG", width: int = 64, height: int = 48) -> bytes:
    """Return a harmless picture."""
    return _saved(Image.linear_gradient("L").resize((width, height)).convert("RGB"), kind)
