"""A directory of pictures as a stream, in natural order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mmfast.core.errors import MediaError
from mmfast.frontends.guard import quote
from mmfast.frontends.limits import Limits

_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif"))


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key in which ``frame2`` comes before ``frame10``; ties by the number's length."""
    parts = re.split(r"(\d+)", name.casefold(), flags=re.ASCII)
    return tuple(
        (int(part), len(part), "") if part.isdecimal() else (-1, 0, part) for part in parts
    )


def folder_frames(folder: Path, limits: Limits) -> Iterator[Path]:
    """The pictures of a directory, without its subdirectories and hidden files.

    Raises:
        MediaError: It cannot be listed, holds no picture, or more than the limits allow.
    """
    name = quote(folder)
    try:
        files = [
            path
            for path in folder.iterdir()
            if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
        ]
    except OSError as error:
        raise MediaError(
            f"{name} cannot be listed ({error.strerror}): check its permissions"
        ) from None
    limits.check_frames(name, len(files))
    if not files:
        raise MediaError(
            f"{name} holds no picture: give a directory of {', '.join(sorted(_SUFFIXES))} files"
        )
    return iter(sorted(files, key=lambda path: natural_key(path.name)))
