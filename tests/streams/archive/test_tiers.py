"""Stored blocks in memory: quotas, order, search, reading, bounded cost."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_blocks import HEADS, LAYERS, ONE, WIDTH, archive, block, same

from mmfast.core.errors import MmfastError
from mmfast.core.kv import Clusters, KVBlock
from mmfast.core.registry import get
from mmfast.core.sizes import parse_bytes
from mmfast.ops.quantisation import Quantiser
from mmfast.streams.archive.archive import Archive, Found, Rows
from mmfast.streams.archive.tiers import TierQuotas


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2 * 10**9),
        ("500 mb", 500 * 10**6),
        ("1.5GiB", 3 << 29),
        ("1kB", 1000),
        ("7", 7),
        (4096, 4096),
        (0, 0),
        ("0.5KiB", 512),
        (None, None),
    ],
)
def test_sizes(text: str | int | None, size: int | None) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "2 potatoes", "1e9", "nan", True, -3, "1,5GB"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(MmfastError, match="is no size; write bytes"):
        parse_bytes(text)


def test_a_disk_quota_needs_a_folder() -> None:
    with pytest.raises(MmfastError, match="needs a folder"):
        TierQuotas.of(disk="1GB")


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_goes_in_comes_out(cut: bool, dtype: torch.dtype) -> None:
    held = archive()
    blocks = [block(n, cut=cut, dtype=dtype) for n in range(4)]
    for each in blocks:
        held.put(each)
    for layer in range(LAYERS):
        parts = held.read(layer, [Found(n, None) for n in (3, 0)])
        assert [p.number for p in parts] == [3, 0]
        assert all(same(p, blocks[p.number], layer) for p in parts)


def test_the_oldest_goes_whatever_was_read() -> None:
    held = archive(host=3 * ONE)
    for n in range(6):
        held.put(block(n))
        held.read(0, [Found(0, None)])
    assert held.numbers() == [3, 4, 5]
    assert held.stats()["dropped"] == 3 and held.stats()["bytes"]["host"] == 3 * ONE
    assert held.read(0, [Found(1, None), Found(4, None)])[0].number == 4
    assert list(held.reports.lines) == ["memory full: block 0 dropped, as all that follow"]


def test_blocks_move_from_tier_to_tier(tmp_path: Path) -> None:
    held = archive(device=2 * ONE, host=2 * ONE, disk="1GB", folder=tmp_path)
    blocks = [block(n) for n in range(7)]
    for each in blocks:
        held.put(each)
    assert held.stats()["blocks"] == {"device": 2, "host": 2, "disk": 3}
    for layer in range(LAYERS):
        assert all(
            same(p, blocks[p.number], layer) for p in held.read(layer, held.choose(layer, _query()))
        )
        assert len(held.read(layer, [Found(n, None) for n in range(7)])) == 7
    assert held.nbytes() == sum(held.stats()["bytes"].values()) + held.stats()["index_bytes"]


def _query() -> torch.Tensor:
    return torch.randn(2 * HEADS, 3, WIDTH, generator=torch.Generator().manual_seed(1))


def test_no_room_at_all() -> None:
    held = archive(host=0)
    held.put(block(0))
    assert held.numbers() == [] and held.choose(0, _query()) == [] and held.stats()["dropped"] == 1


def test_a_block_larger_than_a_tier_goes_past_it(tmp_path: Path) -> None:
    held = archive(device=ONE // 2, host=ONE - 1, disk="1GB", folder=tmp_path)
    held.put(block(0))
    assert held.stats()["blocks"] == {"device": 0, "host": 0, "disk": 1}


def test_the_archive_keeps_no_view_of_large_buffers() -> None:
    base = torch.randn(HEADS, 1000, WIDTH)
    small = block(0)
    parts = tuple(base[:, i : i + 5] for i in range(LAYERS))
    held = archive()
    held.put(KVBlock(parts, parts, small.relative, small.advance))
    part = held.read(1, [Found(0, None)])[0]
    assert torch.equal(part.keys[0], base[:, 1:6])
    base.zero_()
    assert part.keys[0].any() and part.keys[0].untyped_storage().nbytes() == part.keys[0].nbytes


@pytest.mark.parametrize("name", ["rekv", "resv"])
def test_choices_are_those_of_a_fresh_index(name: str) -> None:
    """After thousands of drops the index holds what one made of the living blocks would."""
    budget = 3 if name == "rekv" else 0.4
    held = archive(name, budget, host=40 * ONE)
    for n in range(300):
        held.put(block(n, tokens=2 + n % 7))
        if n % 5 == 0:
            held.forget(n - 7)
        if n % 50 == 49:
            fresh = archive(name, budget)
            for number in held.numbers():
                fresh.put(block(number, tokens=2 + number % 7))
            for layer in range(LAYERS):
                ours, theirs = held.choose(layer, _query()), fresh.choose(layer, _query())
                assert [f.number for f in ours] == [f.number for f in theirs]
                for a, b in zip(held.read(layer, ours), fresh.read(layer, theirs), strict=True):
                    assert torch.equal(a.keys[0], b.keys[0]) and torch.equal(a.relative, b.relative)


def test_tokens_of_clusters_are_read_with_their_places() -> None:
    held = archive("resv", 0.2)
    blocks = {n: block(n, tokens=9, cut=True) for n in range(8)}
    for each in blocks.values():
        held.put(each)
    found = held.choose(1, _query())
    assert any(f.tokens is not None for f in found)
    assert [f.number for f in found] == sorted(f.number for f in found)
    for f, part in zip(found, held.read(1, found), strict=True):
        tokens = torch.arange(8) if f.tokens is None else f.tokens
        original = blocks[f.number]
        assert torch.equal(part.keys[0], original.keys[1][:, tokens])
        assert torch.equal(part.values[0], original.values[1][:, tokens])
        assert torch.equal(part.relative, original.positions(1)[:, tokens])


def test_a_layer_that_holds_nothing_of_a_block() -> None:
    held = archive()
    held.put(block(0, tokens=2, cut=True))  # the last layer holds none
    assert held.choose(2, _query()) == []
    assert [f.number for f in held.choose(1, _query())] == [0]
    assert held.read(2, [Found(0, None)])[0].keys[0].shape == (HEADS, 0, WIDTH)


def test_fewer_bits_below_the_device() -> None:
    held = archive(device=ONE, store=Quantiser(8))
    for n in range(3):
        held.put(block(n))
    stats = held.stats()
    assert stats["blocks"] == {"device": 1, "host": 2, "disk": 0}
    assert stats["bytes"]["host"] < 2 * ONE
    new, old = held.read(0, [Found(2, None), Found(0, None)])
    assert torch.equal(new.keys[0], block(2).keys[0])
    assert not torch.equal(old.keys[0], block(0).keys[0])
    assert torch.allclose(old.keys[0], block(0).keys[0], atol=0.02)


def test_numbers_must_rise() -> None:
    held = archive()
    held.put(block(4))
    for wrong in (4, 2):
        with pytest.raises(MmfastError, match="put blocks in order"):
            held.put(block(wrong))
    held.put(block(9))
    assert held.numbers() == [4, 9]


def test_forget() -> None:
    held = archive()
    for n in range(4):
        held.put(block(n))
    for n in (1, 1, 99):
        held.forget(n)
    assert held.numbers() == [0, 2, 3] and len(held) == 3
    assert [f.number for f in held.choose(0, _query())] == [0, 2, 3]


def test_closed() -> None:
    held = archive()
    held.put(block(0))
    held.close()
    held.close()
    assert held.nbytes() == held.stats()["index_bytes"] and held.numbers() == []


@settings(max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 12)), max_size=60))
def test_rows_are_those_of_a_list(steps: list[tuple[int, bool, int]]) -> None:
    """Any series of appends and drops leaves what the obvious list of rows would."""
    rows, want = Rows(), list[tuple[int, int]]()
    for number, (count, drop, back) in enumerate(steps):
        value = torch.arange(count) + 100 * number
        rows.append(number, value=value)
        want += [(number, v) for v in value.tolist()]
        if drop:
            rows.drop(number - back)
            want = [row for row in want if row[0] != number - back]
        assert len(rows) == len(want)
    if steps:
        owner, columns = rows.view()
        assert list(zip(owner.tolist(), columns["value"].tolist(), strict=True)) == want


def test_main_memory_holds_so_many_blocks_however_small_they_are(tmp_path: Path) -> None:
    few = archive(blocks=3)
    both = archive(blocks=3, disk="1MB", folder=tmp_path)
    for number in range(8):
        few.put(block(number))
        both.put(block(number))
    assert few.numbers() == [5, 6, 7] and few.stats()["dropped"] == 5
    assert both.numbers() == list(range(8))
    assert both.stats()["blocks"] == {"device": 0, "host": 3, "disk": 5}
    for wrong in (0, -1, 1.5, True, "3"):
        with pytest.raises(MmfastError, match="number of blocks"):
            TierQuotas.of(blocks=wrong)


class _Cheap:
    """A retriever that makes the cost of the archive itself show."""

    def represent(self, keys: torch.Tensor) -> Clusters:
        return Clusters(keys[:, :1].transpose(0, 1).float(), ONES, ONES)

    def choose(self, query: torch.Tensor, index: Clusters) -> torch.Tensor:
        return index.owner > index.owner.max() - 2


ONES = torch.ones(1, dtype=torch.long)


def test_twenty_thousand_blocks_in_bounded_memory() -> None:
    held = Archive(_Cheap(), LAYERS, tiers=TierQuotas(host=20 * ONE))
    fields = vars(block(0))
    sizes = []
    for n in range(20_000):
        held.put(KVBlock(**{**fields, "number": n}))
        if n in (2_000, 19_999):
            gc.collect()
            sizes.append((len(gc.get_objects()), held.nbytes(), len(pickle.dumps(held))))
    (objects, *before), (objects_after, *after) = sizes
    assert objects_after < objects + 200
    assert after[0] == before[0] and after[1] < before[1] + 2_000
    assert len(held.reports.lines) == 1 and held.stats()["dropped"] == 20_000 - 20
    assert [f.number for f in held.choose(0, _query())] == [19_998, 19_999]


def test_retrieve_is_registered() -> None:
    assert {get(n, "cache").role for n in ("rekv", "resv", "retrieve")} == {"retrieve"}


def test_holes_in_the_heap_are_given_back_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("mmfast.streams.archive.tiers.give_back", lambda: calls.append(1))
    held = archive(blocks=3)
    for number in range(3 + 2 * 64):
        held.put(block(number))
    assert len(calls) == 2
