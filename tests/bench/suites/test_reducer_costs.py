"""No reducer loops over tokens or holds a table of all tokens against all: counted, not timed."""

from __future__ import annotations

import functools
import gc
from functools import lru_cache

import pytest
import torch

import mmfast
from mmfast import Tokens
from mmfast.bench.suites import selection
from mmfast.bench.suites.selection import all_signals, reduction
from mmfast.bench.timing import counted
from mmfast.core.registry import Method

METHODS = mmfast.methods("reducer")
by_name = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)

# Plans that are remembered cost nothing the second time: each count starts without any.
REMEMBERED = [
    plan
    for plan in gc.get_objects()
    if type(plan) is functools._lru_cache_wrapper  # isinstance would touch lazy modules
    and str(plan.__module__).startswith(("mmfast.ops", "mmfast.reducers"))
]

# Twice the tokens may take this many more operations: chunks of fixed size, no loop over tokens.
_MORE, _FACTOR = 8, 1.3

# Fewer operations than tokens will do here.
LOOPS = {
    "divprune": "greedy search in blocks of picks: fewer operations than picks",
    "greedyprune": "greedy search in blocks of picks",
    "catp": "greedy search in blocks of picks",
    "cdpruner": "greedy search in blocks of picks",
    "script": "greedy search in blocks of picks",
    "prumerge": "every kept token against all, a fixed number of similarities at a time",
    "prumerge_plus": "the same",
    "key_clip": "a greedy search in every clip",
    "fastvid": "clusters in every frame of a shot, then by shot",
    "holitom": "clusters in every window of frames",
    "prunevid": "clusters in every scene and in every frame",
    "vispruner": "rounds that each remove a 72nd of a frame or tile",
}

# Bytes of the largest temporary, in units of the features of 6,272 tokens of width 256.
LARGE = {
    "info_rank": (4.0, "singular directions of all features in float64"),
    "vispruner": (4.0, "likeness of all tokens of a tile of 1,254 in float64"),
    "sparsevlm": (2.7, "distances of all recycled tokens, which the paper clusters, in float64"),
}
_LARGEST = 2.6  # a copy in float64, and some


@lru_cache(maxsize=4)
def clip(frames: int, side: int, d: int) -> Tokens:
    return all_signals((frames, side, side), d)


@by_name
@pytest.mark.parametrize("grow", ["frames", "side"])
def test_operations_do_not_grow_with_tokens(method: Method, grow: str) -> None:
    small = clip(8, 12, 32)  # above what greedy searches compare all with all
    large = clip(16, 12, 32) if grow == "frames" else clip(8, 17, 32)
    few, many = (_operations(method, tokens) for tokens in (small, large))
    if method.name in LOOPS:
        assert many < large.n, (few, many)
    else:
        assert many <= _FACTOR * few + _MORE, (few, many)


def _operations(method: Method, tokens: Tokens) -> int:
    for plan in REMEMBERED:
        plan.cache_clear()
    return counted(reduction(method, tokens)).count


@pytest.mark.rest_is_slow(3)
@by_name
def test_no_temporary_is_much_larger_than_the_features(method: Method) -> None:
    tokens = clip(32, 14, 256)
    limit, _ = LARGE.get(method.name, (_LARGEST, ""))
    seen = counted(reduction(method, tokens))
    share = seen.largest / tokens.x.nbytes
    assert share <= limit, f"{seen.name} gives {share:.1f} times the features"


def test_exemptions_are_of_methods_that_exist() -> None:
    assert set(LOOPS) | set(LARGE) <= {method.name for method in METHODS}


def test_a_loop_over_tokens_and_a_square_table_show() -> None:
    x = torch.randn(300, 8)
    assert counted(lambda: [row.sum() for row in x]).count >= 300
    seen = counted(lambda: x @ x.T)
    assert seen.largest == 300 * 300 * 4 and "mm" in seen.name


@pytest.mark.slow
def test_bench_of_reducers(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [method for method in METHODS if method.name in ("evs", "tome", "fastv")]
    monkeypatch.setattr(selection, "SHAPES", (((2, 6, 7), 16), ((1, 5, 5), 16)))
    monkeypatch.setattr(selection, "methods", lambda kind: few)
    said: list[tuple[str, int, int]] = []
    rows = selection.reducers(lambda *step: said.append(step))
    assert [row["n"] for row in rows] == [84] * 3 + [25] * 3
    assert {row["method"] for row in rows} == {"evs", "tome", "fastv"}
    assert all(row["median_ms"] > 0 and row["operations"] > 3 for row in rows)
    assert all(row["extra_mb"] >= 0 and row["device"] == "cpu" for row in rows)
    assert rows[0]["median_ms"] >= rows[2]["median_ms"] and len(said) == 7
