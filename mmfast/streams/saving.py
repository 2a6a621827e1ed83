"""Saved state as generations of a folder: a new one is whole before it counts.

`gen-00000007/` holds `manifest.json` (its first line a checksum of the rest), tensors in
safetensors shards, and files that belong to the state (links where the file system has them).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from mmfast.core.errors import MmfastError

if sys.platform != "win32":  # there folders are not locked, and none is taken for abandoned
    import fcntl


def lock(path: Path) -> int:
    """Create `path` and lock it until the returned descriptor is closed or the process ends.

    Raises:
        BlockingIOError: Another holds it.
        OSError: It cannot be made.
    """
    held = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        if sys.platform != "win32":
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held


def locked(path: Path) -> bool:
    """Whether somebody holds the lock at `path`, or may be about to take it."""
    if sys.platform == "win32":
        return True
    try:
        held = os.open(path, os.O_RDWR)
    except OSError:
        return True  # no lock file yet, or not ours to judge
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(held)
    return False


def sync_file(path: Path) -> None:
    """Make the contents of a file survive a power cut.

    Raises:
        OSError: The disk fails.
    """
    held = os.open(path, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def sync_folder(path: Path) -> None:
    """Make names in a folder survive a power cut, where the system can."""
    try:
        held = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(held)
    except OSError:
        pass  # some file systems refuse folders
    finally:
        os.close(held)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a finished file a second name, or copy it where that is not possible.

    Raises:
        OSError: The source is gone, or the disk is full.
    """
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
        sync_file(target)


_KINDS = "dict, list, tuple, tensors, numbers, strings, True, False, None and files"


@dataclass(frozen=True)
class File:
    """A finished file, synced to disk, that belongs to some state; saving links or copies it."""

    path: Path


@dataclass(frozen=True)
class Plain:
    """A tree without what is large.

    Attributes:
        skeleton: Fit for JSON; containers are one-entry dicts that name their kind.
        tensors: In the order in which the skeleton numbers them.
        files: Likewise.
    """

    skeleton: Any
    tensors: list[Tensor]
    files: list[File]


def to_plain(tree: Any) -> Plain:
    """Take a tree apart.

    Raises:
        MmfastError: It holds something else than what `from_plain` can give back; says where.
    """
    plain = Plain(None, [], [])
    return Plain(_skeleton(tree, plain, "tree"), plain.tensors, plain.files)


def _skeleton(node: Any, plain: Plain, where: str) -> Any:
    if node is None or type(node) in (bool, int, float, str):
        return node
    if isinstance(node, Tensor):
        plain.tensors.append(node)
        return {"tensor": len(plain.tensors) - 1}
    if isinstance(node, File):
        plain.files.append(node)
        return {"file": len(plain.files) - 1}
    if type(node) in (list, tuple):
        items = [_skeleton(v, plain, f"{where}[{i}]") for i, v in enumerate(node)]
        return {type(node).__name__: items}
    if type(node) is dict and all(type(key) in (str, int) for key in node):
        pairs = [[key, _skeleton(v, plain, f"{where}[{key!r}]")] for key, v in node.items()]
        return {"dict": pairs}
    raise MmfastError(
        f"cannot save {where}: a {type(node).__name__} is none of {_KINDS} (keys: str or int)"
    )


def from_plain(skeleton: Any, tensors: Sequence[Tensor], files: Sequence[File] = ()) -> Any:
    """Put a tree together again.

    Raises:
        MmfastError: The skeleton is not one that `to_plain` made, or lacks parts.
    """
    try:
        return _tree(skeleton, tensors, files)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise MmfastError(f"saved state is malformed: {error!r}; it was not written here") from None


def _tree(node: Any, tensors: Sequence[Tensor], files: Sequence[File]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "dict":
        return {key: _tree(v, tensors, files) for key, v in value}
    many: Callable[[Any], Any] = {"list": list, "tuple": tuple}.get(kind, list)
    if kind in ("list", "tuple"):
        return many(_tree(v, tensors, files) for v in value)
    return {"tensor": tensors, "file": files}[kind][value]


def compact(x: Tensor) -> Tensor:
    """The same numbers, dense, and in storage of their own: a view would keep its whole base."""
    x = x.detach()
    alone = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if alone and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


_SHARD = 256 << 20  # bytes of tensors per file: what is in memory twice while saving
_NAME = re.compile(r"gen-(\d{8,})")


def save(folder: str | Path, tree: Any, *, keep: int = 2) -> int:
    """Write a new generation of some state.

    Until it is whole and on disk, the one before it counts; whenever the process dies, what was
    saved before stays readable. Older generations are removed afterwards.

    Args:
        folder: Made if need be; one process saves into it at a time.
        tree: Nested dicts, lists and tuples of tensors, numbers, strings, None and `File`s.
        keep: Generations that stay; the second newest stands in if the newest gets damaged.

    Returns:
        The number of the generation.

    Raises:
        MmfastError: Disk full, no permission, another process is saving there, or the tree holds
            something else. Nothing that was saved before is harmed.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            return _save(folder, tree, keep)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise MmfastError(
            f"cannot save to {str(folder)!r}: {why}; what was saved before is untouched"
        ) from error


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
        held = lock(folder / "lock")
    except BlockingIOError:
        raise MmfastError(
            f"another process is saving to {str(folder)!r}; give each session its own folder"
        ) from None
    try:
        yield
    finally:
        os.close(held)


def _write(part: Path, tree: Any) -> None:
    plain = to_plain(tree)
    rows = [_write_shard(part, i, shard) for i, shard in enumerate(_shards(plain.tensors))]
    names = []
    for i, file in enumerate(plain.files):
        names.append(f"file-{i:06d}")
        link_or_copy(file.path, part / names[-1])
    sizes = [(part / name).stat().st_size for name in names]
    body = {"tree": plain.skeleton, "shards": rows, "files": [*zip(names, sizes, strict=True)]}
    text = json.dumps(body, separators=(",", ":")).encode()
    _write_file(part / "manifest.json", b"%08x\n" % zlib.crc32(text) + text)
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


def _write_shard(part: Path, number: int, tensors: list[Tensor]) -> dict[str, Any]:
    seen: set[int] = set()
    named = {}
    for i, tensor in enumerate(tensors):
        dense = compact(tensor.cpu())
        if dense.data_ptr() in seen:  # safetensors refuses tensors that share memory
            dense = dense.clone()
        seen.add(dense.data_ptr())
        named[f"{i:06d}"] = dense
    data = save_tensors(named)
    name = f"tensors-{number:05d}.safetensors"
    _write_file(part / name, data)
    return {"name": name, "bytes": len(data), "crc": zlib.crc32(data), "tensors": len(tensors)}


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def generations(folder: Path) -> list[int]:
    """Numbers of the generations in a folder, ascending."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("gen-*"))
    return sorted(int(match[1]) for match in matches if match)


def _path(folder: Path, number: int) -> Path:
    return folder / f"gen-{number:08d}"


def load(folder: str | Path, reports: list[str] | None = None) -> Any:
    """The newest generation that is whole.

    Tensors come back on the CPU; files are not read, only checked for their size, and stay where
    they are until the generation is removed: link or copy them.

    Args:
        folder: That `save` wrote to.
        reports: Gets a line for every newer generation that is damaged and passed over.

    Raises:
        MmfastError: There is no whole generation; says what is wrong with the newest.
    """
    folder = Path(folder)
    reasons: list[str] = []
    for _ in range(2):  # a process that saves meanwhile may remove what was listed
        for number in reversed(generations(folder)):
            try:
                tree = _read(_path(folder, number))
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
    data = (path / "manifest.json").read_bytes()
    if data[:9] != b"%08x\n" % zlib.crc32(data[9:]):
        raise MmfastError("manifest.json does not match its checksum")
    body = json.loads(data[9:])
    tensors: list[Tensor] = []
    for row in body["shards"]:
        tensors += _read_shard(_inside(path, row["name"]), row)
    files = [_file(_inside(path, name), size) for name, size in body["files"]]
    return from_plain(body["tree"], tensors, files)


def _inside(path: Path, name: str) -> Path:
    if name != Path(name).name:
        raise MmfastError(f"manifest.json names a file outside its generation: {name!r}")
    return path / name


def _read_shard(path: Path, row: dict[str, Any]) -> list[Tensor]:
    data = path.read_bytes()
    if len(data) != row["bytes"] or zlib.crc32(data) != row["crc"]:
        raise MmfastError(f"{path.name} does not match its checksum")
    named = load_tensors(data)
    return [named[f"{i:06d}"] for i in range(row["tensors"])]


def _file(path: Path, size: int) -> File:
    if path.stat().st_size != size:
        raise MmfastError(f"{path.name} has another size")
    return File(path)
