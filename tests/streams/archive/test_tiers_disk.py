"""Stored blocks on disk: whole or reported, whatever happens to the disk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_blocks import HEADS, LAYERS, WIDTH, archive, block, same

from mmfast.ops.quantisation import Quantiser
from mmfast.streams import snapshots
from mmfast.streams.archive import files, tiers
from mmfast.streams.archive.archive import Archive, Found
from mmfast.streams.archive.files import TornFileError, TreeFile, encode, write
from mmfast.streams.archive.tiers import parts_of, stored

FILE = sum(map(len, encode(parts_of(stored(block(0))))))


def _query() -> torch.Tensor:
    return torch.randn(2 * HEADS, 3, WIDTH, generator=torch.Generator().manual_seed(1))


def _filled(folder: Path, count: int = 6, **options: object) -> Archive:
    held = archive(host=0, folder=folder, **{"disk": "1GB", **options})
    for n in range(count):
        held.put(block(n))
    return held


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.block"))


def _read(held: Archive, number: int) -> bool:
    """Whether every layer of a block is there, bit for bit; never anything else."""
    parts = [held.read(layer, [Found(number, None)]) for layer in range(LAYERS)]
    whole = all(p and same(p[0], block(number), i) for i, p in enumerate(parts))
    assert whole or not parts[-1]
    return whole


@pytest.mark.parametrize("store", [None, Quantiser(8), Quantiser(2)])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_disk_gives_what_memory_gives(
    tmp_path: Path, store: Quantiser | None, cut: bool, dtype: torch.dtype
) -> None:
    on_disk = archive(host=0, disk="1GB", folder=tmp_path, store=store)
    in_memory = archive(store=store)
    for n in range(4):
        for held in (on_disk, in_memory):
            held.put(block(n, cut=cut, dtype=dtype))
    assert on_disk.stats()["blocks"]["disk"] == 4
    for layer in range(LAYERS):
        found = on_disk.choose(layer, _query())
        for a, b in zip(on_disk.read(layer, found), in_memory.read(layer, found), strict=True):
            assert torch.equal(a.keys[0], b.keys[0]) and a.keys[0].dtype == dtype
            assert torch.equal(a.values[0], b.values[0]) and torch.equal(a.relative, b.relative)


def test_a_layer_is_read_without_the_others(tmp_path: Path) -> None:
    held = _filled(tmp_path)
    held.read(1, [Found(0, None)])  # the table of contents is in memory now
    path = _files(tmp_path)[0]
    (place,) = TreeFile(path).skeleton["list"][2]["tuple"][0].values()  # keys of layer 0
    data = bytearray(path.read_bytes())
    data[TreeFile(path).rows[place][3]] ^= 1
    path.write_bytes(data)
    assert same(held.read(1, [Found(0, None)])[0], block(0), 1)
    assert held.read(0, [Found(0, None)]) == [] and held.stats()["corrupt"] == 1


def test_the_quota_is_kept_to_the_byte(tmp_path: Path) -> None:
    held = _filled(tmp_path, 30, disk=4 * FILE + FILE // 2)
    assert held.numbers() == list(range(26, 30)) and held.stats()["dropped"] == 26
    assert sum(f.stat().st_size for f in _files(tmp_path)) == held.stats()["bytes"]["disk"]
    assert held.stats()["bytes"]["disk"] <= 4 * FILE + FILE // 2
    assert all(_read(held, n) for n in held.numbers())


@settings(max_examples=150)
@given(st.data())
def test_any_damage_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """One flipped bit anywhere, a cut anywhere, bytes added: torn, or nothing has changed."""
    path = tmp_path_factory.getbasetemp() / "damaged.block"
    raw = bytearray(b"".join(encode(parts_of(stored(block(3))))))
    match data.draw(st.sampled_from(["flip", "cut", "grow", "zero"])):
        case "flip":
            bit = data.draw(st.integers(0, 8 * len(raw) - 1))
            raw[bit // 8] ^= 1 << bit % 8
        case "cut":
            del raw[data.draw(st.integers(0, len(raw) - 1)) :]
        case "grow":
            raw += b"\0" * data.draw(st.integers(1, 100))
        case "zero":  # a page that never reached the disk
            at = data.draw(st.integers(0, len(raw) - 64))
            raw[at : at + 64] = bytes(64) if any(raw[at : at + 64]) else b"\1" * 64
    path.write_bytes(raw)
    with pytest.raises(TornFileError):
        TreeFile(path).read()


def test_swapped_blocks_are_noticed(tmp_path: Path) -> None:
    held = _filled(tmp_path)
    a, b = _files(tmp_path)[:2]
    shutil.copyfile(b, a)
    assert not _read(held, 0) and _read(held, 1)
    assert "block 0 holds block 1; it is dropped" in held.reports.lines


def test_damaged_blocks_are_dropped_once_and_reported(tmp_path: Path) -> None:
    held = _filled(tmp_path)
    files = _files(tmp_path)
    files[1].write_bytes(files[1].read_bytes()[:-7])
    files[2].write_bytes(b"")
    files[3].unlink()
    assert [n for n in range(6) if _read(held, n)] == [0, 4, 5]
    assert held.numbers() == [0, 4, 5]
    assert all(f.number in (0, 4, 5) for f in held.choose(0, _query()))
    stats = held.stats()
    assert (stats["corrupt"], stats["lost"]) == (2, 1) and len(held.reports.lines) == 3
    assert stats["bytes"]["disk"] == 3 * FILE


def _failing(monkeypatch: pytest.MonkeyPatch, code: int, fails: Callable[[], bool]) -> None:
    """Let syncing a file fail like a real disk, after some bytes were written."""
    real = os.fsync

    def fsync(held: int) -> None:
        if fails():
            raise OSError(code, os.strerror(code))
        real(held)

    monkeypatch.setattr(tiers.os, "fsync", fsync)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    held = _filled(tmp_path)
    room = 5 * FILE  # what others leave us, from now on
    _failing(monkeypatch, code, lambda: len(_files(tmp_path)) * FILE + FILE > room)
    for n in range(6, 20):
        held.put(block(n))
        assert held.numbers()[-1] == n  # the newest found room, the oldest made it
        assert _read(held, n)
    assert 3 <= len(held) <= 5 and not list(tmp_path.glob("*/*.part"))
    assert [line[:9] for line in held.reports.lines] == ["disk full", "memory fu"]
    room = 0
    for n in range(20, 40):
        held.put(block(n))
    assert len(held) == 0 and len(held.reports.lines) <= 4
    room = 10 * FILE
    held.put(block(40))
    assert held.numbers() == [40] and _read(held, 40)  # space again: it goes on


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.EACCES])
def test_a_broken_disk_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    held = _filled(tmp_path)
    _failing(monkeypatch, code, lambda: True)
    for n in range(6, 20):
        held.put(block(n))
    assert held.numbers() == list(range(6)) and all(_read(held, n) for n in range(6))
    assert [line[:16] for line in held.reports.lines] == ["disk tier is off", "memory full: blo"]
    assert held.stats()["disk_errors"] == 1 and held.stats()["dropped"] == 14


def test_the_folder_vanishes(tmp_path: Path) -> None:
    held = _filled(tmp_path / "disk")
    shutil.rmtree(tmp_path / "disk")
    for n in range(6, 9):
        held.put(block(n))
    assert held.numbers() == [6, 7, 8] and all(_read(held, n) for n in (6, 7, 8))
    assert held.stats()["lost"] == 6 and len(held.reports.lines) == 1
    held.close()
    assert not _files(tmp_path / "disk")


def test_the_folder_vanishes_for_good(tmp_path: Path) -> None:
    held = _filled(tmp_path / "disk")
    shutil.rmtree(tmp_path / "disk")
    (tmp_path / "disk").write_text("a file stands here")
    for n in range(6, 9):
        held.put(block(n))
    assert held.numbers() == [] or not any(_read(held, n) for n in range(9))
    assert any("disk tier is off" in line for line in held.reports.lines)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    held = archive(host=4000, disk="1GB", folder=tmp_path / "file" / "below")
    for n in range(5):
        held.put(block(n))
    assert held.numbers() and held.stats()["blocks"]["disk"] == 0
    assert held.reports.lines[0].startswith("disk tier is off")


def test_two_archives_share_a_folder_and_clean_up(tmp_path: Path) -> None:
    one, two = _filled(tmp_path, 3), _filled(tmp_path, 4)
    assert all(_read(one, n) for n in range(3)) and all(_read(two, n) for n in range(4))
    one.close()
    assert len(_files(tmp_path)) == 4 and _read(two, 3)
    del two
    assert not list(tmp_path.glob("*/*"))


def test_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "from mmfast.streams.archive.tiers import BlockFolder\n"
        "folder = BlockFolder(Path(sys.argv[1])); folder.file(0).write_text('left')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), root], check=False)
    assert done.returncode == -signal.SIGKILL and len(_files(tmp_path)) == 1
    held = _filled(tmp_path, 2)
    assert len(_files(tmp_path)) == 2 and _read(held, 1)


@pytest.mark.parametrize("keep_archive", [False, True])
def test_saved_and_restored_bit_for_bit(tmp_path: Path, keep_archive: bool) -> None:
    """Also after the archive that was saved is gone, with its files."""
    options = {"device": 4000, "host": 3000, "disk": "1GB", "folder": tmp_path / "disk"}
    held = archive("resv", 0.3, **options)
    for n in range(20):
        held.put(block(n, tokens=9))
    held.forget(11)
    snapshots.save(tmp_path / "saved", held.snapshot())
    want = [[f.number for f in held.choose(layer, _query())] for layer in range(LAYERS)]
    stats = held.stats()
    if not keep_archive:
        held.close()
    again = archive("resv", 0.3, **options)
    again.restore(snapshots.load(tmp_path / "saved"))
    ours = again.stats()
    assert {k: v for k, v in ours.items() if k != "index_bytes"} == {
        k: v for k, v in stats.items() if k != "index_bytes"
    }
    for layer in range(LAYERS):
        found = again.choose(layer, _query())
        assert [f.number for f in found] == want[layer]
        for number in again.numbers():
            part = again.read(layer, [Found(number, None)])[0]
            assert same(part, block(number, tokens=9), layer)
    again.put(block(20, tokens=9))
    assert len(snapshots.load(tmp_path / "saved")["tiers"]["disk"]) == stats["blocks"]["disk"]


def test_restored_with_smaller_quotas(tmp_path: Path) -> None:
    held = _filled(tmp_path / "disk", 6)
    snapshots.save(tmp_path / "saved", held.snapshot())
    small = archive(host=0, disk=2 * FILE, folder=tmp_path / "disk")
    small.restore(snapshots.load(tmp_path / "saved"))
    assert small.numbers() == [4, 5] and _read(small, 4) and small.stats()["dropped"] == 4
    none = archive(host=0)
    none.restore(snapshots.load(tmp_path / "saved"))
    assert none.numbers() == [] and none.choose(0, _query()) == []


def test_a_saved_block_that_got_damaged_is_dropped(tmp_path: Path) -> None:
    held = _filled(tmp_path / "disk", 4)
    snapshots.save(tmp_path / "saved", held.snapshot())
    held.close()
    path = next((tmp_path / "saved").glob("gen-*/file-000002"))
    data = bytearray(path.read_bytes())
    data[-100] ^= 16
    path.write_bytes(data)
    again = archive(host=0, disk="1GB", folder=tmp_path / "disk")
    again.restore(snapshots.load(tmp_path / "saved"))
    assert [n for n in range(4) if _read(again, n)] == [0, 1, 3]
    assert again.stats()["corrupt"] == 1


def test_planted_fault_an_unchecked_section_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = _filled(tmp_path)
    monkeypatch.setattr(files.zlib, "crc32", lambda data, crc=0: 0)
    held2 = _filled(tmp_path)  # written and read without checksums
    path = held2._tiers.disk._folder.file(2)
    data = bytearray(path.read_bytes())
    data[-1200] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError):
        _read(held2, 2)
    held.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_block_is_either_absent_or_whole(tmp_path: Path) -> None:
    """Killed at every step of a write: no half a block under its name."""
    encoded = encode(parts_of(stored(block(0))))
    for step in ("write", "fsync", "replace"):
        child = os.fork()
        if not child:
            _die_at(step)
            write(tmp_path / f"{step}.block", encoded)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not list(tmp_path.glob("*.block"))


def _die_at(step: str) -> None:
    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if step == "write":
        Path.open = die  # type: ignore[method-assign,assignment]
    elif step == "fsync":
        os.fsync = die
    else:
        Path.replace = die  # type: ignore[method-assign,assignment]
