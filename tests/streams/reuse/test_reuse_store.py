"""The store of media: quotas, tiers, damage, foreign files, keys, specs."""

from __future__ import annotations

import io
import os
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build, generate, tiny

from mmfast.core.errors import MmfastError, SpecError
from mmfast.streams.archive import files
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.plan import ReusePlan, check_beside, parse_reuse
from mmfast.streams.reuse.store import ReuseStore, digest, key_of, store_of


def _tree(seed: int, n: int = 1000) -> dict[str, Any]:
    return {"x": torch.randn(n, generator=torch.Generator().manual_seed(seed)), "name": f"{seed}"}


def _filled(store: ReuseStore, count: int = 8) -> list[str]:
    keys = [key_of("value", str(i)) for i in range(count)]
    for i, key in enumerate(keys):
        store.put(key, _tree(i))
    store.flush()
    return keys


def _same(found: Any, seed: int) -> bool:
    return found is not None and bool(torch.equal(found["x"], _tree(seed)["x"]))


def test_quotas_hold_at_every_step_and_the_oldest_leave(tmp_path: Path) -> None:
    store = ReuseStore(device=10_000, host=10_000, disk=20_000, folder=tmp_path)
    for i in range(12):
        store.put(key_of(str(i)), _tree(i))
        store.flush()
        size = store.stats()["bytes"]
        assert size["device"] <= 10_000 and size["host"] <= 10_000 and size["disk"] <= 20_000
    values = store.stats()["values"]
    assert values["device"] == 2 and values["host"] == 2 and 2 <= values["disk"] <= 4
    assert _same(store.get(key_of("11")), 11) and store.get(key_of("0")) is None


def test_what_is_used_stays() -> None:
    store = ReuseStore(host=14_000)
    first = key_of("first")
    store.put(first, _tree(0))
    for i in range(1, 6):
        assert _same(store.get(first), 0)
        store.put(key_of(str(i)), _tree(i))
    assert _same(store.get(first), 0) and store.get(key_of("1")) is None


def test_values_without_tensors_are_bounded_too() -> None:
    store = ReuseStore(host=10_000)
    for i in range(100):
        store.put(key_of(str(i)), f"{i}")
    assert store.stats()["values"]["host"] <= 20


def test_another_process_finds_what_one_wrote(tmp_path: Path) -> None:
    keys = _filled(ReuseStore(folder=tmp_path))
    other = ReuseStore(folder=tmp_path)
    assert all(_same(other.get(key), i) for i, key in enumerate(keys))
    assert other.hits == len(keys)


def test_two_writers_of_one_value_leave_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes the same value while this one is half through."""
    store, key, sync = ReuseStore(folder=tmp_path), key_of("value"), os.fsync
    monkeypatch.setattr(os, "getpid", lambda: 2)

    def meanwhile(held: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "getpid", lambda: 3)
        other = ReuseStore(folder=tmp_path)
        other.put(key, _tree(0))
        other.flush()
        assert _same(ReuseStore(folder=tmp_path).get(key), 0)
        sync(held)

    monkeypatch.setattr(os, "fsync", meanwhile)
    store.put(key, _tree(0))
    store.flush()  # a warning is an error
    assert _same(ReuseStore(folder=tmp_path).get(key), 0)
    assert [path.suffix for path in tmp_path.iterdir()] == [".media"]


@pytest.mark.parametrize("host", [0, "1GB"])
def test_a_value_is_found_before_it_is_on_disk(tmp_path: Path, host: Any) -> None:
    """And one that replaces a file is found in its place."""
    store, key = ReuseStore(host=host, folder=tmp_path), key_of("value")
    for seed in (0, 1):
        store.put(key, _tree(seed), anew=True)
        assert _same(store.get(key), seed) and store.sizes(key) is None
        store.flush()
        assert _same(store.get(key), seed)
    assert _same(ReuseStore(folder=tmp_path).get(key), 1)


def test_a_value_is_found_while_it_is_written_and_the_newest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, key, write = ReuseStore(host=0, folder=tmp_path), key_of("value"), files.write
    began, go = threading.Event(), threading.Event()

    def slow(path: Path, buffers: Any) -> None:
        if not began.is_set():
            began.set()
            assert go.wait(30)
        write(path, buffers)

    monkeypatch.setattr(files, "write", slow)
    store.put(key, _tree(0))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.flush)
        assert began.wait(30) and _same(store.get(key), 0)
        store.put(key, _tree(1), anew=True)
        second = pool.submit(store.flush)
        assert _same(store.get(key), 1)
        wait([second], timeout=0.5)  # it may not go ahead of the first
        go.set()
        first.result(), second.result()
    assert _same(store.get(key), 1) and _same(ReuseStore(folder=tmp_path).get(key), 1)
    store.flush()
    assert store.stats()["values"] == {"device": 0, "host": 0, "disk": 1}


def test_what_a_killed_process_left_counts_and_makes_room(tmp_path: Path) -> None:
    left = tmp_path / "0123.77-1.part"
    left.write_bytes(b"x" * 9000)
    os.utime(left, (1, 1))
    store = ReuseStore(host=0, disk=14_000, folder=tmp_path)
    store.put(key_of("0"), _tree(0))
    store.flush()
    assert left.exists() and store.stats()["values"]["disk"] == 1
    assert store.stats()["bytes"]["disk"] == sum(f.stat().st_size for f in tmp_path.iterdir())
    store.put(key_of("1"), _tree(1))
    store.flush()
    assert not left.exists() and store.stats()["values"]["disk"] == 2


def test_a_folder_that_can_only_be_read_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key, *_) = _filled(ReuseStore(folder=tmp_path))

    def refuse(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    store = ReuseStore(folder=tmp_path)
    assert _same(store.get(key), 0) and store.stats()["corrupt"] == 0


def test_a_read_may_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system gives 2 GiB at most at a time, and may give less."""
    (key, *_) = _filled(ReuseStore(folder=tmp_path))

    class Slow(io.FileIO):
        def readinto(self, room: Any) -> int:
            return super().readinto(memoryview(room)[:1000]) or 0

    def opened(path: Path, *args: Any, **more: Any) -> Any:
        slow = more.get("buffering") == 0
        return Slow(path) if slow else io.open(path, *args, **more)  # noqa: UP020

    monkeypatch.setattr(files, "open", opened, raising=False)
    assert _same(ReuseStore(folder=tmp_path).get(key), 0)


def test_a_file_that_another_process_drops_has_no_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, key = ReuseStore(folder=tmp_path, bits=(3, 8)), key_of("value")
    monkeypatch.setattr(Path, "exists", lambda _: True)  # a moment ago
    assert store.sizes(key) == {}


@pytest.mark.parametrize("fault", ["flip", "cut", "empty", "foreign", "pipe"])
def test_damage_is_found_and_warned_of_once(tmp_path: Path, fault: str) -> None:
    keys = _filled(ReuseStore(folder=tmp_path))
    store = ReuseStore(folder=tmp_path)
    for key, other in ((keys[0], keys[1]), (keys[2], keys[3])):
        path = tmp_path / f"{key}.media"
        data = bytearray(path.read_bytes())
        if fault == "flip":
            data[-9] ^= 4
        if fault == "cut":
            data = data[:-100]
        path.write_bytes(b"" if fault == "empty" else data)
        if fault == "foreign":
            shutil.copy(tmp_path / f"{other}.media", path)
        if fault == "pipe":
            path.unlink()
            os.mkfifo(path)
    with pytest.warns(UserWarning, match="computed anew") as seen:
        assert store.get(keys[0]) is None and store.get(keys[2]) is None
    assert len(seen) == 1 and store.stats()["corrupt"] == 2
    assert _same(store.get(keys[1]), 1)  # all others are whole
    store.put(keys[0], _tree(0))
    store.flush()
    assert _same(ReuseStore(folder=tmp_path).get(keys[0]), 0)  # written anew


def test_a_disk_that_fails_is_warned_of_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    store = ReuseStore(folder=tmp_path)
    monkeypatch.setattr("mmfast.streams.archive.files.write", fail)
    with pytest.warns(UserWarning, match="No space left") as seen:
        keys = _filled(store)
    assert len(seen) == 1 and _same(store.get(keys[0]), 0)


def test_wrong_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MmfastError, match="needs a folder"):
        ReuseStore(disk="1GB")
    with pytest.raises(MmfastError, match="store is an int"):
        store_of(3)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(MmfastError, match="cannot make the folder"):
        ReuseStore(folder=file)


def test_keys_know_borders_types_and_shapes() -> None:
    assert key_of("ab", "c") != key_of("a", "bc")
    x = torch.arange(6)
    assert digest(x) == digest(x.clone()) != digest(x.view(2, 3))
    assert digest(x) != digest(x.int()) and digest(x[:0]) != digest(x[:0].float())


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("blend:1.5", "share from 0 to 1"),
        ("blend:x", "share from 0 to 1"),
        ("prefix:0.2", "recomputes nothing"),
        ("prefx", "prefix"),
        ("", "unknown reuse ''; choices: blend, craft, encoder, kvcomm, prefix"),
        (3, "choices"),
    ],
)
def test_wrong_specs_are_refused(spec: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_reuse(spec)


def test_specs() -> None:
    assert parse_reuse(None) is None
    assert str(parse_reuse("blend")) == "blend:0.15" and str(parse_reuse("prefix")) == "prefix"
    for reduce in ("fastv@llm2:0.5", "evs:0.5+fastv@llm2:0.5"):
        check_beside(parse_reuse("encoder"), reduce)
        with pytest.raises(SpecError, match="use reuse='encoder'"):
            check_beside(parse_reuse("prefix"), reduce)
    with pytest.raises(SpecError, match="cache policy"):
        check_beside(parse_reuse("blend"), None, object())


def _asked(this: Any, store: ReuseStore, plan: str = "prefix") -> tuple[Any, int]:
    """The answer about a picture, and the values that were found for it."""
    before = store.hits
    reuse = MediaReuse(this.model, this.processor, parse_reuse(plan) or ReusePlan("prefix"), store)
    inputs = this.inputs(["on {image} what?"], images=this.images(1))
    found = generate(this, reuse.prompt(reuse.encoded(inputs)), 4).sequences[0, -4:].tolist()
    store.flush()
    return found, store.hits - before


def test_another_model_reads_nothing() -> None:
    store = ReuseStore()
    one, other = tiny("llava_onevision"), build("llava_onevision", seed=1)
    first, _ = _asked(one, store)
    assert _asked(one, store) == (first, 3)  # features, the text before the picture, the picture
    assert _asked(other, store)[1] == 0
    assert _asked(one, store) == (first, 3)
    with torch.no_grad():
        weight = other.model.get_decoder().layers[1].mlp.down_proj.weight
        before = _asked(other, store)
        weight += 1.0  # in place: the store of the old weights is not read
        assert before[1] == 3 and _asked(other, store)[1] == 0


def test_reductions_do_not_share_values() -> None:
    this, store = tiny("llava_onevision"), ReuseStore()
    reuse = MediaReuse(this.model, this.processor, ReusePlan("prefix"), store)
    assert reuse.fingerprint("evs:0.5") != reuse.fingerprint("evs:0.25") != reuse.fingerprint()


def test_damaged_media_are_read_anew(tmp_path: Path) -> None:
    this = tiny("qwen3_vl")
    first, _ = _asked(this, ReuseStore(folder=tmp_path))
    assert _asked(this, ReuseStore(folder=tmp_path)) == (first, 3)
    for path in tmp_path.glob("*.media"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert _asked(this, ReuseStore(folder=tmp_path)) == (first, 0)
    assert len([each for each in seen if "computed anew" in str(each.message)]) == 1
