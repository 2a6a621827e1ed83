"""Files that appear whole or not at all, and directories of models."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from mmfast.core.errors import MmfastError, ModelError


def text_lines(text: str) -> list[str]:
    r"""Return the lines of a text that are not blank; only "\n" ends one.

    `str.splitlines` ends them at U+2028 and U+0085, too, which may stand in a string of JSON.
    """
    return [line for line in text.split("\n") if line.strip()]


def json_lines(text: str) -> list[Any]:
    """Return what the lines of a JSON Lines text say; ValueError where one is no JSON."""
    return [json.loads(line) for line in text_lines(text)]


@contextmanager
def whole_file(
    path: str | os.PathLike[str], kind: type[MmfastError] = MmfastError
) -> Iterator[Path]:
    """Yield a name beside `path`; what the block writes there takes its place at the end.

    An error of `kind` where the disk is full or the folder cannot be written; what was there
    before stays then, and after every other exception. A device or a pipe, and a file whose folder
    cannot be written, is given itself.
    """
    target = Path(path)
    real = target.resolve()  # of a link its end
    beside = os.access(target.parent, os.W_OK) and (target.is_file() or not target.exists())
    draft = real.with_name(f".{real.name}.{os.getpid()}.part") if beside else target
    try:
        yield draft
        if beside:
            draft.replace(real)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise kind(
            f"{str(target)!r} cannot be written: {reason}; make room, or name another file"
        ) from None
    finally:
        if beside:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


@contextmanager
def synced_file(path: Path, draft: Path) -> Iterator[BinaryIO]:
    """Yield a file whose contents take the place of `path` at the end, and are on the disk then.

    So `path` is either what it was or whole, whenever the process dies or the power fails, once the
    folder is synced, too (`sync_folder`). It is `draft`, in the same folder, until then. OSError:
    the disk is full, read-only or gone; nothing is left behind.
    """
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file or folder for syncing; OSError where that fails."""
    held = os.open(path, os.O_RDONLY)
    try:
        yield held
    finally:
        os.close(held)


def sync_folder(path: Path) -> None:
    """Make names in a folder survive a power cut, where the system can."""
    with suppress(OSError), opened(path) as held:  # some file systems refuse folders
        os.fsync(held)


def check_directory(where: str) -> None:
    """Raise `ModelError` where a directory is missing or has no model in it."""
    path = Path(where)
    if not path.exists():
        if where.startswith((".", "/", "~")) or where.count("/") != 1:
            raise ModelError(
                f"model directory {where!r} does not exist; give a directory or a hub id"
            )
        return
    if (path / "config.json").is_file():
        return
    raise ModelError(f"{where!r} holds no config.json; give the directory of a saved checkpoint")
