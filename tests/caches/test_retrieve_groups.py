"""Retrieval by groups of blocks, for days of video: against an oracle, and in an archive."""

from __future__ import annotations

import numpy as np
import oracles_retrieve as oracles
import pytest
import torch
from torch import Tensor

from mmfast.caches.plan import plan_cache
from mmfast.core.errors import SpecError
from mmfast.core.kv import Clusters, KVBlock
from mmfast.core.registry import get
from mmfast.streams.archive.archive import Archive
from mmfast.streams.archive.tiers import TierQuotas

HEADS, WIDTH, TOKENS = 2, 6, 3


def _blocks(count: int, seed: int = 0, step: int = 1) -> dict[int, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    scene = torch.zeros(HEADS, 1, WIDTH)
    out = {}
    for i in range(count):
        if i % 7 == 0:
            scene = torch.randn(HEADS, 1, WIDTH, generator=rng)
        out[i * step] = scene + 0.5 * torch.randn(HEADS, TOKENS, WIDTH, generator=rng)
    return out


def _query(seed: int) -> Tensor:
    return torch.randn(2 * HEADS, 4, WIDTH, generator=torch.Generator().manual_seed(90 + seed))


def _archive(spec: str, stored: dict[int, Tensor], **quotas: int) -> Archive:
    archive = Archive(plan_cache(spec).retriever(), 1, tiers=TierQuotas(**quotas))
    for number, keys in stored.items():
        places = torch.arange(TOKENS)[None]
        archive.put(KVBlock((keys,), (keys,), places, torch.tensor([TOKENS]), (), number))
    return archive


def _numbers(archive: Archive, query: Tensor) -> list[int]:
    return [found.number for found in archive.choose(0, query)]


@pytest.mark.parametrize(("budget", "group", "look"), [(3, 4, 2), (5, 3, 4), (2, 8, 1), (4, 5, 99)])
@pytest.mark.parametrize("step", [1, 3])
def test_an_archive_and_the_method_choose_what_the_oracle_does(
    budget: int, group: int, look: int, step: int
) -> None:
    blocks, spec = _blocks(40, step=step), f"window:64+retrieve:{budget}?group={group}&look={look}"
    archive, flat = _archive(spec, blocks), _archive(f"window:64+retrieve:{budget}", blocks)
    method = get("retrieve", "cache").fn(budget, group=group, look=look)
    parts = [method.represent(keys) for keys in blocks.values()]
    index = Clusters(
        torch.cat([p.means for p in parts]),
        torch.cat([p.counts for p in parts]),
        torch.tensor(list(blocks)),
    )
    arrays = {number: keys.double().numpy() for number, keys in blocks.items()}
    others = 0
    for seed in range(8):
        query = _query(seed)
        want = oracles.grouped_rekv(arrays, query.double().numpy(), budget, group, look)
        assert _numbers(archive, query) == want
        assert index.owner[method.choose(query, index)].tolist() == want
        others += want != _numbers(flat, query)
    assert not others if look == 99 else others  # all groups: what the flat search reads


def test_groups_follow_blocks_that_are_lost_and_a_restored_archive() -> None:
    blocks, spec = _blocks(200), "window:64+retrieve:4?group=8&look=3"
    archive = _archive(spec, blocks, host=10**9, blocks=70)  # the oldest leave
    assert archive.numbers()[0] == 130
    for number in (133, 140, 141, 150, 199):
        archive.forget(number)
    left = {n: keys for n, keys in blocks.items() if n in archive.numbers()}
    arrays = {number: keys.double().numpy() for number, keys in left.items()}
    again = Archive(plan_cache(spec).retriever(), 1)
    again.restore(archive.snapshot())
    for seed in range(8):
        query = _query(seed)
        want = oracles.grouped_rekv(arrays, query.double().numpy(), 4, 8, 3)
        assert _numbers(archive, query) == want == _numbers(again, query)
    for number in list(left):
        archive.forget(number)
    assert _numbers(archive, _query(0)) == []


def test_a_group_whose_last_block_is_lost_leaves_nothing_behind() -> None:
    """What comes after an archive ran empty is chosen as if nothing had been there before."""
    blocks, spec = _blocks(64), "window:64+retrieve:2?group=4&look=1"
    archive = _archive(spec, {n: keys for n, keys in blocks.items() if n < 21})
    for number in range(21):
        archive.forget(number)
    later = {n: keys for n, keys in blocks.items() if n >= 21}  # the first is of a group of old
    for number, keys in later.items():
        places = torch.arange(TOKENS)[None]
        archive.put(KVBlock((keys,), (keys,), places, torch.tensor([TOKENS]), (), number))
    arrays = {number: keys.double().numpy() for number, keys in later.items()}
    for seed in range(8):
        query = _query(seed)
        want = oracles.grouped_rekv(arrays, query.double().numpy(), 2, 4, 1)
        assert _numbers(archive, query) == want


def test_groups_of_blocks_that_find_no_room_take_none() -> None:
    spec, sizes = "window:64+retrieve:2?group=4", []
    for count in (100, 2_000):
        archive = _archive(spec, _blocks(count), host=0)
        assert archive.numbers() == [] and _numbers(archive, _query(0)) == []
        sizes.append(archive.stats()["index_bytes"])
    assert sizes[0] == sizes[1]


def test_the_index_of_groups_is_small() -> None:
    blocks = _blocks(2_000)
    flat = _archive("window:64+retrieve:4", blocks).stats()["index_bytes"]
    grouped = _archive("window:64+retrieve:4?group=32", blocks).stats()["index_bytes"]
    assert 0 < grouped - flat < 2 * flat / 32 + 4_096


@pytest.mark.parametrize("knobs", ["group=1", "group=-2", "look=3", "group=8&chunk=2"])
def test_knobs_that_make_no_sense(knobs: str) -> None:
    with pytest.raises(SpecError, match=r"retrieve|rekv"):
        plan_cache(f"window:64+retrieve:4?{knobs}").retriever()


def test_the_oracle_reads_fewer_groups_than_there_are() -> None:
    arrays = {n: k.double().numpy() for n, k in _blocks(40).items()}
    query = _query(1).double().numpy()
    found = oracles.grouped_rekv(arrays, query, 6, 4, 2)
    assert len({number // 4 for number in found}) <= 2 and isinstance(arrays[0], np.ndarray)


@pytest.mark.parametrize("spec", ["retrieve:4", "retrieve:4?group=5&look=3"])
@pytest.mark.parametrize("newest", [3, 14, 22, 39])
def test_blocks_that_came_later_are_not_chosen(spec: str, newest: int) -> None:
    """Nor does anything of theirs show, where no group is cut in two."""
    blocks = _blocks(40)
    archive = _archive(f"window:64+{spec}", blocks)
    arrays = {n: keys.double().numpy() for n, keys in blocks.items() if n <= newest}
    others = 0
    for seed in range(8):
        query = _query(seed)
        found = [each.number for each in archive.choose(0, query, newest)]
        others += found != _numbers(archive, query)
        if "group" not in spec:
            assert found == oracles.rekv(arrays, query.double().numpy(), 4)
        elif newest % 5 == 4:
            assert found == oracles.grouped_rekv(arrays, query.double().numpy(), 4, 5, 3)
        assert len(found) == 4 and max(found) <= newest
    assert others or newest == 39
    assert archive.choose(0, _query(0), -1) == []
