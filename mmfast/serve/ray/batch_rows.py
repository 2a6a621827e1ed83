"""Rows of answers, and the Parquet files that hold them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mmfast.core.errors import MmfastError
from mmfast.frontends.guard import first_line, quote

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
