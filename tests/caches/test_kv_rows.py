"""Rows of a KV cache in packs, and states of streams: many at once is one after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmfast.core.kv import KVBlock
from mmfast.models.kv.packs import PackedRow, packs_of, split_packs
from mmfast.ops.quantisation import PackedTensor, Quantiser, dequantise, dequantise_row
from mmfast.ops.stream_cache import merge, stack, take


def same(a: PackedTensor, b: PackedTensor) -> bool:
    tensors = all(getattr(a, f).equal(getattr(b, f)) for f in ("codes", "low", "step"))
    return tensors and (a.n, a.bits, a.along_tokens) == (b.n, b.bits, b.along_tokens)


@pytest.mark.parametrize("n", [1, 7, 8, 16, 40, 43])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_packs_made_at_once_are_those_made_alone(n: int, bits: int) -> None:
    keys, values = torch.randn(2, 3, n + 5, 12)[:, :, :n]
    quantiser = Quantiser(bits, 5)
    packs = packs_of(keys, values, lambda x, k: quantiser.pack(x, keys=k), 8)
    assert sum(pack.keys[0].shape[1] for pack in packs) == n
    for pack, k, v in zip(packs, keys.split(8, 1), values.split(8, 1), strict=True):
        assert pack.keys[0].shape == pack.values[0].shape == k.shape
        assert same(pack.keys[0], quantiser.pack(k, keys=True))
        assert same(pack.values[0], quantiser.pack(v))
        assert pack.keys[0].codes.untyped_storage().nbytes() == pack.keys[0].codes.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_its_packs_and_what_came_since(dtype: torch.dtype) -> None:
    keys, values = torch.randn(2, 3, 43, 12).to(dtype)
    quantiser = Quantiser(4, 8)
    packs = packs_of(keys[:, :35], values[:, :35], lambda x, k: quantiser.pack(x, keys=k), 8)
    row = PackedRow(tuple(packs))
    expected = [
        torch.cat([*(dequantise(getattr(p, name)[0]) for p in packs), x[:, 35:]], 1)
        for name, x in (("keys", keys), ("values", values))
    ]
    found = row.read(keys[:, 35:], values[:, 35:])
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    kept = torch.stack([torch.randperm(43)[:20].sort().values for _ in range(3)])
    short = row.keep(kept, 8).read(keys[:, 35:], values[:, 35:])
    for a, b in zip(short, expected, strict=True):
        assert a.equal(torch.stack([b[h, kept[h]] for h in range(3)]))


@pytest.mark.parametrize("bits", [(4, 2), (16, 8), (8, 4), (16, 2)])
def test_two_precisions(bits: tuple[int, int]) -> None:
    """Every entry at its own place, those that matter nearer to what they were."""
    keys, values = torch.randn(2, 3, 90, 16)
    chosen = torch.randperm(90)[:20].sort().values
    packers = [lambda x, k, b=b: x if b == 16 else Quantiser(b).pack(x, keys=k) for b in bits]
    packs, order = split_packs(keys[:, :70], values[:, :70], chosen[chosen < 70], tuple(packers))
    row = PackedRow().add(packs, order, 90)
    found = row.read(keys[:, 70:], values[:, 70:])
    assert row.nbytes < keys[:, :70].nbytes + values[:, :70].nbytes
    high = torch.zeros(70, dtype=torch.bool).index_fill(0, chosen[chosen < 70], True)
    for back, x, whose in zip(found, (keys, values), (True, False), strict=True):
        assert back[:, 70:].equal(x[:, 70:])
        error = (back - x).abs().amax(-1)[:, :70]
        assert error[:, high].mean() < 0.5 * error[:, ~high].mean()
        for width, mine in zip(bits, (high, ~high), strict=True):
            rows = x[:, :70][:, mine]
            alone = rows if width == 16 else dequantise(Quantiser(width).pack(rows, keys=whose))
            assert back[:, :70][:, mine].equal(alone)
    # What is packed or evicted later stands behind it, or goes.
    more = row.add(packs_of(keys[:, 70:80], values[:, 70:80], packers[1], None), None, 20)
    again = more.read(keys[:, 80:], values[:, 80:])[0]
    assert again[:, :70].equal(found[0][:, :70]) and again[:, 80:].equal(keys[:, 80:])
    kept = torch.stack([torch.randperm(90)[:40].sort().values for _ in range(3)])
    short = more.keep(kept, 10).read(keys[:, 80:], values[:, 80:])[0]
    assert short.equal(torch.stack([again[h, kept[h]] for h in range(3)]))


def test_packs_of_unlike_forms_keep_their_order() -> None:
    x = torch.randn(2, 30, 6)
    parts = [Quantiser(bits, 4).pack(p) for bits, p in zip((4, 4, 8), x.split(10, 1), strict=True)]
    out = torch.full((2, 30, 6), torch.nan)
    dequantise_row(parts, out)
    assert out.equal(torch.cat([dequantise(part) for part in parts], 1))


def state(lengths: list[int], seed: int) -> KVBlock:
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    keys, values = torch.randn(2, 2, len(lengths), 2, longest, 3, generator=generator)
    place = torch.full((len(lengths), longest), -1)
    for row, length in zip(place, lengths, strict=True):
        row[longest - length :] = torch.arange(length)
    return KVBlock(tuple(keys), tuple(values), place, torch.tensor(lengths))


def by_row(each: KVBlock) -> list[tuple[list[int], Tensor]]:
    """Places of each stream and its keys and values there."""
    both = torch.stack([*each.keys, *each.values]) if each.keys else torch.zeros(4, 0)
    found = []
    for b, place in enumerate(each.relative):
        here = place >= 0
        found.append((place[here].tolist(), both[:, b][:, :, here] if here.any() else both[:, :0]))
    return found


@pytest.mark.parametrize("rows", [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
@pytest.mark.parametrize("lengths", [([5, 2, 7], [3, 9, 1]), ([4, 4, 4], [4, 4, 4])])
def test_merged_streams_are_each_its_own(
    rows: list[int], lengths: tuple[list[int], list[int]]
) -> None:
    old, new = state(lengths[0], 0), state(lengths[1], 1)
    merged = merge(old, new, torch.tensor(rows, dtype=torch.bool))
    pick = torch.arange(3) + 3 * torch.tensor(rows)
    whole = take(stack([old, new]), pick)
    assert merged.relative.equal(whole.relative) and merged.advance.equal(whole.advance)
    for ours, theirs in zip(by_row(merged), by_row(whole), strict=True):
        assert ours[0] == theirs[0] and ours[1].equal(theirs[1])


def test_merging_with_streams_that_have_nothing_yet() -> None:
    from mmfast.ops.stream_cache import empty

    old = state([5, 2], 0)
    merged = merge(old, empty(2), torch.tensor([False, True]))
    assert by_row(merged)[0][1].equal(by_row(old)[0][1]) and by_row(merged)[1][0] == []
    assert merged.advance.tolist() == [5, 0]
    assert merge(empty(2), empty(2), torch.tensor([True, False])).advance.tolist() == [0, 0]
