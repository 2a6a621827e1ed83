"""A video behind http:// or https:// as a file object for PyAV.

FFmpeg's own client would follow a redirect anywhere; here every hop is checked like the first
address, the connection goes to the address that was checked, and playlists are not followed.
"""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
from typing import Any
from urllib.parse import unquote, urljoin

import av

from mmfast.core.errors import MediaError
from mmfast.frontends.guard import first_line
from mmfast.frontends.limits import Limits
from mmfast.frontends.live_network import Address, Allowed, check_address
from mmfast.frontends.source import IMAGE_KINDS, VIDEO_KINDS, sniff

_HOPS = 5
_HEAD = 512
_MOVED = (301, 302, 303, 307, 308)


class HttpFile:
    """Bytes of one HTTP resource: read as they arrive, sought by asking for a range.

    Raises:
        MediaError: It is not there, or moves somewhere that is not allowed.
        OSError: Later, when the connection dies or stalls.
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
        """The first 512 bytes, or all there are, which say what it is; `read` gives them again."""
        while len(self._head) < _HEAD and (part := self._more(_HEAD - len(self._head))):
            self._head += part
        return self._head

    @property
    def content_type(self) -> str:
        """What the server says it is."""
        return self._reply.headers.get_content_type()

    def read(self, count: int) -> bytes:
        """At most `count` bytes, as soon as there are some; none at the end."""
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
        """Whether the server serves ranges."""
        return self._ranges

    def tell(self) -> int:
        """Where the next byte comes from."""
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a byte of the resource, by a new request."""
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
    """A connection to the address that was checked, whatever the name resolves to by now."""

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
    """Open the video behind a URL.

    Returns:
        PyAV's container and the connection.

    Raises:
        MediaError: See `HttpFile`; or it is not a video.
    """
    file = HttpFile(text, allowed, timeout)
    name = file.address.name
    try:
        limits.check_file(name, file.size or 0)
        kind = "mpjpeg" if file.content_type == "multipart/x-mixed-replace" else ""
        kind = kind or sniff(name, file.head())
        if kind in IMAGE_KINDS:
            raise MediaError(f"{name} is a picture ({kind}), not a video: give a stream's address")
        # What a demuxer might open by itself, such as the parts of a playlist, stays shut.
        options = {
            "protocol_whitelist": "",
            "max_pixels": str(limits.pixels),
            "analyzeduration": "1000000",  # microseconds; the default of 5 s is a long wait live
        }
        form = VIDEO_KINDS.get(kind, kind)
        return av.open(file, format=form, options=options, metadata_errors="ignore"), file
    except MediaError:
        file.close()
        raise
    except Exception as error:
        file.close()
        raise MediaError(
            f"{name} cannot be opened ({first_line(error)}): it is damaged or not a video"
        ) from None
