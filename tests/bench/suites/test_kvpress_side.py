"""Policies beside the presses of kvpress: what is compared, and that the comparison can fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mmfast.bench.registry import named_rows
from mmfast.bench.suites import kvpress_side
from mmfast.bench.suites.kvpress_side import PAIRS, SIZES, side_rows
from mmfast.bench.suites.kvpress_worker import entries, keys_of, prompt_of, random_llama
from mmfast.core.errors import MmfastError

PEER = os.environ.get("MMFAST_KVPRESS", "")
SMALL = SIZES | {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 64}


def test_entries_are_found_by_their_keys_in_any_order() -> None:
    drawn = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 50, 8, generator=drawn)
    places = torch.stack([torch.randperm(50, generator=drawn)[:20] for _ in range(3)])
    kept = keys.gather(1, places[..., None].expand(-1, -1, 8))
    assert torch.equal(entries(kept, keys), places.sort(-1).values)
    with pytest.raises(ValueError, match="none of the prompt's"):
        entries(kept + 1e-3, keys)


def test_our_side_counts_its_hooks_and_keeps_the_budget() -> None:
    model, ids = random_llama(SMALL), prompt_of(1, 120, 64)
    whole = keys_of(model, ids)
    ms, left = kvpress_side._ours(model, ids, "snapkv:30?kernel=1")
    found = [entries(*both) for both in zip(left, whole, strict=True)]
    assert ms > 0 and [tuple(each.shape) for each in found] == [(2, 30)] * 2
    other = kvpress_side._ours(model, ids, "knorm:30")[1]
    apart = [entries(*both) for both in zip(other, whole, strict=True)]
    assert kvpress_side._shared(found, found) == 1.0 > kvpress_side._shared(found, apart)


@pytest.mark.parametrize(
    ("peer", "message"), [(None, "--peer FOLDER"), ("nowhere", "no virtual environment")]
)
def test_a_missing_environment_is_one_line(
    peer: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvpress_side, "SIZES", SMALL)
    with pytest.raises(MmfastError, match=message):
        named_rows("decode", "kvpress", peer=peer)


def test_an_environment_without_kvpress_says_so(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "python"
    program.write_text("#!/bin/sh\necho 'ModuleNotFoundError: kvpress' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(MmfastError, match="ModuleNotFoundError: kvpress"):
        side_rows(str(tmp_path), SMALL, 120, 30, {"knorm:30": ("KnormPress", {})}, 1, print)


@pytest.mark.slow
@pytest.mark.skipif(not PEER, reason="MMFAST_KVPRESS names no environment with kvpress")
def test_the_same_entries_stay_in_both() -> None:
    # Equal tokens have equal norms in the first layer, and rounding would choose among them.
    sizes = SMALL | {"num_hidden_layers": 3, "vocab_size": 8192}
    rows = side_rows(PEER, sizes, 4100, 1000, PAIRS, 1, lambda *_: None)
    assert {row["job"] for row in rows} == PAIRS.keys()
    assert all(row["alike"] > 0.99 and row["theirs_ms"] > 0 for row in rows), rows
