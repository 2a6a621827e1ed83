"""Files that a full disk or a killed process leaves whole or as they were."""

from __future__ import annotations

import errno
import importlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from mmfast.bench.results import append, kept_rows, load
from mmfast.core.errors import MediaError, MmfastError
from mmfast.core.files import whole_file
from mmfast.frontends.audio.wav import write_sound
from mmfast.models.kv.patterns import FILE, HeadPatterns
from mmfast.streams.archive import files

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FULL, SafetensorError("No space left on device (os error 28)")])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "found.bin"
    path.write_text("before")
    said = r"found\.bin' cannot be written: No space"
    with pytest.raises(MmfastError, match=said) as caught, whole_file(path) as draft:
        draft.write_text("half")
        raise error
    assert "\n" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["found.bin"]
    assert path.read_text() == "before"


@pytest.mark.parametrize("kind", ["archive", "batch"])
def test_stores_sync_a_file_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In both stores by the same function; a full disk leaves what was there, and no draft."""
    path, steps, sync = tmp_path / "found.bin", list[str](), os.fsync
    path.write_text("before")

    def write() -> None:
        if kind == "archive":
            files.write(path, [b"wh", b"ole"])
        else:
            table = pytest.importorskip("pyarrow").table({"path": ["a"]})
            store = importlib.import_module("mmfast.serve.batch.store")
            store.write(path, table, {})

    def synced(held: int) -> None:
        steps.append(f"synced {path.read_bytes()[:6]!r}")
        sync(held)

    def full(held: int) -> None:
        raise FULL

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises((OSError, MmfastError), match="No space left"):
        write()
    assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(os, "fsync", synced)
    write()
    assert steps[0] == "synced b'before'" and path.read_text(errors="replace") != "before"
    assert len(steps) == (1 if kind == "archive" else 2)  # the folder, once it has its place
    assert len(list(tmp_path.iterdir())) == 1


def test_a_link_and_a_device_stay_what_they_are(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "end")
    with whole_file(link) as draft:
        draft.write_text("whole")
    assert link.is_symlink() and (tmp_path / "end").read_text() == "whole"
    with whole_file(os.devnull) as draft:
        assert draft == Path(os.devnull)


def test_sound_and_patterns_are_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise FULL

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(MediaError, match="No space left"):
        write_sound(tmp_path / "a.wav", torch.zeros(100), 16000)
    with pytest.raises(MmfastError, match=f"{FILE}' cannot be written: No space left"):
        HeadPatterns({0: torch.ones(2)}, {0: torch.ones(2)}, {}).save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_rows_are_appended_behind_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for torn, kept in (("{", []), ('{"key": 7, "te', []), ('{"key": 7}', [{"key": 7}])):
        path.write_text('{"key": 1}\n' + torn)
        append(path, [{"key": 2}])
        assert load(path) == [{"key": 1}, *kept, {"key": 2}]


@pytest.mark.parametrize("torn", [b"{", b'{"suite": "data", "text": "\xc3'])  # half of a letter
def test_a_run_goes_on_behind_a_torn_row_without_writing_the_others_again(
    torn: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill amid a rewrite of all rows, or a full disk, would take them."""
    path = tmp_path / "rows.jsonl"
    row = {"suite": "data", "key": "1", "text": "é"}
    append(path, [row])
    whole = path.read_bytes()
    path.write_bytes(whole + torn)

    def killed(*_: object, **__: object) -> None:
        path.write_bytes(b"")
        raise FULL

    monkeypatch.setattr(Path, "write_text", killed)
    assert kept_rows(path, "data") == {"1": row} and path.read_bytes() == whole


def test_a_full_disk_leaves_no_half_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": 1}\n')
    row = {"key": 2, "text": "x" * 10_000}

    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    before, told = resource.getrlimit(resource.RLIMIT_FSIZE), signal.SIGXFSZ
    handler = signal.signal(told, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))
    try:
        with pytest.raises(MmfastError, match="cannot write rows"):
            append(path, [row])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(told, handler)
    assert path.read_text() == json.dumps({"key": 1}) + "\n"


def test_separators_inside_a_string_part_no_row(tmp_path: Path) -> None:
    """JSON allows them in strings; only a new line ends a row."""
    rows = [{"key": "a", "answer": "one\u2028two\u2029three\x85four\x0bfive"}, {"key": "b"}]
    append(tmp_path / "rows.jsonl", rows)
    assert load(tmp_path / "rows.jsonl") == rows
