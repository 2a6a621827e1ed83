"""Rows of results: one JSON line per measurement, with the environment that repeats it."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.files import json_lines
from mmfast.core.source import code_of
from mmfast.core.spec import parse
from mmfast.models.loading import device_name, located

Row = dict[str, Any]
PROTOCOL = 1  # part of every key: rows of another protocol are asked for again
# What `eval_rows` puts beside the figures of a row.
SHARED = ("suite", "n", "seed", "model", "device", "dtype", "threads", "method", "knobs", "score")
ENVIRONMENT = ("versions", "commit", "date", "processor")
_WEIGHTS = ("*.json", "*.safetensors", "*/*.json", "*/*.safetensors")  # of a checkpoint
_LONGEST = 1 << 20  # bytes in which the end of the last line is looked for


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Return versions, commit, date and kind of processor; no name or path of this machine."""
    package = importlib.import_module("mmfast")  # which offers parts of this one by name
    versions = {"mmfast": package.__version__, "python": platform.python_version()}
    versions |= {n: importlib.metadata.version(n) for n in ("torch", "transformers", "numpy")}
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    processor = device_name(device or torch.device("cpu"))
    return {"versions": versions, "commit": _commit(), "date": today, "processor": processor}


def _commit() -> str | None:
    """Short hash of the checkout, with a `+` where it has changes; None when installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*args: str) -> str:
        run = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)
        return run.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "mmfast", "kernels")
    return (git("rev-parse", "--short", "HEAD") + ("+" if changed else "")) or None


def append(path: str | Path, rows: Iterable[Row]) -> None:
    """Append rows to a .jsonl file, folders made as needed."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        texts = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
        _append_whole(target, "".join(f"{text}\n" for text in texts))
    except OSError as error:
        raise MmfastError(
            f"cannot write rows to {str(path)!r}: {error.strerror}; name a file in a folder that "
            "can be written"
        ) from None


def _append_whole(target: Path, text: str) -> None:
    """Append lines, all or none of them, in place of what a killed run has left of one."""
    with target.open("ab", buffering=0) as file:
        size, torn = _end(target) if file.seekable() else (0, b"")
        if torn[:2] in (b"{", b'{"'):
            try:
                json.loads(torn)
            except ValueError:
                size -= len(torn)
                file.truncate(size)
                torn = b""
        data = memoryview((b"\n" if torn and text else b"") + text.encode())
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            if file.seekable():
                file.truncate(size)
            raise


def _end(path: Path) -> tuple[int, bytes]:
    """Return the size of a file, and what stands behind its last line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LONGEST))
        return size, file.read().rpartition(b"\n")[2]


def load(path: str | Path) -> list[Row]:
    """Return the rows of a .jsonl file, in order."""
    try:
        rows = json_lines(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MmfastError(f"cannot read rows from {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise MmfastError(f"cannot read rows from {str(path)!r}: {error}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise MmfastError(f"a line of {str(path)!r} is no JSON object; every row is one")
    return rows


def kept_rows(path: Path | None, suite: str) -> dict[str, Row]:
    """Rows of an earlier run by `key`; the torn last line of a run that was killed is cut off.

    Rows of `suite` begin with its name, by which a torn one is told from a line of other hands.
    """
    if path is None or not path.is_file():
        return {}
    head = json.dumps({"suite": suite}).removesuffix("}").encode()
    data = path.read_bytes()
    whole, _, last = data.rpartition(b"\n")
    if last and head.startswith(last[: len(head)]):
        os.truncate(path, len(data) - len(last))  # the rows before stay where they are
    try:
        rows = json_lines(whole.decode())
    except ValueError as error:
        raise MmfastError(
            f"cannot go on from {str(path)!r}: a line is no JSON ({error}); name another file"
        ) from None
    return {row["key"]: row for row in rows if isinstance(row, dict) and "key" in row}


def code_of_specs(
    reduce: str | None = None, cache: str | None = None, prefill: str | None = None
) -> list[Any]:
    """Digests of the code of all methods that specs name, and states of files in knobs."""
    specs = {"reducer": reduce, "cache": cache, "prefill": prefill}
    stages = [stage for kind, spec in specs.items() for stage in parse(spec, kind)]
    given = [value for stage in stages for value in stage.knobs.values() if isinstance(value, str)]
    return [*(code_of(stage.method) for stage in stages), *map(state_of, map(Path, given))]


def state_of(path: Path) -> list[Any]:
    """Size and time of change of a file, or of the files of a checkpoint."""
    files = [path]
    if path.is_dir():
        files = sorted(p for kind in _WEIGHTS for p in path.glob(kind))
    return [(each.stat().st_size, each.stat().st_mtime_ns) for each in files if each.exists()]


class KeptResults:
    """Rows of an evaluation that an earlier run has left in `out`, which need not be asked again.

    A row is known by all that it depends on: what was `asked`, the checkpoints of `models`, the
    specs of its way and the code of their methods. `shared` are keys that rows have in files alone.
    """

    def __init__(
        self,
        out: Path | None,
        asked: Row,
        models: Sequence[str | Path],
        shared: Sequence[str] = SHARED,
        resume: bool = True,
    ) -> None:
        places = [Path(located(model)) for model in models]
        states = [[str(place.resolve()), state_of(place)] for place in places]
        self._rows = kept_rows(out, asked["suite"]) if resume else {}
        self._known_by, self._prefill = [PROTOCOL, asked, states], asked.get("prefill")
        self._shared = {"key", "of", *ENVIRONMENT, *shared}
        self.used = 0  # rows that were found

    def key(self, reduce: str | None = None, cache: str | None = None, place: int = 0) -> str:
        """Digest of all that a row depends on; `place` is that in a document of several rows."""
        code = code_of_specs(reduce, cache, self._prefill)
        text = json.dumps([*self._known_by, reduce, cache, place, code])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def find(
        self, reduce: str | None = None, cache: str | None = None, place: int = 0
    ) -> Row | None:
        """Return a row as it was when it was new, or None."""
        row = self._rows.get(self.key(reduce, cache, place))
        self.used += row is not None
        return row and {key: value for key, value in row.items() if key not in self._shared}

    def new(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows of ways that the file lacks, with their keys."""
        ways = [(row, row["reduce"], row.get("cache", row.get("memory"))) for row in rows]
        keyed = [{"suite": row["suite"], "key": self.key(*way), **row} for row, *way in ways]
        return [row for row in keyed if row["key"] not in self._rows]

    def document(self) -> Row | None:
        """Return a document that is measured in one piece, None where it was not yet."""
        first = self._rows.get(self.key())
        found = [self.find(place=place) for place in range(first["of"] if first else 0)]
        if first is None or None in found:
            return None
        return {key: first[key] for key in ("suite", "n", "seed", "model")} | {"rows": found}

    def new_document(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of a document that is measured in one piece, with their keys."""
        keys = [{"key": self.key(place=place), "of": len(rows)} for place in range(len(rows))]
        return [{"suite": row["suite"], **key, **row} for row, key in zip(rows, keys, strict=True)]


def bench_rows(document: Row) -> list[Row]:
    """Return the rows of a document of `run_bench`."""
    keys = ("preset", "device", "dtype", "threads", "frames", "warm_ups", "clock", "ceilings")
    shared = {"suite": "bench", **{key: document[key] for key in keys if key in document}}
    shared |= {**document["environment"], "n": document["iters"]}
    return [{**shared, **_method(row["reduce"]), "score": None, **row} for row in document["rows"]]


def eval_rows(document: Row, environ: Row | None = None) -> list[Row]:
    """Return the rows of a document of `mmfast eval`; the score is the accuracy."""
    model = str(document["model"])
    shared = {key: document[key] for key in ("suite", "n", "seed")}
    shared["model"] = Path(model).name if Path(model).is_dir() else model  # no paths in rows
    shared |= {key: document[key] for key in ("device", "dtype", "threads") if key in document}
    shared |= environ or document.get("environment") or environment()
    rows = [{"score": row["accuracy"], **row} for row in document["rows"]]
    return [{**shared, **_method(row["reduce"]), **row} for row in rows]


def _method(reduce: str | None) -> Row:
    """Return method names and knobs of a spec; one that no longer parses keeps its text."""
    try:
        stages = parse(reduce)
    except SpecError:
        return {"method": reduce, "knobs": {}}
    knobs = {s.method.name: dict(s.knobs) for s in stages if s.knobs}
    return {"method": "+".join(s.method.name for s in stages) or None, "knobs": knobs}


def share(reduce: str | None, kept: float, total: float) -> float | None:
    """Return the kept share of a spec: the budget of a single stage, else the counted share."""
    try:
        stages: Sequence[Any] = parse(reduce)
    except SpecError:
        return None
    if not stages:
        return 1.0
    if len(stages) == 1 and isinstance(stages[0].budget, float):
        return stages[0].budget
    return kept / total if total else None
