"""What is answered already, on disk, such that a kill at any moment loses or doubles no row.

One process alone writes (a lock sees to that): finished rows gather for two seconds at most, then
become a shard beside the result, which is there in full or not at all. A row counts as answered
once its shard has its name. The result is put together from the shards at the end and replaces an
older one in one step; shards go after that. Where a kill leaves both, the rows are the same ones
under the same path and question, and the newest of them counts.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from mmfast.core.errors import MmfastError
from mmfast.frontends.source import first_line, quote
from mmfast.serve.batch.job import Medium, differences, file_hash

Row = dict[str, Any]
Key = tuple[str, str]  # path, question

_MARK = b"mmfast.batch"  # metadata that says whose answers a file holds
SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("content_hash", pa.string()),  # SHA-256
        ("kind", pa.string()),  # image or video
        ("question", pa.string()),
        ("answer", pa.string()),
        ("visual_tokens", pa.int32()),
        ("kept_tokens", pa.int32()),
        ("ttft_ms", pa.float64()),
        ("ms", pa.float64()),
        ("error", pa.string()),
        ("model", pa.string()),
        ("reduce", pa.string()),
        ("cache", pa.string()),
        ("frames", pa.int32()),
        ("fps", pa.float64()),
        ("bytes", pa.int64()),
        ("mtime_ns", pa.int64()),
    ]
)


class DamagedError(Exception):
    """A file that holds no rows of ours; its text says why."""


def table_of(rows: Sequence[Row]) -> Any:
    """Rows as an Arrow table."""
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


def write(file: Path, table: Any, identity: Mapping[str, Any]) -> None:
    """Write a file that is there in full or not at all, also after a power cut.

    Raises:
        MmfastError: The place cannot be written.
    """
    half = file.with_name(f".{file.name}.half")
    marked = table.replace_schema_metadata({_MARK: json.dumps(identity)})
    try:
        with half.open("wb") as data:
            pq.write_table(marked, data)
            data.flush()
            os.fsync(data.fileno())
        half.replace(file)
        sync_folder(file.parent)
    except OSError as error:
        raise MmfastError(
            f"{quote(file)} cannot be written ({first_line(error)}); what was answered before is "
            "kept: make room or rights, and run again"
        ) from None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(file: Path) -> tuple[Any, dict[str, Any]]:
    """The rows of a file, and the identity of the job whose answers they are.

    Raises:
        DamagedError: It is cut, overwritten, or none of ours.
    """
    try:
        table = pq.read_table(file, partitioning=None)
        identity = json.loads((table.schema.metadata or {})[_MARK])
    except KeyError:
        raise DamagedError("it was not written by mmfast batch") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamagedError(first_line(error)) from None
    if not table.schema.equals(SCHEMA) or not isinstance(identity, dict):
        raise DamagedError("its columns are those of another version")
    return table, identity


def keys(table: Any) -> list[Key]:
    """(path, question) of each row."""
    columns = (table.column(name).to_pylist() for name in ("path", "question"))
    return list(zip(*columns, strict=True))


def newest(tables: Sequence[Any], questions: Sequence[str]) -> Any:
    """One row per path and question, of the last table that has it, by path and question.

    Args:
        tables: Oldest first; at least one.
        questions: In the order in which the rows of a path come.
    """
    table = pa.concat_tables([t.replace_schema_metadata(None) for t in tables])
    last = {key: i for i, key in enumerate(keys(table))}
    place = {question: i for i, question in enumerate(questions)}
    order = sorted(last, key=lambda key: (key[0], place.get(key[1], len(place))))
    return table.take([last[key] for key in order]).combine_chunks()


def lock(file: Path) -> int:
    """Hold a file for this process alone; the system lets go of it when the process dies.

    Its folder is made where there is none.

    Returns:
        A handle; closing it lets go.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: It cannot be made.
    """
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:  # a system without such locks: two runs at once are the user's to avoid
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(file, os.O_CREAT | os.O_RDWR)
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o644)
        except FileNotFoundError:
            continue  # another run has just removed the folder
        try:
            flock(handle, LOCK_EX | LOCK_NB)
            if file.exists() and file.stat().st_ino == os.fstat(handle).st_ino:
                return handle  # and not one that another run has just removed
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


ROWS, SECONDS = 256, 2.0  # what waits for its shard at most
SHARDS = 128  # then they become one


class StoredRow(NamedTuple):
    """What is remembered of a row."""

    bytes: int
    mtime_ns: int
    content_hash: str | None
    failed: bool

    @staticmethod
    def of(row: Row) -> StoredRow:
        """Of one row."""
        facts = (row["bytes"], row["mtime_ns"], row["content_hash"])
        return StoredRow(*facts, row["error"] is not None)


class RowStore:
    """The rows of one job.

    Args:
        out: The result.
        identity: Of the job.
        resume: Go on from what is there; False begins anew.
        warn: Told in one line of each shard that cannot be read.

    Raises:
        MmfastError: Another run writes there, the place cannot be written, or it holds the
            answers of another job or something else altogether.
    """

    def __init__(
        self,
        out: Path,
        identity: Mapping[str, Any],
        resume: bool = True,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.out, self.parts = out, out.with_name(out.name + ".parts")
        self._identity, self._warn = identity, warn
        self._rows: list[Row] = []
        self._since = time.monotonic()
        self._check_target(resume)
        self._lock = self._locked()
        try:
            self.done = self._begin(resume)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RowStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Let another run have it."""
        try:
            if [p.name for p in self.parts.iterdir()] == ["_lock"]:  # else there are shards
                shutil.rmtree(self.parts)  # while nobody else can have it
        except OSError:
            pass
        finally:
            os.close(self._lock)

    def lacks(self, medium: Medium, question: str, again: bool = False) -> bool:
        """Whether there is no answer yet about this content.

        Args:
            medium: The file; one that was written anew since is answered anew.
            question: What is asked.
            again: An answer that is an error is none.
        """
        seen = self.done.get((medium.path, question))
        if seen is None or (again and seen.failed):
            return True
        if (seen.bytes, seen.mtime_ns) == (medium.bytes, medium.mtime_ns):
            return False
        return seen.content_hash != file_hash(medium.file)

    def add(self, rows: Sequence[Row]) -> None:
        """Take finished rows; call it with none now and then, too."""
        if rows and not self._rows:
            self._since = time.monotonic()
        self._rows += rows
        if len(self._rows) >= ROWS or time.monotonic() - self._since >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Make what was taken last."""
        if not self._rows:
            return
        shards = self._shards()
        number = 1 + max((_number(shard) for shard in shards), default=0)
        write(self._shard(number), table_of(self._rows), self._identity)
        self.done |= {(row["path"], row["question"]): StoredRow.of(row) for row in self._rows}
        self._rows = []
        if len(shards) >= SHARDS:
            self._fold([*shards, self._shard(number)])

    def finish(self) -> None:
        """Put the result together; the shards go."""
        self.flush()
        shards = self._shards()
        if not shards:
            return
        tables = [self._mine(self.out)] if self.out.exists() else []
        tables += [self._own(shard) for shard in shards]
        write(self.out, newest(tables, self._identity["questions"]), self._identity)
        for shard in shards:
            shard.unlink()

    def _fold(self, shards: Sequence[Path]) -> None:
        table = newest([self._own(shard) for shard in shards], self._identity["questions"])
        write(shards[-1], table, self._identity)  # older ones only repeat it from here on
        for shard in shards[:-1]:
            shard.unlink()

    def _shard(self, number: int) -> Path:
        return self.parts / f"part-{number:08d}.parquet"

    def _shards(self) -> list[Path]:
        return sorted(self.parts.glob("part-*.parquet"))

    def _check_target(self, resume: bool) -> None:
        """Before anything is made or removed: is this place ours?"""
        if self.out.is_dir():
            raise MmfastError(f"{quote(self.out)} is a directory; give --out a file name")
        if self.out.exists():
            self._mine(self.out, resume)

    def _locked(self) -> int:
        try:
            return lock(self.parts / "_lock")
        except BlockingIOError:
            raise MmfastError(
                f"another run writes {quote(self.out)} now; wait for it, or give another --out"
            ) from None
        except OSError as error:
            raise MmfastError(
                f"{quote(self.out)} cannot be written ({first_line(error)}); give another --out"
            ) from None

    def _begin(self, resume: bool) -> dict[Key, StoredRow]:
        for half in (*self.parts.glob(".*.half"), self.out.with_name(f".{self.out.name}.half")):
            half.unlink(missing_ok=True)
        if not resume:
            for shard in self._shards():
                shard.unlink()
            self.out.unlink(missing_ok=True)
            sync_folder(self.parts)
        tables = [self._mine(self.out)] if self.out.exists() else []
        tables += [t for shard in self._shards() if (t := self._whole(shard)) is not None]
        if not tables:
            return {}
        rows = newest(tables, self._identity["questions"]).to_pylist()
        return {(row["path"], row["question"]): StoredRow.of(row) for row in rows}

    def _whole(self, shard: Path) -> Any | None:
        try:
            return self._same(*read(shard), self.parts)
        except DamagedError as reason:
            shard.rename(shard.with_suffix(".damaged"))
            self._warn(f"{shard.name} cannot be read ({reason}): what it held is answered again")
            return None

    def _own(self, shard: Path) -> Any:
        try:
            return read(shard)[0]
        except DamagedError as reason:  # written or read well before in this very run
            raise MmfastError(f"{quote(shard)} broke meanwhile ({reason}); run again") from None

    def _mine(self, file: Path, resume: bool = True) -> Any:
        try:
            table, identity = read(file)
        except DamagedError as reason:
            raise MmfastError(
                f"{quote(file)} is there and holds no answers ({reason}); give another --out, or "
                "remove it"
            ) from None
        return self._same(table, identity, file) if resume else table

    def _same(self, table: Any, identity: Mapping[str, Any], file: Path) -> Any:
        other = differences(identity, self._identity)
        if other:
            raise MmfastError(
                f"{quote(file)} holds the answers of another job ({other}); give another --out, "
                "or --no-resume to begin anew"
            )
        return table


def _number(shard: Path) -> int:
    digits = shard.stem.removeprefix("part-")
    return int(digits) if digits.isdigit() else 0
