"""The FLOP model against a count by hand and against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mmfast.bench.cases import Case, build
from mmfast.bench.presets import PRESETS
from mmfast.bench.stages import MeasuredStage
from mmfast.models.cost import (
    attention_flops,
    decode_bytes,
    prefill_flops,
    tower_blocks,
    tower_flops,
    tower_pairs,
)


@pytest.fixture(scope="module")
def case() -> Case:
    return build("tiny", ["vit", "llm"], frames=2)


def test_prefill_by_hand(case: Case) -> None:
    # hidden 64, mlp 128, 4 heads and 2 kv heads of 16, vocabulary 512, 4 layers
    macs = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
    expected = sum(2 * macs * n + 2 * n * (n + 1) * 64 for n in (10, 10, 4, 4)) + 2 * 64 * 512
    assert prefill_flops(case.model, [10, 10, 4, 4]) == expected


def test_causal_counts_the_pairs_a_mask_leaves() -> None:
    mask = torch.ones(7, 7).tril()
    assert attention_flops(7, width=16) == int(4 * mask.sum()) * 16
    assert attention_flops(7, width=16, causal=False) == 4 * 49 * 16


def test_prefill_against_torch(case: Case) -> None:
    length = case.prompt["input_ids"].shape[1]
    embeds = torch.randn(1, length, 64)
    case.model.set_attn_implementation("eager")  # torch does not count the fused CPU kernel
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            hidden = case.model.get_decoder()(inputs_embeds=embeds).last_hidden_state
            case.model.lm_head(hidden[:, -1:])
    finally:
        case.model.set_attn_implementation("sdpa")
    assert counter.get_total_flops() == prefill_flops(case.model, [length] * 4, causal=False)


def test_tower_against_torch(case: Case) -> None:
    case.model.set_attn_implementation("eager")
    tower = case.model.get_encoder("image")
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            tower(case.pixels["pixel_values_videos"][0])
    finally:
        case.model.set_attn_implementation("sdpa")
    patches = 2 * 64
    embedding = 2 * patches * 3 * 8 * 8 * 32
    blocks = [patches] * 3
    counted = tower_flops(case.model, (2, 8, 8), blocks, blocks) + embedding
    assert counter.get_total_flops() == counted


def test_tower_counts_what_leaves_a_block(case: Case) -> None:
    stage = MeasuredStage(case, "vit", ("vit",))
    assert stage.observe(None).leaving == [128, 128, 128]
    whole = tower_flops(case.model, (2, 8, 8), [128] * 3, [128] * 3)
    merged = tower_flops(case.model, (2, 8, 8), [128, 64, 64], [64, 64, 64])
    assert merged < whole
    # A block that merges to half: attention sees all, the MLP half.
    first = tower_flops(case.model, (2, 8, 8), [128, 0, 0], [64, 0, 0])
    assert first == 2 * 128 * 4 * 32 * 32 + 2 * 64 * 2 * 32 * 64 + 4 * 2 * 64**2 * 32


def test_windows_of_qwen() -> None:
    preset = PRESETS["qwen2.5-vl-7b"]
    model = type("Model", (), {})()
    blocks = torch.nn.ModuleList(torch.nn.Identity() for _ in range(32))
    model.get_encoder = lambda kind: torch.nn.ModuleDict({"blocks": blocks})
    config = {**preset.vision, "fullatt_block_indexes": [7, 15, 23, 31]}
    model.config = type("Config", (), {"vision_config": type("Vision", (), config)})
    pairs = tower_pairs(model, (3, 28, 56))
    assert len(tower_blocks(model)) == len(pairs) == 32
    assert pairs[7] == 3 * (28 * 56) ** 2
    # 28 rows are 3 windows of 8 and one of 4; 56 columns are 7 windows of 8.
    windows = [(h * w) ** 2 for h in (8, 8, 8, 4) for w in [8] * 7]
    assert pairs[0] == 3 * sum(windows)


def test_decode_reads_weights_and_cache(case: Case) -> None:
    macs = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
    expected = 4 * (4 * macs + 64 * 512 + 2 * 2 * 16 * (30 + 30 + 10 + 10))
    assert decode_bytes(case.model, [30, 30, 10, 10]) == expected
