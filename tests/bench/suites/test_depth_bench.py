"""The benchmarks of drafted codes run, at sizes that cost nothing."""

from __future__ import annotations

import pytest
import torch

from mmfast.bench.suites.speech import drafts as speech_drafts


@pytest.mark.filterwarnings("ignore")
def test_ways_through_a_frame_agree_and_are_counted() -> None:
    rows = speech_drafts.depth_rows(
        1,
        lambda *_: None,
        num_codebooks=6,
        backbone_hidden_size=16,
        vocab_size=20,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=7,
    )
    assert [row["job"] for row in rows[:3]] == ["code by code", "stock", "drafts 100% right"]
    assert all(row["identical"] for row in rows)
    assert [row["passes_per_frame"] for row in rows[:3]] == [5, 5, 1]


def test_acceptance_is_measured_on_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [torch.randint(8, (40, 8)) for _ in range(2)]
    monkeypatch.setattr(speech_drafts, "codes_of", lambda *_, **__: (codes, []))
    rows = speech_drafts.depth_drafts(lambda *_: None, steps=2)
    assert [row["job"] for row in rows[::2]] == ["copy", "mlp", "groups"]
    assert all(row["identical"] == 1.0 for row in rows[::2])
    assert all(1 <= row["passes_per_frame"] <= 8 and len(row["acceptance"]) == 8 for row in rows)
