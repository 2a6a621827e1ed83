"""The clips and images of a folder, in an order that never changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from mmfast.core.errors import MmfastError
from mmfast.frontends.guard import quote

_VIDEO = "3gp asf avi flv m2ts m4v mkv mov mp4 mpeg mpg mts ogv ts webm wmv y4m"
_IMAGE = "avif bmp gif jpeg jpg png tif tiff webp"
SUFFIXES = frozenset(f".{name}" for name in f"{_VIDEO} {_IMAGE}".split())


@dataclass(frozen=True)
class Medium:
    """One file to answer questions about.

    Attributes:
        file: Where it lies.
        path: Its name below the folder, as text that any reader of Parquet takes.
        bytes: Its size.
        mtime_ns: When it was last written.
    """

    file: str
    path: str
    bytes: int
    mtime_ns: int


def find_media(folder: Path, pattern: str | None, limit: int | None, out: Path) -> list[Medium]:
    """All media below a folder, by name.

    Args:
        folder: Searched to any depth; hidden files and folders are passed over, and so are links
            to folders.
        pattern: A glob that the name below the folder ends with, such as `*.mp4` or `day1/*`;
            None takes files with the suffix of a video or an image. What a file is tells its
            content, later.
        limit: Stop after so many.
        out: The result, which is none of them, and neither is what lies in its `.parts`.

    Raises:
        MmfastError: No such folder, or nothing in it to ask about.
    """
    if not folder.is_dir():
        reason = "is not a directory" if folder.exists() else "does not exist"
        raise MmfastError(f"{quote(folder)} {reason}: give a folder of clips or images")
    if limit is not None and limit < 1:
        raise MmfastError(f"limit={limit}; give a whole number of at least 1")
    others, found = 0, []
    for file in _files(folder):
        name = file.relative_to(folder)
        if file == out or file.parent == out.with_name(out.name + ".parts"):
            continue
        if not _wanted(name, pattern):
            others += 1
            continue
        found.append(_medium(file, name))
        if len(found) == limit:
            break
    if not found:
        raise MmfastError(_nothing(folder, pattern, others))
    return found


def _nothing(folder: Path, pattern: str | None, others: int) -> str:
    if pattern is not None:
        return f"none of the {others} files in {quote(folder)} fits --pattern {quote(pattern)}"
    if not others:
        return f"{quote(folder)} is empty: give a folder of clips or images"
    return (
        f"none of the {others} files in {quote(folder)} has the suffix of a video or an image; "
        "say which are with --pattern, such as '*.bin'"
    )


def _wanted(name: PurePath, pattern: str | None) -> bool:
    if pattern is not None:
        return name.match(pattern)
    return name.suffix.lower() in SUFFIXES


def _files(folder: Path) -> Iterator[Path]:
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        yield from (Path(at) / name for name in sorted(names) if not name.startswith("."))


def _medium(file: Path, name: PurePath) -> Medium:
    try:
        facts = file.stat()
        size, written = facts.st_size, facts.st_mtime_ns
    except OSError:  # a dangling link: a row with an error, in its turn
        size = written = 0
    # A name is bytes; those that are no text are escaped.
    text = os.fsencode(name.as_posix()).decode("utf-8", "backslashreplace")
    return Medium(str(file), text, size, written)


def file_hash(file: str) -> str | None:
    """SHA-256 of a file's content; None where it cannot be read."""
    try:
        with Path(file).open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()
    except OSError:
        return None
