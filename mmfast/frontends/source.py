"""Encoded media inputs: their kind from the first bytes, limits of their cost, and errors."""

from __future__ import annotations

import io
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from mmfast.core.errors import MediaError, MmfastError, an, unknown

# Suffix -> format and encoding of libsndfile.
SOUND_FORMATS = {
    ".flac": ("FLAC", "PCM_16"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
    ".ogg": ("OGG", "VORBIS"),
    ".opus": ("OGG", "OPUS"),
}


class Mismatch(Exception):  # noqa: N818 - asks for another way to decode, never reaches a caller
    """A decoder did not give the frames that the packets list."""


class Damage(Mismatch):
    """A mismatch because of damage: later frames depend on how a decoder conceals it."""


def quote(text: object) -> str:
    """Quote a value for a message: one line, at most 200 characters."""
    shown = repr(str(text))
    return shown if len(shown) <= 200 else shown[:160] + "..." + shown[-30:]


def sound_suffix(target: str | os.PathLike[str]) -> str:
    """Return the suffix that names the format of a sound file, .wav for none (MediaError)."""
    suffix = Path(target).suffix.lower() or ".wav"
    if suffix != ".wav" and suffix not in SOUND_FORMATS:
        raise MediaError(
            f"{quote(target)}: {unknown('sound format', suffix, ('.wav', *SOUND_FORMATS))}"
        )
    return suffix


def first_line(error: BaseException) -> str:
    """Return an exception's reason as one short line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:160]


@contextmanager
def refusing(name: str, doing: str = "decoded") -> Iterator[None]:
    """Turn any exception of a decoder on broken input into a one-line `MediaError`."""
    try:
        yield
    except (MmfastError, Mismatch):
        raise
    except Exception as error:  # broken input makes decoders raise nearly anything, MemoryError too
        raise MediaError(
            f"{name} cannot be {doing} ({first_line(error)}): it is damaged or not what its "
            f"header says; re-encode or download it again"
        ) from error


@dataclass(frozen=True)
class Limits:
    """Limits of the cost of one media input, which is hostile until it is decoded.

    A 54 KB H.264 file can hold 4.5 GB of pictures, so each figure is checked from the header
    first and counted again while decoding, where the header may have lied.
    """

    bytes: int = 4 << 30  # size of the encoded input
    pixels: int = 89_478_485  # of one frame: 256 MiB of RGB
    frames: int = 1_000_000  # of the source, about 9 hours at 30 per second
    decoded_bytes: int = 2 << 30  # RGB returned to the caller
    duration: float = 6 * 3600.0  # seconds of video
    seconds: float = 300.0  # wall clock that decoding one input may take
    min_side: int = 2  # no model takes a picture of 1x1

    def untimed(self) -> Limits:
        """Drop the wall clock, for streams whose consumer sets the pace."""
        return replace(self, seconds=math.inf)

    def check_file(self, name: str, size: int) -> None:
        """Refuse an input of more encoded bytes than allowed."""
        if size > self.bytes:
            raise MediaError(
                f"{name} has {size:,} bytes, the limit is {self.bytes:,}: "
                f"cut or re-encode it, or raise Limits(bytes=...)"
            )

    def check_picture(self, name: str, width: int, height: int) -> None:
        """Refuse a picture that is too small for a model or too large to allocate."""
        if min(width, height) < self.min_side:
            raise MediaError(
                f"{name} is {width}x{height} pixels, the smallest side allowed is "
                f"{self.min_side}: give a larger picture"
            )
        if width * height > self.pixels:
            raise MediaError(
                f"{name} is {width}x{height} = {width * height:,} pixels, the limit is "
                f"{self.pixels:,}: scale it down, or raise Limits(pixels=...)"
            )

    def check_frames(self, name: str, count: int) -> None:
        """Refuse a source of too many frames."""
        if count > self.frames:
            raise MediaError(
                f"{name} has {count:,} frames or more, the limit is {self.frames:,}: "
                f"cut it into parts, or raise Limits(frames=...)"
            )

    def check_duration(self, name: str, seconds: float) -> None:
        """Refuse a source that lasts too long."""
        if seconds > self.duration:
            raise MediaError(
                f"{name} lasts {seconds:,.1f} s, the limit is {self.duration:,.1f} s: "
                f"cut it into parts, or raise Limits(duration=...)"
            )

    def check_decoded(self, name: str, count: int, width: int, height: int) -> None:
        """Refuse a read whose RGB frames would not fit the budget."""
        need = 3 * count * width * height
        if need > self.decoded_bytes:
            raise MediaError(
                f"{count} frames of {width}x{height} from {name} need {need:,} bytes, the limit "
                f"is {self.decoded_bytes:,}: ask for fewer, or raise Limits(decoded_bytes=...)"
            )


DEFAULT_LIMITS = Limits()


class Budget:
    """Count of the frames that a decoder produced, and of the time it took."""

    def __init__(self, limits: Limits, name: str) -> None:
        self._limits, self._name = limits, name
        self._deadline = time.monotonic() + limits.seconds
        self._frames = 0

    def frame(self, width: int, height: int) -> None:
        """Account for one decoded frame; raise `MediaError` when the budget is spent."""
        self._frames += 1
        self._limits.check_frames(self._name, self._frames)
        self._limits.check_picture(self._name, width, height)
        self.clock()

    def clock(self) -> None:
        """Raise `MediaError` when the wall clock has run out."""
        if time.monotonic() > self._deadline:
            raise MediaError(
                f"decoding {self._name} took over {self._limits.seconds:g} s: cut it into parts, "
                f"scale it down, or raise Limits(seconds=...)"
            )


_HEAD = 512  # bytes read to detect the kind of a file; two transport stream packets fit
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://|^data:", re.ASCII)
_REFUSED = {
    "file": "file:// addresses are refused; give the plain path",
    "data": "data: addresses are refused; decode it and give the bytes",
}
_NETWORK = "network sources are off; download the file first"

# kind -> offset and magic. The kind comes from the bytes, never from the file's suffix.
_MAGIC: tuple[tuple[str, int, bytes], ...] = (
    ("png", 0, b"\x89PNG\r\n\x1a\n"), ("jpeg", 0, b"\xff\xd8\xff"), ("gif", 0, b"GIF8"),
    ("webp", 8, b"WEBP"), ("bmp", 0, b"BM"), ("tiff", 0, b"II*\0"), ("tiff", 0, b"MM\0*"),
    ("avif", 4, b"ftypavif"), ("avif", 4, b"ftypavis"), ("heic", 4, b"ftyphei"),
    ("heic", 4, b"ftypmif1"), ("heic", 4, b"ftypmsf1"),
    *(("mp4", 4, box) for box in (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp")),
    ("mkv", 0, b"\x1aE\xdf\xa3"), ("avi", 8, b"AVI "), ("flv", 0, b"FLV\x01"),
    ("asf", 0, b"0&\xb2u\x8ef\xcf\x11"), ("ogg", 0, b"OggS"), ("mpeg", 0, b"\0\0\x01\xba"),
    ("y4m", 0, b"YUV4MPEG2 "), ("wav", 8, b"WAVE"), ("flac", 0, b"fLaC"), ("mp3", 0, b"ID3"),
)  # fmt: skip
# kind -> Pillow's name
IMAGE_KINDS = {
    "png": "PNG", "jpeg": "JPEG", "gif": "GIF", "webp": "WEBP", "bmp": "BMP", "tiff": "TIFF",
    "avif": "AVIF",
}  # fmt: skip
# kind -> FFmpeg's demuxer, the only one the file is given to
VIDEO_KINDS = {
    "mp4": "mp4", "mkv": "matroska", "avi": "avi", "flv": "flv", "asf": "asf", "ogg": "ogg",
    "mpeg": "mpeg", "mpegts": "mpegts", "y4m": "yuv4mpegpipe",
}  # fmt: skip
_AUDIO_KINDS = ("wav", "flac", "mp3", "aac")


# (name for messages, first bytes) -> kind, or a MediaError
Sniffer = Callable[[str, bytes], str]


@dataclass(frozen=True)
class MediaSource:
    """One encoded input: its bytes, their number and kind."""

    name: str  # quoted, on one line, for messages
    data: Path | bytes
    size: int
    kind: str  # a key of IMAGE_KINDS, VIDEO_KINDS or AUDIO_KINDS

    def open(self) -> IO[bytes]:
        """Open a fresh binary file at position 0."""
        if isinstance(self.data, bytes):
            return io.BytesIO(self.data)
        return self.data.open("rb")


def is_encoded(media: object) -> bool:
    """Return True if `media` is a path, bytes or a file object."""
    return isinstance(media, str | os.PathLike | bytes | bytearray | memoryview) or hasattr(
        media, "read"
    )


def open_source(media: object, limits: Limits, kind_of: Sniffer | None = None) -> MediaSource:
    """Check the size and kind of a path, bytes or file object without decoding anything.

    `kind_of` detects the kind from the first 512 bytes, `sniff` when left out.
    """
    kind_of = kind_of or sniff
    if isinstance(media, bytes | bytearray | memoryview):
        data = bytes(media)
        name = f"the input of {len(data):,} bytes"
    elif hasattr(media, "read"):
        data, name = _drain(media, limits)
    else:
        return _from_path(media, limits, kind_of)
    limits.check_file(name, len(data))
    if not data:
        raise MediaError(f"{name} is empty: read the file again from its start")
    return MediaSource(name, data, len(data), kind_of(name, data[:_HEAD]))


def _from_path(media: Any, limits: Limits, kind_of: Sniffer) -> MediaSource:
    text = os.fsdecode(media)
    name = quote(text)
    if _URL.match(text):
        scheme = text.split(":", 1)[0].lower()
        raise MediaError(f"{name}: " + _REFUSED.get(scheme, _NETWORK))
    path = Path(text)
    try:
        if not text:
            raise MediaError("the media path is empty: give the name of a file")
        if path.is_dir():
            raise MediaError(f"{name} is a directory: give one file")
        size = path.stat().st_size
        if not path.is_file():
            raise MediaError(f"{name} is not a regular file: copy the media to a file first")
        limits.check_file(name, size)
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except FileNotFoundError:
        raise MediaError(
            f"{name} does not exist: check the path (relative ones start at {quote(Path.cwd())})"
        ) from None
    except OSError as error:
        raise MediaError(
            f"{name} cannot be read ({error.strerror}): check the path and its permissions"
        ) from None
    except MediaError:
        raise
    except ValueError as error:  # an embedded null byte
        raise MediaError(f"{name} is not a path ({error}): give a file name") from None
    if not size:
        raise MediaError(f"{name} is empty (0 bytes): copy or download it again")
    return MediaSource(name, path.absolute(), size, kind_of(name, head))


def _drain(file: Any, limits: Limits) -> tuple[bytes, str]:
    given = getattr(file, "name", None)
    name = quote(given) if isinstance(given, str) else f"{an(type(file).__name__)}"
    parts, total = [], 0
    try:
        start = file.tell() if hasattr(file, "seek") and seekable(file) else None
        while total <= limits.bytes and (part := file.read(min(1 << 24, limits.bytes + 1))):
            if not isinstance(part, bytes | bytearray | memoryview):
                raise MediaError(f"{name} gives text, not bytes: open it with mode 'rb'")
            parts.append(part)
            total += len(part)
        if start is not None:
            file.seek(start)
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(f"{name} cannot be read ({first_line(error)}): open it again") from None
    return b"".join(parts), name


def seekable(file: Any) -> bool:
    """Return True if a file object can seek."""
    return bool(file.seekable()) if hasattr(file, "seekable") else False


def rereadable(media: Any) -> Any:
    """Return media that can be looked at, then read: a file that cannot seek becomes its bytes."""
    if hasattr(media, "read") and not seekable(media):
        return open_source(media, DEFAULT_LIMITS).data
    return media


def sniff(name: str, head: bytes) -> str:
    """Detect the kind of an image or a video from its first bytes; MediaError for anything else."""
    kind = magic_kind(head)
    if kind in _AUDIO_KINDS:
        raise MediaError(f"{name} is audio only ({kind}): give a file with a video stream")
    if kind == "heic":
        raise MediaError(f"{name} is a HEIC image, which Pillow does not read: convert it to JPEG")
    if kind not in IMAGE_KINDS and kind not in VIDEO_KINDS:
        raise MediaError(
            f"{name} is neither an image nor a video, it starts with {head[:12]!r}: "
            f"give one of {', '.join((*IMAGE_KINDS, *VIDEO_KINDS))}"
        )
    return kind


def magic_kind(head: bytes) -> str:
    """Return the kind that the first bytes announce, "" where it is unknown."""
    kind = next((k for k, at, magic in _MAGIC if head[at : at + len(magic)] == magic), "")
    return kind or _sync_kind(head)


def _sync_kind(head: bytes) -> str:
    """Detect formats without a magic number by their sync bytes: transport streams, bare audio."""
    for start, packet in ((0, 188), (4, 192)):
        if len(head) > start + packet and head[start] == head[start + packet] == 0x47:
            return "mpegts"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        return "aac" if head[1] & 0x06 == 0 else "mp3"
    return ""
