"""Cameras and network addresses as open inputs of FFmpeg, with every address checked first.

Nothing is opened unless the caller allows it, and never a private host. Every address of a name is
checked, and the connection goes to the address that was checked: a name that resolves differently
the second time gains nothing. Every redirect is checked alike, and playlists are not followed.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import os
import socket
import ssl
import sys
import time as clocks
from collections.abc import Collection, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import av
import numpy as np

from mmfast.core.errors import MediaError
from mmfast.frontends.clip import Frame, Orientation
from mmfast.frontends.container import demuxed
from mmfast.frontends.source import IMAGE_KINDS, VIDEO_KINDS, Limits, first_line, quote, sniff

PORTS = {"http": 80, "https": 443, "rtsp": 554, "rtsps": 322}
_RTSP_PROTOCOLS = {"rtsp": "rtsp,rtp,tcp", "rtsps": "rtsp,rtp,tcp,tls"}

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

_EXAMPLES = "rtsp://, rtsps://, http:// or https:// and a host"

Allowed = bool | Collection[str]


@dataclass(frozen=True)
class Address:
    """A checked network address."""

    url: SplitResult
    host: str
    port: int
    ip: str  # where the connection goes

    @property
    def name(self) -> str:
        """The address for messages: without user, password and query, which may be secret."""
        return shown(self.url)


def shown(url: SplitResult) -> str:
    """A URL for messages, without user, password and query."""
    host = (url.netloc or "").rpartition("@")[2]
    return quote(f"{url.scheme}://{host}{url.path}")


def check_address(text: str, allowed: Allowed) -> Address:
    """Check a URL before anything is opened.

    `allowed` is False, True (public hosts) or the only hosts, which may then be private.
    """
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError as error:
        raise MediaError(f"the address is not a URL ({error}): give {_EXAMPLES}") from None
    name, scheme = shown(url), url.scheme.lower()
    if scheme not in PORTS:
        raise MediaError(f"{name}: scheme {scheme!r} is refused; give {_EXAMPLES}")
    if not url.hostname or any(c.isspace() or ord(c) < 32 for c in text):
        raise MediaError(f"{name} is not an address: give {_EXAMPLES}")
    if allowed is False:
        raise MediaError(
            f"{name}: network sources are off; allow them with allow_network=True "
            "or --allow-network"
        )
    host = url.hostname
    hosts = (allowed,) if isinstance(allowed, str) else allowed
    listed = None if hosts is True else {str(h).lower() for h in hosts}
    if listed is not None and host.lower() not in listed:
        raise MediaError(
            f"{name}: host {host!r} is not among those allowed ({', '.join(sorted(listed))})"
        )
    port = port or PORTS[scheme]
    ip = _resolve(name, host, port, private=listed is not None)
    return Address(url._replace(scheme=scheme), host, port, ip)


def _resolve(name: str, host: str, port: int, private: bool) -> str:
    try:
        found = [
            str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        ]
    except (OSError, UnicodeError) as error:
        raise MediaError(f"{name}: the host is unknown ({first_line(error)}): check it") from None
    bad = [ip for ip in found if not is_public(ip)]
    if bad and not private:
        raise MediaError(
            f"{name}: {bad[0]} is a private address; allow it with allow_network=[{host!r}]"
        )
    return found[0]


def is_public(ip: str) -> bool:
    """Return True if an IP address belongs to the public internet."""
    address = ipaddress.ip_address(ip.split("%", 1)[0])
    if isinstance(address, ipaddress.IPv6Address):  # some embed an address of version 4
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not address.is_multicast


def open_rtsp(address: Address, timeout: float) -> Any:
    """Connect PyAV to an RTSP source over TCP; redirects are limited to these protocols."""
    url, scheme = address.url, address.url.scheme
    user = url.netloc.rpartition("@")[0]
    # A certificate is issued to a name, so that under TLS the name must stay.
    host = address.host if scheme == "rtsps" else address.ip
    host = f"[{host}]" if ":" in host else host
    netloc = f"{user}@{host}:{address.port}" if user else f"{host}:{address.port}"
    options = {
        "rtsp_transport": "tcp",
        "timeout": str(round(timeout * 1e6)),
        "protocol_whitelist": _RTSP_PROTOCOLS[scheme],
        "allowed_media_types": "video",
    }
    try:
        return av.open(
            url._replace(netloc=netloc).geturl(),
            format="rtsp",
            options=options,
            timeout=(timeout, timeout),
        )
    except Exception as error:
        raise MediaError(
            f"{address.name} cannot be opened ({first_line(error)}): check that it is on and that "
            f"user and password are right"
        ) from None


_HOPS = 5
_HEAD = 512
_MOVED = (301, 302, 303, 307, 308)


class HttpFile:
    """One HTTP resource as a file object: read as it arrives, with seeks by range requests.

    Missing and refused addresses are a MediaError, a connection that dies or stalls an OSError.
    """

    def __init__(self, text: str, allowed: Allowed, timeout: float) -> None:
        """Connect, with `timeout` seconds for every answer of the server."""
        self._timeout = timeout
        self.address = check_address(text, allowed)
        self._position, self._reply = 0, self._request(0)
        for _ in range(_HOPS):
            if self._reply.status not in _MOVED:
                break
            target = urljoin(self.address.url.geturl(), self._reply.headers.get("Location", ""))
            self.close()
            self.address = self._follow(target, allowed)
            self._reply = self._request(0)
        if self._reply.status != 200:
            self.close()
            raise MediaError(
                f"{self.address.name} answers {self._reply.status} "
                f"{' '.join(self._reply.reason.split())}: check the address"
            )
        length = self._reply.headers.get("Content-Length", "")
        self.size = int(length) if length.isdecimal() and len(length) < 19 else None
        self._ranges = self.size is not None and self._reply.headers.get("Accept-Ranges") == "bytes"
        self._head = b""

    def _follow(self, target: str, allowed: Allowed) -> Address:
        found = check_address(target, allowed)
        if not found.url.scheme.startswith("http"):
            raise MediaError(f"{self.address.name} moves to {found.name}: give that address")
        if self.address.url.scheme == "https" and found.url.scheme == "http":
            raise MediaError(f"{self.address.name} moves to {found.name}, which is not encrypted")
        return found

    def _request(self, start: int) -> http.client.HTTPResponse:
        address = self.address
        path = (address.url.path or "/") + (f"?{address.url.query}" if address.url.query else "")
        headers = {"User-Agent": "mmfast", "Accept-Encoding": "identity", "Connection": "close"}
        if start:
            headers["Range"] = f"bytes={start}-"
        if address.url.username is not None:
            pair = f"{unquote(address.url.username)}:{unquote(address.url.password or '')}"
            headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        self._connection = connection = _Pinned(address, self._timeout)
        try:
            connection.request("GET", path, headers=headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:  # a path not in ASCII
            connection.close()
            raise MediaError(
                f"{address.name} does not answer ({first_line(error)}): check the address, or "
                f"raise timeout="
            ) from None

    def head(self) -> bytes:
        """Return the first 512 bytes or fewer, which show the kind; `read` gives them again."""
        while len(self._head) < _HEAD and (part := self._more(_HEAD - len(self._head))):
            self._head += part
        return self._head

    @property
    def content_type(self) -> str:
        """Content type that the server declares."""
        return self._reply.headers.get_content_type()

    def read(self, count: int) -> bytes:
        """Return at most `count` bytes as soon as some arrive; none at the end."""
        if self._position < len(self._head):
            part = self._head[self._position : self._position + count]
        else:
            part = self._more(count)
        self._position += len(part)
        if not part and self.size is not None and self._position < self.size:
            raise ConnectionError(f"the server closed after {self._position} of {self.size} bytes")
        return part

    def _more(self, count: int) -> bytes:
        try:
            return self._reply.read1(count)
        except http.client.HTTPException as error:
            raise ConnectionError(f"the server closed early ({first_line(error)})") from None

    def seekable(self) -> bool:
        """Return True if the server serves ranges."""
        return self._ranges

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        """Seek to a byte of the resource by a new request."""
        base = {0: 0, 1: self._position, 2: self.size or 0}[whence]
        target = base + offset
        if target != self._position:
            self.close()
            self._reply = self._request(target)
            # The head is kept for the first pass only; after a seek the server gives all bytes.
            self._head, self._position = b"", target
            if target and self._reply.status != 206:
                raise ConnectionError(f"the server refuses byte {target} ({self._reply.status})")
        return target

    def close(self) -> None:
        """End the connection."""
        self._reply.close()
        self._connection.close()


class _Pinned(http.client.HTTPConnection):
    """A connection to the address that was checked, without a second resolution of the name."""

    def __init__(self, address: Address, timeout: float) -> None:
        super().__init__(address.host, address.port, timeout=timeout)
        self._address = address

    def connect(self) -> None:
        plain = socket.create_connection((self._address.ip, self._address.port), self.timeout)
        self.sock: Any = plain
        if self._address.url.scheme == "https":
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(plain, server_hostname=self._address.host)


def open_http(text: str, allowed: Allowed, limits: Limits, timeout: float) -> tuple[Any, HttpFile]:
    """Open the video of a URL; return PyAV's container and the connection."""
    file = HttpFile(text, allowed, timeout)
    name = file.address.name
    try:
        limits.check_file(name, file.size or 0)
        kind = "mpjpeg" if file.content_type == "multipart/x-mixed-replace" else ""
        kind = kind or sniff(name, file.head())
        if kind in IMAGE_KINDS:
            raise MediaError(f"{name} is a picture ({kind}), not a video: give a stream's address")
        # A demuxer may not open anything by itself, such as the parts of a playlist.
        options = {
            "protocol_whitelist": "",
            "max_pixels": str(limits.pixels),
            "analyzeduration": "1000000",  # microseconds; the default of 5 s is a long wait live
        }
        form = VIDEO_KINDS.get(kind, kind)
        return demuxed(file, form, options), file
    except MediaError:
        file.close()
        raise
    except Exception as error:
        file.close()
        raise MediaError(
            f"{name} cannot be opened ({first_line(error)}): it is damaged or not a video"
        ) from None


_RATE = 25  # frames per second, where nothing is known


def camera_address(camera: int | str, platform: str = sys.platform) -> tuple[str, str]:
    """FFmpeg's input format and the device name of a camera, given by number or name.

    A name is a path such as ``/dev/video0`` on Linux, the name in the system elsewhere.
    """
    text = str(camera)
    number = text.isdecimal()
    if not text or (isinstance(camera, int) and camera < 0):
        raise MediaError(f"camera {camera!r} does not exist: give 0 for the first one, or a name")
    if platform.startswith("linux"):
        device = f"/dev/video{text}" if number else text
        if not device.startswith("/dev/"):
            raise MediaError(f"camera {quote(text)}: give its number or a path such as /dev/video0")
        return "v4l2", device
    if platform == "darwin":
        return "avfoundation", f"{text}:none"
    if platform == "win32":
        if number:
            raise MediaError(
                f"camera {text}: Windows names its cameras; give 'camera:NAME' with the name that "
                f"`ffmpeg -list_devices true -f dshow -i dummy` prints"
            )
        return "dshow", f"video={text}"
    raise MediaError(f"no cameras are known on {platform}: give an iterator of frames")


def open_camera(camera: int | str, timeout: float) -> Any:
    """Open a camera with PyAV; MediaError if missing, busy, or FFmpeg was built without cameras."""
    form, device = camera_address(camera)
    try:
        return av.open(device, format=form, timeout=timeout)
    except Exception as error:  # FFmpegError, ValueError for an unknown format
        raise MediaError(
            f"camera {camera} ({device}, {form}) cannot be opened ({first_line(error)}): check "
            f"that it is plugged in, free, and that you may read it"
        ) from None


_SCREENS = {"darwin": ("avfoundation", "Capture screen 0:none"), "win32": ("gdigrab", "desktop")}


def screen_address(display: str = "", platform: str = sys.platform) -> tuple[str, str]:
    """FFmpeg's input format and the device name of a screen; MediaError where there is none.

    `display` is a display such as ``:0`` on Linux, "" takes that of the session; elsewhere the
    device name.
    """
    if platform in _SCREENS:
        form, device = _SCREENS[platform]
        return form, display or device
    device = display or os.environ.get("DISPLAY", "")
    if not platform.startswith("linux") or not device:
        raise MediaError(
            "source 'screen' needs a display, and DISPLAY names none: log in with a desktop, name "
            "one as in 'screen::0', or give a file, a camera's number or an iterator of frames"
        )
    return "x11grab", device


def open_screen(display: str, timeout: float, fps: float) -> Any:
    """Open a screen with PyAV, or by Pillow's pictures where FFmpeg was built without screens.

    Returns a container, or an iterator of pictures with seconds.
    """
    form, device = screen_address(display)
    if form not in av.formats_available:
        return screen_pictures(fps)
    try:
        return av.open(device, format=form, timeout=timeout, options={"framerate": f"{fps:g}"})
    except Exception as error:
        raise MediaError(
            f"screen {quote(device)} ({form}) cannot be opened ({first_line(error)}): check that "
            "the display runs and that you may record it"
        ) from None


def screen_pictures(fps: float) -> Iterator[tuple[Any, float]]:
    """Yield pictures of the screen with seconds, `fps` a second."""
    from PIL import ImageGrab

    start, turn = clocks.monotonic(), 0
    while True:
        try:
            shot = ImageGrab.grab()
        except OSError as error:
            raise MediaError(
                f"the screen cannot be recorded ({first_line(error)}): allow it in the settings of "
                "the system, or give a file or a camera's number"
            ) from None
        yield shot, clocks.monotonic() - start
        turn += 1
        clocks.sleep(max(0.0, start + turn / fps - clocks.monotonic()))


def running_frames(
    container: Any, name: str, limits: Limits, file: Any = None
) -> Iterator[tuple[Any, float | None]]:
    """Yield PyAV frames with the seconds since the first one; the source is closed at the end.

    A packet that does not decode is yielded as its exception, for the consumer to count.
    """
    with closing(file) if file is not None else nullcontext(), container:
        stream: Any = container.streams.best("video")
        if stream is None or stream.codec_context is None:
            raise MediaError(f"{name} has no video that can be decoded: give one with a picture")
        stream.codec_context.options = {"max_pixels": str(limits.pixels)}
        limits.check_picture(
            name, stream.width or limits.min_side, stream.height or limits.min_side
        )
        since = _Since(stream)
        try:
            for packet in container.demux(stream):
                try:
                    frames = list(packet.decode())
                except av.FFmpegError as error:
                    yield error, None
                else:
                    yield from ((frame, since(frame.pts)) for frame in frames)
        except av.FFmpegError as error:
            raise MediaError(
                f"{name} broke off ({first_line(error)}): check the source and open it again"
            ) from None


class _Since:
    """Seconds since the first frame; first frames without a time (RTSP) lie a frame apart."""

    def __init__(self, stream: Any) -> None:
        self._tick = float(stream.time_base)
        self._step = 1 / float(stream.guessed_rate or stream.average_rate or _RATE)
        self._untimed = 0
        self._origin: float | None = None

    def __call__(self, pts: int | None) -> float | None:
        if pts is None:
            self._untimed += 1
            return (self._untimed - 1) * self._step if self._origin is None else None
        if self._origin is None:
            self._origin = pts * self._tick - self._untimed * self._step
        return pts * self._tick - self._origin


def running_rgb(frame: Any, name: str, limits: Limits) -> Frame:
    """Convert one item of `running_frames` to upright RGB [H, W, 3]; raise if it is broken."""
    if isinstance(frame, BaseException):
        raise MediaError(f"a packet of {name} cannot be decoded ({first_line(frame)})")
    limits.check_picture(name, frame.width, frame.height)
    return np.ascontiguousarray(Orientation.of(frame).apply(frame.to_ndarray(format="rgb24")))
