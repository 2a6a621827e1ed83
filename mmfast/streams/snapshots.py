"""Saved state as generations of a folder: a new one is whole before it counts.

`gen-00000007/` holds `manifest.json` (its first line a checksum of the rest), tensors in
safetensors files with checksums, and files that belong to the state (links where the file system
has them).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.files import sync_folder
from mmfast.streams.archive import files

FORMAT = 4
_SHARD = 256 << 20  # bytes of tensors per file: what is in memory twice while saving
_NAME = re.compile(r"gen-(\d{8,})")


class _OtherFormatError(MmfastError):
    """A whole generation that another version of the package wrote."""


def save(folder: str | Path, tree: Any, *, keep: int = 2) -> int:
    """Write a new generation of some state; returns its number.

    Until it is whole and on disk, the one before it counts; whenever the process dies, what was
    saved before stays readable. Older generations than the `keep` newest are removed afterwards;
    the second newest stands in if the newest gets damaged.

    `folder` is made if need be; one process saves into it at a time. `tree` holds nested dicts,
    lists and tuples of tensors, numbers, strings, None and `File`s. MmfastError: disk full, no
    permission, another process is saving there, or the tree holds something else; nothing that was
    saved before is harmed.
    """
    folder = _as_path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            return _save(folder, tree, keep)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise MmfastError(
            f"cannot save to {str(folder)!r}: {why}; what was saved before is untouched"
        ) from error


def _as_path(folder: object) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise MmfastError(f"folder={folder!r} is no path; give the name of a folder")
    return Path(folder)


def check_folder(folder: Path) -> None:
    """Refuse (MmfastError) a folder that `save` could not use, before long work; makes none."""
    whole = folder.absolute()
    there = next(place for place in (whole, *whole.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise MmfastError(
            f"cannot save to {str(folder)!r}: {str(there)!r} is no folder that can be written; "
            "name another"
        )


def _save(folder: Path, tree: Any, keep: int) -> int:
    for left in folder.glob(".part-*"):  # of a process that died
        shutil.rmtree(left, ignore_errors=True)
    old = generations(folder)
    number = old[-1] + 1 if old else 1
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
    try:
        _write(part, tree)
        part.rename(_path(folder, number))
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync_folder(folder)
    for last in old[: max(0, len(old) + 1 - keep)]:
        away = folder / f".part-old-{last}"  # first out of sight: half a generation is none
        with contextlib.suppress(OSError):  # the new one is saved; the next save tries again
            _path(folder, last).rename(away)
            shutil.rmtree(away, ignore_errors=True)
    return number


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    try:
        held = files.lock(folder / "lock")
    except BlockingIOError:
        raise MmfastError(
            f"another process is saving to {str(folder)!r}; give each session its own folder"
        ) from None
    try:
        yield
    finally:
        os.close(held)


def _write(part: Path, tree: Any) -> None:
    flat = files.flatten(tree)
    shards, linked = [], []
    for i, tensors in enumerate(_shards(flat.tensors)):
        name = f"tensors-{i:05d}.safetensors"
        files.write(part / name, files.encode(tensors))
        shards.append((name, files.TreeFile(part / name).check))
    for i, file in enumerate(flat.files):
        name = f"file-{i:06d}"
        files.link_or_copy(file.path, part / name)
        linked.append((name, (part / name).stat().st_size))
    body = {"format": FORMAT, "tree": flat.skeleton, "shards": shards, "files": linked}
    text = json.dumps(body, separators=(",", ":")).encode()
    files.write(part / "manifest.json", [b"%08x\n" % zlib.crc32(text), text])
    sync_folder(part)


def _shards(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    shard: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > _SHARD:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    if shard:
        yield shard


def generations(folder: Path) -> list[int]:
    """Numbers of the generations in a folder, ascending."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("gen-*"))
    return sorted(int(match[1]) for match in matches if match)


def _path(folder: Path, number: int) -> Path:
    return folder / f"gen-{number:08d}"


def load(folder: str | Path, reports: list[str] | None = None) -> Any:
    """The newest generation that is whole.

    Tensors come back on the CPU; files are not read, only checked for their size, and stay where
    they are until the generation is removed: link or copy them. `reports` gets a line for every
    newer generation that is damaged and passed over. MmfastError: there is no whole generation;
    says what is wrong with the newest.
    """
    folder = _as_path(folder)
    reasons: list[str] = []
    for _ in range(2):  # a process that saves meanwhile may remove what was listed
        for number in reversed(generations(folder)):
            try:
                tree = _read(_path(folder, number))
            except _OtherFormatError:
                raise
            except (MmfastError, OSError) as error:
                reasons.append(f"generation {number} is damaged ({_why(error)})")
                continue
            if reports is not None:
                reports.extend(f"{reason}; generation {number} is loaded" for reason in reasons)
            return tree
    detail = f": {reasons[0]}" if reasons else ""
    raise MmfastError(f"nothing to restore in {str(folder)!r}{detail}; name a saved session")


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)


def _read(path: Path) -> Any:
    with open(path / "manifest.json", "rb", opener=files.open_file) as manifest:
        data = manifest.read()
    if data[:9] != b"%08x\n" % zlib.crc32(data[9:]):
        raise MmfastError("manifest.json does not match its checksum")
    body = json.loads(data[9:])
    saved = body.get("format", 1)
    if saved != FORMAT:
        raise _OtherFormatError(
            f"{str(path.parent)!r} was saved in format {saved}, which this version of mmfast "
            f"cannot read; it reads format {FORMAT}: save the session anew"
        )
    for name in ("tree", "shards", "files"):
        if name not in body:
            raise MmfastError(f"manifest.json lacks {name!r}")
    tensors: list[Tensor] = []
    for name, check in body["shards"]:
        try:
            file = files.TreeFile(_inside(path, name))
            if file.check != check:
                raise files.TornFileError("is of another generation")
            tensors += file.read()
        except files.TornFileError as error:
            raise MmfastError(f"{name} {error}") from None
    linked = [_file(_inside(path, name), size) for name, size in body["files"]]
    return files.unflatten(body["tree"], tensors.__getitem__, linked)


def _inside(path: Path, name: str) -> Path:
    if name != Path(name).name:
        raise MmfastError(f"manifest.json names a file outside its generation: {name!r}")
    return path / name


def _file(path: Path, size: int) -> files.File:
    if path.stat().st_size != size:
        raise MmfastError(f"{path.name} has another size")
    return files.File(path)
