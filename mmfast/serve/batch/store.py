"""The answers of a run: SQLite while it lasts, one Parquet file in the end.

A kill at any moment loses or doubles no row. One process alone writes, for it holds the lock of
the database; finished rows gather for two seconds at most and are committed together. At the end
the Parquet file is written beside its place and replaces an older one in one step, then the rows
of the database go. A kill between the two leaves the same rows in both, where those of the
database count.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from mmfast.core.errors import MmfastError
from mmfast.core.files import sync_folder, synced_file
from mmfast.frontends.source import first_line, quote
from mmfast.serve.batch.job import Medium, differences, file_hash

Row = dict[str, Any]
Key = tuple[str, str]  # path, question
ROWS, SECONDS = 256, 2.0  # most rows, and longest time, before a commit
_MARK = b"mmfast.batch"  # metadata of the Parquet file with the identity of its job
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
_CREATE = f"""
    CREATE TABLE IF NOT EXISTS job (identity TEXT);
    CREATE TABLE IF NOT EXISTS answers ({", ".join(SCHEMA.names)}, PRIMARY KEY (path, question))
    WITHOUT ROWID
"""
_INSERT = f"INSERT OR REPLACE INTO answers VALUES ({', '.join('?' * len(SCHEMA.names))})"


class DamagedError(Exception):
    """A file that holds no rows of a run; the text names the reason."""


def table_of(rows: Sequence[Row]) -> Any:
    """Return rows as an Arrow table."""
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


def write(file: Path, table: Any, identity: Mapping[str, Any]) -> None:
    """Write a file that exists as a whole or not at all, also after a power cut."""
    half = file.with_name(f".{file.name}.half")
    marked = table.replace_schema_metadata({_MARK: json.dumps(identity)})
    try:
        with synced_file(file, half) as data:
            pq.write_table(marked, data)
        sync_folder(file.parent)
    except OSError as error:
        raise MmfastError(
            f"{quote(file)} cannot be written ({first_line(error)}); what was answered before is "
            "kept: make room or rights, and run again"
        ) from None


def read(file: Path) -> tuple[Any, dict[str, Any]]:
    """Return the rows of a file, and the identity of the job that they answer.

    DamagedError: it is cut, overwritten, or of another program.
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


class StoredRow(NamedTuple):
    """The part of a row that decides whether a file is answered again."""

    bytes: int
    mtime_ns: int
    content_hash: str | None
    error: str | None

    @staticmethod
    def of(row: Row) -> StoredRow:
        """Return that part of a row."""
        return StoredRow(*(row[name] for name in StoredRow._fields))


class RowStore:
    """The rows of one job; `done` holds the rows so far by path and question.

    The database lies beside `out` as `<out>.parts`. A second run in the same place, or the answers
    of another job, raise `MmfastError`; an unreadable database is reported to `warn`.
    """

    def __init__(
        self,
        out: Path,
        identity: Mapping[str, Any],
        resume: bool = True,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.out, self.state = out, out.with_name(out.name + ".parts")
        self._identity, self._warn = identity, warn
        self._rows: list[Row] = []
        self._since = time.monotonic()
        if self.out.is_dir():
            raise MmfastError(f"{quote(self.out)} is a directory; give --out a file name")
        if self.out.exists():  # before anything is made or removed
            self._finished_rows(resume)
        self._db = self._open()
        try:
            known = self._begin(resume)
        except BaseException:
            self.close()
            raise
        self.done = {key: StoredRow.of(row) for key, row in known.items()}

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
        """Release the lock; a database without rows is removed."""
        with suppress(sqlite3.Error, OSError):
            if not self._saved_rows():
                self.state.unlink()  # under the lock, so no other run can have it
        self._db.close()

    def lacks(self, medium: Medium, question: str, again: bool = False) -> bool:
        """Return True if there is no answer yet about this content.

        A file that was changed since is answered again; with `again`, so is an answer that is an
        error.
        """
        seen = self.done.get((medium.path, question))
        if seen is None or (again and seen.error):
            return True
        if (seen.bytes, seen.mtime_ns) == (medium.bytes, medium.mtime_ns):
            return False
        return seen.content_hash != file_hash(medium.file)

    def add(self, rows: Sequence[Row]) -> None:
        """Take finished rows; a call without rows commits waiting ones in time."""
        if rows and not self._rows:
            self._since = time.monotonic()
        self._rows += rows
        if len(self._rows) >= ROWS or time.monotonic() - self._since >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Commit the rows taken so far."""
        if not self._rows:
            return
        try:
            self._db.execute("BEGIN")
            for row in self._rows:
                self._db.execute(_INSERT, [row[name] for name in SCHEMA.names])
            self._db.execute("COMMIT")
        except (sqlite3.Error, UnicodeError) as error:
            if self._db.in_transaction:  # the next flush begins its own
                self._db.execute("ROLLBACK")
            raise MmfastError(
                f"{quote(self.state)} cannot be written ({first_line(error)}); what was answered "
                "before is kept: make room or rights, and run again"
            ) from None
        self.done |= {(row["path"], row["question"]): StoredRow.of(row) for row in self._rows}
        self._rows = []

    def finish(self) -> None:
        """Write the result from all rows; the rows of the database go."""
        self.flush()
        saved = self._saved_rows()
        if not saved:
            return
        rows = (self._finished_rows() if self.out.exists() else {}) | saved
        place = {question: i for i, question in enumerate(self._identity["questions"])}
        order = sorted(rows, key=lambda key: (key[0], place.get(key[1], len(place))))
        write(self.out, table_of([rows[key] for key in order]), self._identity)
        self._db.execute("DELETE FROM answers")

    def _open(self) -> sqlite3.Connection:
        """Open and lock the database; a damaged one is put aside."""
        try:
            self.state.parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self.state, timeout=0, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise self._refused(error) from None
        try:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")  # the system frees it with the process
            db.execute("BEGIN EXCLUSIVE")
            for statement in _CREATE.split(";"):
                db.execute(statement)
            db.execute("COMMIT")
            db.execute("SELECT sum(length(answer)) FROM answers").fetchall()  # reads every page
        except BaseException as error:
            db.close()
            if isinstance(error, sqlite3.OperationalError):
                raise self._refused(error) from None
            if not isinstance(error, sqlite3.DatabaseError):
                raise
            self.state.replace(self.state.with_name(f"{self.state.name}.damaged"))
            reason = first_line(error)
            self._warn(f"{self.state.name} cannot be read ({reason}): its answers are given again")
            return self._open()
        return db

    def _refused(self, error: Exception) -> MmfastError:
        code = getattr(error, "sqlite_errorcode", None)
        # A database that was moved is one that another run has just finished and removed.
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_READONLY_DBMOVED):
            text = "another run writes {} now; wait for it, or give another --out"
            return MmfastError(text.format(quote(self.out)))
        return MmfastError(
            f"{quote(self.out)} cannot be written ({first_line(error)}); give another --out"
        )

    def _begin(self, resume: bool) -> dict[Key, Row]:
        self.out.with_name(f".{self.out.name}.half").unlink(missing_ok=True)
        if not resume:
            self._db.execute("DELETE FROM answers")
            self._db.execute("DELETE FROM job")
            self.out.unlink(missing_ok=True)
        saved = self._saved_rows()
        for (identity,) in self._db.execute("SELECT identity FROM job").fetchall():
            if saved:
                self._check_same(json.loads(identity), self.state)
            else:
                self._db.execute("DELETE FROM job")
        if not saved:
            self._db.execute("INSERT INTO job VALUES (?)", (json.dumps(self._identity),))
        return (self._finished_rows() if self.out.exists() else {}) | saved

    def _saved_rows(self) -> dict[Key, Row]:
        rows = self._db.execute("SELECT * FROM answers").fetchall()
        named = (dict(zip(SCHEMA.names, row, strict=True)) for row in rows)
        return {(row["path"], row["question"]): row for row in named}

    def _finished_rows(self, resume: bool = True) -> dict[Key, Row]:
        try:
            table, identity = read(self.out)
        except DamagedError as reason:
            raise MmfastError(
                f"{quote(self.out)} is there and holds no answers ({reason}); give another --out, "
                "or remove it"
            ) from None
        if resume:
            self._check_same(identity, self.out)
        return {(row["path"], row["question"]): row for row in table.to_pylist()}

    def _check_same(self, identity: Mapping[str, Any], file: Path) -> None:
        other = differences(identity, self._identity)
        if other:
            raise MmfastError(
                f"{quote(file)} holds the answers of another job ({other}); give another --out, "
                "or --no-resume to begin anew"
            )
