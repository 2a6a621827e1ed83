"""Bits of chunks that keep a deadline: brute force, a link that slows down, a store of files."""

from __future__ import annotations

import math
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build, generate

from mmfast.core.errors import MmfastError
from mmfast.core.trace import Trace
from mmfast.streams.reuse.levels import AGAIN, ChunkOffer, FetchClock, chosen_bits
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.plan import parse_reuse
from mmfast.streams.reuse.store import MediaFolder, ReuseStore


def _offers(rng: random.Random, count: int) -> list[ChunkOffer]:
    found = []
    for _ in range(count):
        size = rng.randint(5, 60)
        levels = rng.sample([3, 4, 6, 8], rng.randint(1, 4))
        again = rng.choice([math.inf, rng.uniform(1, 60)])
        found.append(ChunkOffer({bits: size * bits for bits in levels}, again))
    return found


def _brute(offers: list[ChunkOffer], bandwidth: float, left: float) -> float | None:
    """Fewest bits of the best assignment that keeps the deadline; None where none does."""
    best = None
    for choice in product(*([*offer.sizes, AGAIN] for offer in offers)):
        ms = 0.0
        for offer, bits in zip(offers, choice, strict=True):
            ms += offer.again_ms if bits == AGAIN else offer.sizes[bits] / bandwidth
        fewest = min(99 if bits == AGAIN else bits for bits in choice)
        if ms <= left and (best is None or fewest > best):
            best = fewest
    return best


@pytest.mark.parametrize("seed", range(60))
def test_chosen_bits_are_those_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    offers, bandwidth = _offers(rng, rng.randint(1, 5)), rng.uniform(1, 20)
    left = rng.uniform(5, 150)
    found = chosen_bits(offers, bandwidth, left)
    each = [offer.times(bandwidth)[bits] for offer, bits in zip(offers, found, strict=True)]
    expected = _brute(offers, bandwidth, left)
    if expected is None:  # the fastest way
        assert sum(each) == pytest.approx(sum(min(o.times(bandwidth).values()) for o in offers))
        return
    assert sum(each) <= left
    assert min(99 if bits == AGAIN else bits for bits in found) == expected


def _sent(offers: list[ChunkOffer], link: list[float], deadline: float, adapts: bool) -> float:
    """Milliseconds in which all chunks arrive over a link of a bandwidth for each."""
    clock, spent, plan = FetchClock(), 0.0, list[int]()
    for i, (offer, bandwidth) in enumerate(zip(offers, link, strict=True)):
        if adapts or i < 2:
            rest = [each.sizes for each in offers[i:]]
            bits = clock.next_bits(rest, [1] * len(rest), deadline - spent)
            plan = chosen_bits(offers[i:], link[0], deadline - spent)
        else:
            bits = plan[i - 1]
        ms = offer.sizes[bits] / bandwidth
        clock.fetched(offer.sizes[bits], ms)
        spent += ms
    return spent


def test_a_link_that_slows_down_is_followed() -> None:
    offers = [ChunkOffer({bits: 100 * bits for bits in (3, 4, 6, 8)}) for _ in range(10)]
    link = [20.0] * 3 + [12.0] * 7
    assert _sent(offers, link, 330, adapts=True) <= 330
    assert _sent(offers, link, 330, adapts=False) > 330  # the control: planned once
    assert _sent(offers, [20.0] * 10, 420, adapts=True) > 300  # and a fast one is used


class _SlowFolder:
    """Reads of a folder that take as long as their bytes do, on a clock that tests turn."""

    def __init__(self, store: ReuseStore, bandwidth: float, monkeypatch: Any) -> None:
        self.at, self.names, stock = 0.0, [], MediaFolder.read

        def read(folder: Any, key: str) -> Any:
            found = stock(folder, key)
            self.at += folder.file(key).stat().st_size / bandwidth / 1e3
            self.names.append(key)
            return found

        monkeypatch.setattr(MediaFolder, "read", read)
        store.now = lambda: self.at  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def written(tmp_path_factory: Any) -> Any:
    """A folder with a prompt in three numbers of bits, its inputs, and stock logits."""
    folder, this = tmp_path_factory.mktemp("levels"), build("qwen2_5_vl")
    text = " ".join(["look", *["at these words"] * 12, "{image} now", *["more of it"] * 8])
    inputs = this.inputs([f"{text} {{image}} which?"], images=this.images(2))
    store = ReuseStore(folder=folder, bits=(3, 4, 8), deadline_ms=1)
    reuse = MediaReuse(this.model, this.processor, parse_reuse("prefix"), store)
    reuse.prompt(reuse.encoded(inputs))
    store.flush()
    return this, folder, inputs, torch.cat(generate(this, inputs, 2).logits)


def _fetched(written: Any, monkeypatch: Any, bandwidth: float, token_ms: float) -> Any:
    this, folder, inputs, stock = written
    store = ReuseStore(folder=folder, bits=(3, 4, 8), deadline_ms=100)
    slow = _SlowFolder(store, bandwidth, monkeypatch)
    reuse = MediaReuse(this.model, this.processor, parse_reuse("prefix"), store)
    given = reuse.encoded(inputs)
    store.clock.token_ms, slow.at, trace = token_ms, 0.0, Trace()
    logits = torch.cat(generate(this, reuse.prompt(given, trace=trace), 2).logits)
    (row,) = [row for row in trace.rows if row.stage == "reuse kv"]
    return row, slow.at * 1e3, float((logits - stock).abs().max())


def test_a_store_keeps_its_deadline(written: Any, monkeypatch: Any) -> None:
    fast = _fetched(written, monkeypatch, 1e9, math.inf)
    assert "8 bits" in fast[0].method and "3 bits" not in fast[0].method
    monkeypatch.undo()
    late = _fetched(written, monkeypatch, 1.0, math.inf)
    assert "8 bits" not in late[0].method and late[1] > 100  # the fastest way
    monkeypatch.undo()
    slow = _fetched(written, monkeypatch, late[1] / 92, math.inf)
    assert 50 < slow[1] <= 100
    assert fast[2] < slow[2]
    monkeypatch.undo()
    again = _fetched(written, monkeypatch, 1.0, 1e-6)
    assert "bits" not in again[0].method and again[0].tokens_out == again[0].tokens_in
    assert again[2] < 1e-4  # all was read again


@pytest.mark.parametrize(
    "options",
    [
        {"bits": (3, 3), "folder": "x"},
        {"bits": (), "folder": "x"},
        {"bits": (3, 9), "folder": "x"},
        {"bits": (3, 4)},
        {"bits": 4, "folder": "x", "deadline_ms": 10},
        {"bits": (3, 4), "folder": "x", "deadline_ms": 0},
        {"deadline_ms": 10},
    ],
)
def test_levels_that_make_no_sense_are_refused(options: Any) -> None:
    with pytest.raises(MmfastError, match="bits"):
        ReuseStore(**options)


def test_a_deadline_acts_on_beginnings_alone(tmp_path: Path) -> None:
    this = build("qwen2_5_vl")
    store = ReuseStore(folder=tmp_path, bits=(3, 4), deadline_ms=10)
    with pytest.raises(MmfastError, match="leave deadline_ms out"):
        MediaReuse(this.model, this.processor, parse_reuse("blend:0.2"), store)
