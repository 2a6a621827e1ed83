"""Packed towers in blocks of rows: the numbers of the stock tower, and of no other one."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from encoder_checks import CLOSE, features
from tower_checks import GRIDS, pixels, qwen
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as stock

from mmfast.models.families.adapter import tower_of
from mmfast.models.vision import row_blocks
from mmfast.models.vision.acceleration import fast_encoder
from mmfast.models.vision.row_blocks import in_blocks, turn, turns_halves

CALL = {"pixel_values_videos": pixels(GRIDS), "video_grid_thw": GRIDS}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few rows, so that tiny towers have several, the last one shorter."""
    monkeypatch.setattr(row_blocks, "_NUMBERS", 100)
    monkeypatch.setattr(row_blocks, "_ROWS", 5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_rows_are_those_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, _ = torch.randn(33, 3, 4, 16).to(dtype).unbind(1)
    angles = torch.randn(33, 16)
    cos, sin = angles.cos(), angles.sin()
    for x, wanted in zip((q, k), stock.apply_rotary_pos_emb_vision(q, k, cos, sin), strict=True):
        assert torch.equal(turn(x, cos, sin), wanted)
    assert turn(q[:0], cos[:0], sin[:0]).shape == (0, 4, 16)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_features_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen(name)
    wanted, turned = features(model, "video", CALL), []
    with in_blocks(tower_of(model)):
        monkeypatch.setattr(row_blocks, "turn", lambda *x: turned.append(len(x[0])) or turn(*x))
        torch.testing.assert_close(features(model, "video", CALL), wanted, **CLOSE)
    assert len(turned) == 2 * len(tower_of(model).blocks)  # queries and keys
    assert torch.equal(features(model, "video", CALL), wanted)


@pytest.mark.usefixtures("small")
@torch.no_grad()
def test_towers_that_turn_pairs_or_name_no_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some towers of transformers turn neighbours, not halves: they keep their own function."""

    def pairwise(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any) -> Any:
        def turned(x: torch.Tensor) -> torch.Tensor:
            other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
            return x * cos.unsqueeze(-2) + other * sin.unsqueeze(-2)

        return turned(q), turned(k)

    assert turns_halves(stock.apply_rotary_pos_emb_vision) and not turns_halves(pairwise)
    model = qwen("qwen2_5_vl")
    monkeypatch.setattr(stock, "apply_rotary_pos_emb_vision", pairwise)
    for block in tower_of(model).blocks:
        block.norms = block.norm2
        monkeypatch.setattr(block, "forward", partial(_block, block))
        del block.norm2
    wanted = features(model, "video", CALL)
    with in_blocks(tower_of(model)):
        torch.testing.assert_close(features(model, "video", CALL), wanted, **CLOSE)
    assert stock.apply_rotary_pos_emb_vision is pairwise


def _block(block: Any, hidden: torch.Tensor, **more: Any) -> torch.Tensor:
    """A block of Qwen2.5-VL whose second norm has another name."""
    hidden = hidden + block.attn(block.norm1(hidden), **more)
    found: torch.Tensor = hidden + block.mlp(block.norms(hidden))
    return found


@torch.no_grad()
def test_another_tower_of_the_class_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = qwen("qwen2_5_vl"), qwen("qwen2_5_vl")
    before = stock.apply_rotary_pos_emb_vision
    with fast_encoder(mine, "fast"):
        monkeypatch.setattr(row_blocks, "turn", lambda *_: pytest.fail("another tower was changed"))
        features(other, "video", CALL)
        worker = threading.Thread(target=features, args=(other, "video", CALL))
        worker.start()
        worker.join()
    assert stock.apply_rotary_pos_emb_vision is before


@torch.enable_grad()
def test_gradients_are_those_of_the_stock_tower() -> None:
    model = qwen("qwen2_5_vl").requires_grad_(True)
    weight = tower_of(model).blocks[0].attn.qkv.weight

    def gradient() -> torch.Tensor:
        model.zero_grad()
        features(model, "video", CALL).square().sum().backward()
        found: Any = weight.grad
        return found.clone()  # type: ignore[no-any-return]

    wanted = gradient()
    with fast_encoder(model, "fast"):
        torch.testing.assert_close(gradient(), wanted, rtol=1e-3, atol=1e-4)
