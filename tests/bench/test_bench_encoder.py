"""Benchmarks of the vision tower on a tiny shape: what their rows say, and when they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmfast.bench import (
    encoder_attention,
    encoder_batch,
    encoder_compile,
    encoder_jobs,
    encoder_merge,
    encoder_patch,
)
from mmfast.bench.cases import Case, build
from mmfast.bench.named import names, quiet
from mmfast.core.errors import MmfastError


def tiny(layers: int, frames: int, dtype: torch.dtype | None = None) -> Case:
    return build("tiny", ("vit",), frames=frames)


@pytest.fixture(autouse=True)
def _short(monkeypatch: Any) -> None:
    monkeypatch.setattr("mmfast.bench.timing.WARM_UPS", 1)
    for module, tower in ((encoder_merge, (tiny, 3, 2)), (encoder_compile, (tiny, 3))):
        monkeypatch.setattr(module, "TOWERS", {"tiny": tower})
        monkeypatch.setattr(module, "LAYERS", 3)
    monkeypatch.setattr(encoder_batch, "siglip", tiny)


def test_all_are_found_by_name() -> None:
    assert names("encoder") == ["attention", "batch", "compile", "merge", "patch"]


def check(rows: list[dict[str, Any]], first: str) -> None:
    """What every row must have."""
    assert rows[0]["job"] == first
    assert rows[0]["speedup"] == 1.0
    for row in rows:
        assert row["median_ms"] > 0 < row["speedup"]
        assert row["noise"] >= 0
        assert row["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_frames_per_call() -> None:
    rows = encoder_batch.measure(2, 3, 2, quiet)
    check(rows, "1 a call")
    assert [row["job"] for row in rows] == ["1 a call", "2 a call"]
    assert all(row["peak_mb"] > 0 for row in rows)


def test_attention(monkeypatch: Any) -> None:
    monkeypatch.setattr(encoder_attention, "SHAPES", {"tiny": (2, 8, [4, 4, 2])})
    rows = encoder_attention.measure("tiny", 2, quiet)
    check(rows, "eager, one by one")
    assert [row["job"] for row in rows][1:] == ["sdpa, one by one", "together"]
    assert all(row["difference"] < 1e-5 for row in rows)
    monkeypatch.setattr(encoder_attention, "segment_attention", lambda q, *_, **__: q)
    with pytest.raises(MmfastError, match="features differ by"):
        encoder_attention.measure("tiny", 2, quiet)


def test_patches() -> None:
    rows = encoder_patch.measure(encoder_patch.SHAPES[1], torch.float32, 2)
    check(rows, "convolution")
    assert 0 < rows[1]["difference"] < 1e-5


def test_merging() -> None:
    rows = encoder_merge.measure("tiny", ("tome@vit:0.5", "saint@vit:0.5"), 2, quiet)
    check(rows, "stock")
    stock, merged, other = rows
    # Three blocks of 64 patches leave 54, 43 and 32; the MLP of a block runs on what it leaves.
    assert merged["ideal"] == other["ideal"] == pytest.approx(ideal(64, [54, 43, 32]), rel=1e-3)
    assert merged["operations_a_block"] > 10
    assert merged["merging_ms"] > 0 == stock["merging_ms"]
    assert merged["of_ideal"] == merged["speedup"] / merged["ideal"]


def ideal(n: int, leaving: list[int], width: int = 32, inner: int = 64) -> float:
    """FLOPs of three blocks over those of the same blocks on fewer tokens."""

    def cost(entering: int, left: int) -> int:
        return 8 * entering * width**2 + 4 * entering**2 * width + 4 * left * width * inner

    less = sum(cost(a, b) for a, b in zip([n, *leaving[:-1]], leaving, strict=True))
    return 3 * cost(n, n) / less


def test_modes(monkeypatch: Any) -> None:
    monkeypatch.setattr(encoder_compile, "MODES", ("fast",))
    rows = encoder_compile.measure("tiny", 2, quiet)
    check(rows, "stock")
    assert rows[1]["difference"] < 1e-5
    assert rows[1]["first_call_s"] > 0


def test_a_wrong_tower_is_not_timed() -> None:
    with pytest.raises(MmfastError, match="more than 1e-04"):
        encoder_jobs.check(torch.ones(3), torch.full((3,), 1.01), 1e-4)
