"""Benchmarks of the vision tower on a tiny shape: what their rows say, and when they refuse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmfast.bench.presets import get_preset
from mmfast.bench.registry import named_rows, names, quiet
from mmfast.bench.suites import scene, vision
from mmfast.core.errors import MmfastError

TINY = vision.TowerShape(lambda layers: get_preset("tiny"), 3, frames=2)


@pytest.fixture(autouse=True)
def _short(monkeypatch: Any) -> None:
    monkeypatch.setattr("mmfast.bench.timing.WARM_UPS", 1)
    monkeypatch.setattr(vision, "TOWERS", {"tiny": TINY})


def test_all_are_found_by_name() -> None:
    assert names("encoder") == [
        "attention",
        "batch",
        "compile",
        "merge",
        "patch",
        "scene",
        "timm",
    ]


def check(rows: list[dict[str, Any]], first: str) -> None:
    """What every row must have."""
    assert rows[0]["job"] == first
    assert rows[0]["speedup"] == 1.0
    for row in rows:
        assert row["median_ms"] > 0 < row["speedup"]
        assert row["noise"] >= 0
        assert row["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_frames_per_call(monkeypatch: Any) -> None:
    monkeypatch.setattr(vision, "TOWERS", {"siglip-so400m-384": TINY})
    rows = vision.frames_per_call(quiet, frames=2, layers=3, rounds=2)
    check(rows, "1 a call")
    assert [row["job"] for row in rows] == ["1 a call", "2 a call"]
    assert all(row["peak_mb"] > 0 for row in rows)


def test_attention(monkeypatch: Any) -> None:
    monkeypatch.setattr(vision, "SEGMENTS", {"tiny": (2, 8, [4, 4, 2])})
    rows = vision.attention(quiet, rounds=2)
    check(rows, "eager, one by one")
    assert [row["job"] for row in rows][1:] == ["sdpa, one by one", "together"]
    assert all(row["difference"] < 1e-5 for row in rows)
    monkeypatch.setattr(vision, "segment_attention", lambda q, *_, **__: q)
    with pytest.raises(MmfastError, match="features differ by"):
        vision.attention(quiet, rounds=2)


def test_patches() -> None:
    rows = vision.patch_rows(vision.PATCHES[1], torch.float32, 2)
    check(rows, "convolution")
    assert 0 < rows[1]["difference"] < 1e-5


def test_merging() -> None:
    rows = vision.merging(quiet, ("tome@vit:0.5", "saint@vit:0.5"), rounds=2, layers=3)
    check(rows, "stock")
    stock, merged, other = rows
    # Three blocks of 64 patches leave 54, 43 and 32; the MLP of a block runs on what it leaves.
    assert merged["ideal"] == other["ideal"] == pytest.approx(ideal(64, [54, 43, 32]), rel=1e-3)
    assert merged["operations_a_block"] > 10
    assert merged["merging_ms"] > 0 == stock["merging_ms"]
    assert merged["of_ideal"] == merged["speedup"] / merged["ideal"]


def test_a_scene() -> None:
    rows = scene.scene(quiet, rounds=2, layers=2, frames=4, size=(28, 42))
    check(rows, "stock")
    assert [row["job"] for row in rows][1:] == [*scene.SPECS]
    # 24 patches in four frames with 5 tokens in front of each; 10 of the patches are left.
    linear, width = 2 * 12 * 1024**2 * 44, 2 * 1024
    full = linear + width * (44 * 11 + 44 * 44)
    less = linear + width * (44 * 11 + 30 * 30)
    for row in rows[1:]:
        assert row["ideal"] == pytest.approx(full / less)
    assert (rows[0]["tokens"], rows[0]["frames"], rows[0]["blocks"]) == (24, 4, 4)


def ideal(n: int, leaving: list[int], width: int = 32, inner: int = 64) -> float:
    """FLOPs of three blocks over those of the same blocks on fewer tokens."""

    def cost(entering: int, left: int) -> int:
        return 8 * entering * width**2 + 4 * entering**2 * width + 4 * left * width * inner

    less = sum(cost(a, b) for a, b in zip([n, *leaving[:-1]], leaving, strict=True))
    return 3 * cost(n, n) / less


def test_a_vit_of_timm_beside_a_peer(monkeypatch: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tome" / "patch"
    folder.mkdir(parents=True)
    (tmp_path / "tome" / "__init__.py").touch()
    (folder / "__init__.py").write_text("PATCHED = []\ntimm = PATCHED.append\n")
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in ("tome", "tome.patch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    rows = vision.timm_encoder(quiet, rounds=2, layers=2, size=64, peer=str(tmp_path))
    check(rows, "stock")
    assert [row["job"] for row in rows][1:] == ["tome@vit:0.5", "saint@vit:0.5", "ToMe's own code"]
    # 16 patches and a class token: two blocks leave 12 and 8 of the patches.
    width = 1024
    full = 2 * (24 * 17 * width**2 + 4 * 17**2 * width)
    less = sum(
        8 * n * width**2 + 4 * n**2 * width + 16 * m * width**2 for n, m in ((17, 13), (13, 9))
    )
    for row in rows[1:]:
        assert row["ideal"] == pytest.approx(full / less, rel=1e-6)
        assert row["of_ideal"] == row["speedup"] / row["ideal"]
        assert row["images_per_s"] == pytest.approx(1e3 / row["median_ms"])
    (patched,) = sys.modules["tome.patch"].PATCHED
    assert patched.r == [4, 4] and len(patched.blocks) == 2
    for name in ("tome", "tome.patch"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MmfastError, match=r"holds no tome/patch"):
        vision.timm_encoder(quiet, rounds=2, layers=1, size=32, peer=str(folder))
    with pytest.raises(MmfastError, match=r"--encoder merge has no peer; leave --peer out"):
        named_rows("encoder", "merge", peer=str(tmp_path))


def test_modes(monkeypatch: Any) -> None:
    monkeypatch.setattr(vision, "MODES", ("fast",))
    rows = vision.modes(quiet, rounds=2, layers=3)
    check(rows, "stock")
    assert rows[1]["difference"] < 1e-5
    assert rows[1]["first_call_s"] > 0


def test_a_wrong_tower_is_not_timed() -> None:
    with pytest.raises(MmfastError, match="more than 1e-04"):
        vision.check(torch.ones(3), torch.full((3,), 1.01), 1e-4)
