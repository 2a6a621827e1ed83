"""Saved state: what goes in comes out, damage is noticed, and the one before stands in."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mmfast.core.errors import MmfastError
from mmfast.streams import snapshots
from mmfast.streams.archive.files import File
from mmfast.streams.snapshots import generations, load, save

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def equal(a: Any, b: Any) -> bool:
    """Same types all the way down, and the same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(-1), b.view(-1))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b or (a != a and b != b)


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.builds(
        lambda shape, dtype: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
        st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES),
    )
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(TREES)
def test_what_goes_in_comes_out(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    with patch.object(snapshots.os, "fsync"):  # seconds of waiting for the disk
        save(folder, tree)
    assert equal(load(folder), tree)
    assert len(generations(folder)) <= 2


def test_views_shared_memory_and_gradients(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    tree = [base, base.T, base[1], base[::2], base.view(-1)[:0], torch.nn.Parameter(base)]
    save(tmp_path, tree)
    back = load(tmp_path)
    assert all(torch.equal(a, b) and not b.requires_grad for a, b in zip(tree, back, strict=True))
    back[0].zero_()
    assert torch.equal(back[2], base[1])


def test_a_view_does_not_save_its_base(tmp_path: Path) -> None:
    save(tmp_path, torch.zeros(1_000_000)[:5])
    assert sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()) < 2_000


def test_large_state_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_SHARD", 1_000)
    tree = [torch.full((n,), n) for n in range(0, 300, 7)]
    save(tmp_path, tree)
    assert equal(load(tmp_path), tree)
    assert len(list(tmp_path.glob("gen-*/*.safetensors"))) > 20


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"a": [1, {2}]}, r"tree\['a'\]\[1\]: a set"),
        ({"f": len}, r"tree\['f'\]: a builtin"),
        ({(1, 2): 3}, "tree: a dict"),
        ({True: 3}, "tree: a dict"),
        (b"bytes", "tree: a bytes"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, tree: Any, where: str) -> None:
    save(tmp_path, "before")
    with pytest.raises(MmfastError, match=f"^cannot save {where}") as caught:
        save(tmp_path, tree)
    assert "\n" not in str(caught.value)
    assert load(tmp_path) == "before" and not list(tmp_path.glob(".part-*"))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_old_generations_go(tmp_path: Path, keep: int) -> None:
    for n in range(6):
        assert save(tmp_path, n, keep=keep) == n + 1
        assert load(tmp_path) == n
    assert generations(tmp_path) == list(range(7 - keep, 7))
    assert {p.name[:4] for p in tmp_path.iterdir()} == {"gen-", "lock"}


def test_nothing_to_load(tmp_path: Path) -> None:
    (tmp_path / "gen-notanumber").mkdir()
    for folder in (tmp_path / "absent", tmp_path):
        with pytest.raises(MmfastError, match=r"nothing to restore in .*name a saved session"):
            load(folder)


def _damages(data: bytes) -> list[bytes]:
    middle = len(data) // 2
    flipped = [
        data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] for at in (0, 5, middle, len(data) - 1)
    ]
    return [b"", data[:-1], data[:middle], data + b"x", bytes(len(data)), *flipped]


def test_every_damage_to_every_file(tmp_path: Path) -> None:
    """The generation before stands in and it is reported; without one it is one clear line."""
    kept = tmp_path / "kept.bin"
    kept.write_bytes(b"of the disk tier")
    clean = tmp_path / "clean"
    for n in range(2):
        save(clean, {"n": n, "t": torch.full((50,), n), "file": File(kept)})
    files = sorted((clean / "gen-00000002").iterdir())
    assert [f.name for f in files] == ["file-000000", "manifest.json", "tensors-00000.safetensors"]
    for file in files[1:]:
        for data in _damages(file.read_bytes()):
            _check_damage(tmp_path, clean, file.name, data)
        _check_damage(tmp_path, clean, file.name, None)
    for data in (b"", b"of the disk tie", None):  # contents are checked where they are read
        _check_damage(tmp_path, clean, "file-000000", data)


def _check_damage(tmp_path: Path, clean: Path, name: str, data: bytes | None) -> None:
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(clean, folder)
    target = folder / "gen-00000002" / name
    target.unlink()
    if data is not None:
        target.write_bytes(data)
    reports: list[str] = []
    tree = load(folder, reports)
    assert tree["n"] == 0 and torch.equal(tree["t"], torch.full((50,), 0))
    (line,) = reports
    assert line.startswith("generation 2 is damaged (") and line.endswith("generation 1 is loaded")
    shutil.rmtree(folder / "gen-00000001")
    with pytest.raises(MmfastError, match=r"nothing to restore.*generation 2 is damaged") as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert save(folder, "anew") == 3 and load(folder) == "anew"


def test_files_are_linked_and_outlive_their_source(tmp_path: Path) -> None:
    source = tmp_path / "block"
    source.write_bytes(b"contents")
    save(tmp_path / "s", {"file": File(source)})
    saved = load(tmp_path / "s")["file"].path
    assert saved.stat().st_ino == source.stat().st_ino
    source.unlink()
    save(tmp_path / "s", load(tmp_path / "s"))  # a restored state can be saved again
    assert load(tmp_path / "s")["file"].path.read_bytes() == b"contents"


def test_files_are_copied_where_links_are_not_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", no_link)
    (tmp_path / "block").write_bytes(b"contents")
    save(tmp_path / "s", File(tmp_path / "block"))
    saved = load(tmp_path / "s").path
    assert saved.read_bytes() == b"contents" and saved.stat().st_nlink == 1


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    save(tmp_path / "s", "before")
    with pytest.raises(MmfastError, match=r"cannot save to .*what was saved before is untouched"):
        save(tmp_path / "s", File(tmp_path / "absent"))
    assert load(tmp_path / "s") == "before"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_disk_full_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(snapshots, "_SHARD", 100)
    save(tmp_path, "before")
    real, left = os.fsync, [0]

    def fsync(held: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, os.strerror(code))
        real(held)

    monkeypatch.setattr(snapshots.os, "fsync", fsync)
    for step in range(4):
        left[0] = step
        with pytest.raises(MmfastError, match=r"cannot save to .*untouched") as caught:
            save(tmp_path, [torch.zeros(20) for _ in range(3)])
        assert os.strerror(code) in str(caught.value) and "\n" not in str(caught.value)
        assert load(tmp_path) == "before" and not list(tmp_path.glob(".part-*"))
    left[0] = 99
    assert save(tmp_path, "after") == 2 and load(tmp_path) == "after"


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(MmfastError, match="cannot save to"):
        save(tmp_path / "file", 1)
    with pytest.raises(MmfastError, match=r"nothing to restore"):
        load(tmp_path / "file")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with snapshots._alone(tmp_path):
        with pytest.raises(MmfastError, match="another process is saving"):
            save(tmp_path, 2)
        assert load(tmp_path) == 1
    assert save(tmp_path, 3) == 2


def test_no_pickle_no_paths_outside(tmp_path: Path) -> None:
    """Names in a manifest are not trusted to stay inside their generation."""
    save(tmp_path / "s", {"file": File(Path(__file__))})
    manifest = tmp_path / "s" / "gen-00000001" / "manifest.json"
    text = manifest.read_bytes()[9:].replace(b"file-000000", b"../../../../etc/passwd")
    manifest.write_bytes(b"%08x\n" % snapshots.zlib.crc32(text) + text)
    with pytest.raises(MmfastError, match="outside"):
        load(tmp_path / "s")


def test_another_format_is_refused_with_one_line(tmp_path: Path) -> None:
    """Sessions of the first format, whose manifest names none."""
    save(tmp_path, {"n": 1})
    manifest = tmp_path / "gen-00000001" / "manifest.json"
    text = manifest.read_bytes()[9:].replace(b'"format":4,', b"")
    manifest.write_bytes(b"%08x\n" % snapshots.zlib.crc32(text) + text)
    with pytest.raises(MmfastError, match=r"saved in format 1, .* reads format 4") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_shards_of_another_generation_are_damage(tmp_path: Path) -> None:
    for n in range(2):
        save(tmp_path, torch.full((5,), n))
    name = "tensors-00000.safetensors"
    shutil.copy(tmp_path / "gen-00000001" / name, tmp_path / "gen-00000002" / name)
    reports: list[str] = []
    assert torch.equal(load(tmp_path, reports), torch.zeros(5, dtype=torch.int64))
    assert "another generation" in reports[0]


def test_tensors_are_plain_safetensors(tmp_path: Path) -> None:
    """Any tool opens them."""
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    save(tmp_path, {"x": x})
    with safe_open(tmp_path / "gen-00000001" / "tensors-00000.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("000000"), x)


@pytest.mark.parametrize("name", ["tree", "shards", "files"])
def test_a_manifest_that_lacks_a_part_is_damage(tmp_path: Path, name: str) -> None:
    for n in range(2):
        save(tmp_path, n)
    manifest = tmp_path / "gen-00000002" / "manifest.json"
    body = json.loads(manifest.read_bytes()[9:])
    text = json.dumps({key: each for key, each in body.items() if key != name}).encode()
    manifest.write_bytes(b"%08x\n" % snapshots.zlib.crc32(text) + text)
    reports: list[str] = []
    assert load(tmp_path, reports) == 0
    assert reports == [
        f"generation 2 is damaged (manifest.json lacks {name!r}); generation 1 is loaded"
    ]


def test_one_entry_of_a_wide_tensor_is_saved(tmp_path: Path) -> None:
    """It is dense, and yet its stride is that of the whole."""
    row, rows = torch.arange(9).view(1, 9)[:, 1], torch.arange(9).as_strided((9, 1), (1, 9))
    assert row.is_contiguous() and rows.is_contiguous()
    assert row.stride() == (9,) and rows.stride() == (1, 9)
    snapshots.save(tmp_path, {"row": row, "rows": rows})
    found = snapshots.load(tmp_path)
    assert torch.equal(found["row"], row) and torch.equal(found["rows"], rows)
