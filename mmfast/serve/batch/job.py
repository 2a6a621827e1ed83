"""The job of a batch run: its media, questions, model and reducers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from mmfast.caches.plan import call_plan
from mmfast.core.errors import MmfastError
from mmfast.core.files import text_lines
from mmfast.core.spec import parse
from mmfast.decoding.speculation import plan_decode
from mmfast.frontends.sampling import Ask
from mmfast.frontends.source import quote
from mmfast.models.loading import located, pick_device, pick_dtype
from mmfast.models.prompt import check_question
from mmfast.planner.arithmetic import check_weights

_EDGE = 1 << 20  # bytes at the start and end of a weight file that identify it


@dataclass(frozen=True)
class BatchJob:
    """One job; jobs that differ in `identity()` never share a file of answers."""

    folder: Path
    questions: tuple[str, ...]
    model: str | None = None  # directory or hub id; None is the embedded model
    reduce: str | None = None
    cache: str | None = None
    decode: str | None = None  # draft and verify; part of the identity where answers change
    dtype: str = "auto"
    packed: str | None = None  # form of packed weights
    frames: int = 8  # frames sampled uniformly from a clip
    fps: float | None = None  # sample at this rate instead
    max_new_tokens: int = 64  # longest answer in tokens
    device: str | None = None  # device of the model; not part of the identity
    batch_size: int = 1  # questions answered in one forward pass; not part of the identity

    def check(self) -> None:
        """Refuse a job that can never run, before anything is read or started."""
        if not self.questions:
            raise MmfastError("no question: give --question TEXT or --questions FILE")
        for question in self.questions:
            check_question(question)
        if len(set(self.questions)) < len(self.questions):
            twice = next(q for q in self.questions if self.questions.count(q) > 1)
            raise MmfastError(f"question {quote(twice)} is given twice; drop one of them")
        parse(self.reduce)
        call_plan(self.cache)
        plan_decode(self.decode)
        pick_dtype(self.dtype)
        pick_device(self.device)
        check_weights(self.packed)
        Ask.parse(None if self.fps else self.frames, self.fps, None)
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise MmfastError(
                    f"{name}={getattr(self, name)}; give a whole number of at least 1"
                )

    def identity(self) -> dict[str, Any]:
        """Return everything that the answers depend on, as JSON."""
        known = asdict(self) | {"folder": str(self.folder), "questions": list(self.questions)}
        del known["device"], known["batch_size"]
        drafts = plan_decode(self.decode)
        if drafts is None or drafts.exact:
            del known["decode"]
        return known | {"weights": weights(self.model)}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Describe how two identities differ, for a message; "" where they do not."""
    parts = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        hidden = name == "weights"
        parts.append(
            "other weights" if hidden else f"{name} was {quote(before)}, is {quote(after)}"
        )
    return "; ".join(parts)


def weights(model: str | None) -> str:
    """Identify a checkpoint: a directory by its config and weight files, else by its name."""
    folder = Path(located(model))
    if not folder.is_dir():
        return str(model)
    digest = hashlib.sha256()
    for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        if file.is_file():
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as data:
                digest.update(data.read(_EDGE))
                data.seek(max(0, size - _EDGE))
                digest.update(data.read(_EDGE))
    return digest.hexdigest()


def read_questions(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Return the questions given one by one, then those of a file with one a line."""
    lines: list[str] = []
    if file is not None:
        try:
            lines = text_lines(file.read_text(encoding="utf-8-sig"))  # of Windows' editors
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
            raise MmfastError(
                f"questions {quote(file)} cannot be read ({reason}); give a file, a question a line"
            ) from None
    return tuple(check_question(q) for q in given) + tuple(line.strip() for line in lines)


_VIDEO = "3gp asf avi flv m2ts m4v mkv mov mp4 mpeg mpg mts ogv ts webm wmv y4m"
_IMAGE = "avif bmp gif jpeg jpg png tif tiff webp"
SUFFIXES = frozenset(f".{name}" for name in f"{_VIDEO} {_IMAGE}".split())


@dataclass(frozen=True)
class Medium:
    """One file to answer questions about."""

    file: str
    path: str  # name below the folder, as text that any reader of Parquet takes
    bytes: int
    mtime_ns: int


def find_media(folder: Path, pattern: str | None, limit: int | None, out: Path) -> list[Medium]:
    """Find all media below a folder, sorted by name; the file `out` and its database are left out.

    Hidden files and folders and links to folders are skipped. `pattern` is a glob for the end of
    the name, such as `*.mp4` or `day1/*`; None takes the suffixes of videos and images.
    """
    if not folder.is_dir():
        reason = "is not a directory" if folder.exists() else "does not exist"
        raise MmfastError(f"{quote(folder)} {reason}: give a folder of clips or images")
    if limit is not None and limit < 1:
        raise MmfastError(f"limit={limit}; give a whole number of at least 1")
    others, found = 0, []
    for file in _files(folder):
        name = file.relative_to(folder)
        if file == out or (file.parent == out.parent and file.name.startswith(f"{out.name}.parts")):
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
    except OSError:  # a dangling link becomes a row with an error
        size = written = 0
    # The name of a file is bytes; those that are not text are escaped.
    text = os.fsencode(name.as_posix()).decode("utf-8", "backslashreplace")
    return Medium(str(file), text, size, written)


def file_hash(file: str) -> str | None:
    """Return the SHA-256 of a file's content; None where it cannot be read."""
    try:
        with Path(file).open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()
    except OSError:
        return None
