"""Attention of single queries whose heads share keys: the same numbers, and read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

import mmfast
from mmfast.models.decoder import grouped as module
from mmfast.models.decoder.grouped import grouped

CLIP = Path(__file__).resolve().parents[3] / "assets" / "clips" / "red-circle.mp4"


def _model(groups: int = 2, attn: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=groups,
        attn_implementation=attn,
    )
    return Qwen2ForCausalLM(config).eval()


@torch.no_grad()
def _step(model: Any, batch: int = 1, padded: int = 0) -> torch.Tensor:
    """Logits of a step behind seven tokens."""
    cache, ids = DynamicCache(), torch.arange(8 * batch).reshape(batch, 8)
    mask = torch.ones(batch, 8)
    mask[0, :padded] = 0
    given = {} if not padded else {"attention_mask": mask[:, :7]}
    model(input_ids=ids[:, :7], past_key_values=cache, **given)
    given = {} if not padded else {"attention_mask": mask}
    found: torch.Tensor = model(input_ids=ids[:, 7:], past_key_values=cache, **given).logits
    return found


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the queries that this attention, and no other, has seen."""
    seen: list[tuple[int, ...]] = []
    stock = F.scaled_dot_product_attention

    class Watched:
        @staticmethod
        def scaled_dot_product_attention(query: Any, *args: Any, **more: Any) -> Any:
            seen.append(tuple(query.shape))
            return stock(query, *args, **more)

    monkeypatch.setattr(module, "F", Watched)
    return seen


@pytest.mark.parametrize(("batch", "padded"), [(1, 0), (2, 0), (2, 3)])
def test_a_step_gives_the_numbers_of_the_stock_one(
    batch: int, padded: int, queries: list[Any]
) -> None:
    model, eager = _model(), _model(attn="eager")
    with grouped(model, steps=True):
        found = _step(model, batch, padded)
    torch.testing.assert_close(found, _step(eager, batch, padded), rtol=1e-5, atol=1e-6)
    assert (batch, 2, 2, 16) in queries  # two heads of a group are two rows


def test_without_steps_single_queries_are_those_of_the_model(queries: list[Any]) -> None:
    model = _model()
    with grouped(model):
        assert torch.equal(_step(model), _step(_model())) and not queries
    with grouped(_model(groups=4), steps=True), grouped(model, steps=True):
        assert torch.equal(_step(_model(groups=4)), _step(_model(groups=4)))
    assert not queries  # nothing is shared, and the others are as they were
    assert torch.equal(_step(model), _step(_model())) and not queries


@pytest.mark.parametrize(("weights", "used"), [("int8", True), (None, False)])
def test_pipelines_on_packed_weights_step_so(
    weights: str | None, used: bool, queries: list[Any]
) -> None:
    pipe = mmfast.pipeline("video-qa", device="cpu", max_new_tokens=3, weights=weights)
    text = pipe.model.config.get_text_config()
    shared = text.num_attention_heads > text.num_key_value_heads
    assert pipe(CLIP, "Which way does the red circle move?").text
    assert bool(queries) == (used and shared)


def _scattered(kind: torch.dtype, batch: int, length: int, keys: int) -> torch.Tensor:
    """A mask of queries at random places, ascending, one row of which has padding before it."""
    places = torch.stack([torch.randperm(keys)[:length].sort().values for _ in range(batch)])
    places[:, 0] = places[:, 0].clamp_min(4)
    places = places.sort(1).values
    shown = torch.arange(keys) <= places[:, None, :, None]
    shown[0, :, :, :3] = False
    if kind == torch.bool:
        return shown
    return torch.zeros(shown.shape).masked_fill_(~shown, torch.finfo(kind).min)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("length", [5, 63, 64, 65, 200])
def test_scattered_queries_are_those_of_stock(
    kind: torch.dtype, length: int, queries: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(length)
    query = torch.randn(2, 4, length, 8)
    key, value = torch.randn(2, 2, 2, 230, 8)
    mask = _scattered(kind, 2, length, 230)
    found, _ = module._attend(False, None, torch.nn.Identity(), query, key, value, mask)
    own, other = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    want = F.scaled_dot_product_attention(query, own, other, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
    rows = sum(shape[2] for shape in queries)
    assert rows == 2 * length  # each query of a group once
    assert len(queries) == (-(-length // module.PIECE) if length >= 2 * module.PIECE else 1)


def test_a_mask_of_one_row_is_that_of_all_queries() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 100, 8), *torch.randn(2, 1, 2, 120, 8)
    mask = torch.zeros(1, 1, 1, 120)
    mask[..., 90:] = torch.finfo(torch.float32).min
    found, _ = module._attend(False, None, torch.nn.Identity(), query, key, value, mask)
    own, other = (x[:, :, :90].repeat_interleave(2, 1) for x in (key, value))
    want = F.scaled_dot_product_attention(query, own, other).transpose(1, 2)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def test_runs_of_queries_read_no_key_behind_their_last() -> None:
    mask = _scattered(torch.float32, 1, 100, 200)
    cuts = module._pieces(mask, 100, 200)
    assert [cut[:2] for cut in cuts] == [(0, 32), (32, 64), (64, 96), (96, 100)]
    for _, stop, keys in cuts:
        assert mask[0, 0, stop - 1, keys - 1] == 0  # the last one that is seen
        assert keys == 200 or bool((mask[0, 0, :stop, keys:] < 0).all())
    assert module._pieces(mask, 50, 200) == [(0, 50, 200)]
    assert module._pieces(None, 100, 200) == [(0, 100, 200)]
