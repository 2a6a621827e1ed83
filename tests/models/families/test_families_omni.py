"""Qwen2.5-Omni as it is published: a thinker that answers inside a model that speaks, too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import generate, tiny
from transformers import Qwen2_5OmniConfig, Qwen3OmniMoeConfig

from mmfast.attach import attach
from mmfast.core.errors import ModelError
from mmfast.models.families.adapter import adapter_for
from mmfast.models.loading import load

OMNI = "qwen2_5_omni_thinker"


@pytest.mark.parametrize(
    ("family", "whole"),
    [(OMNI, Qwen2_5OmniConfig), ("qwen3_omni_moe_thinker", Qwen3OmniMoeConfig)],
)
def test_a_checkpoint_of_the_whole_model_gives_its_thinker(
    family: str, whole: type, tmp_path: Path
) -> None:
    this = tiny(family)
    thinker = this.model.config.to_dict()
    whole(thinker_config=thinker, enable_audio_output=False).save_pretrained(tmp_path)
    this.processor.save_pretrained(tmp_path)
    weights = {f"thinker.{name}": w.clone() for name, w in this.model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, processor = load(str(tmp_path), "cpu", "float32")
    assert model.config.model_type == family
    assert type(processor) is type(this.processor)
    inputs = this.inputs(
        ["on {audio} and {image}?"], **this.media("audio", 1), images=this.images(1)
    )
    assert torch.equal(model(**inputs).logits, this.model(**inputs).logits)


def test_the_whole_model_names_its_thinker() -> None:
    config = SimpleNamespace(model_type="qwen2_5_omni")
    whole = SimpleNamespace(config=config, thinker=tiny(OMNI).model)
    with pytest.raises(ModelError, match=r"\.thinker") as error:
        adapter_for(whole)
    assert "\n" not in str(error.value)


def test_a_later_turn_goes_on_from_the_cache() -> None:
    this = tiny(OMNI)
    first = this.inputs(["on {image} a"], images=this.images(1))
    spec = "random:0.5"
    with attach(this.model, spec) as trace:
        out = generate(this, first, 2)
        ids = torch.cat([out.sequences, this.inputs([" b"])["input_ids"]], 1)
        mask = torch.ones_like(ids)
        again = generate(
            this, {"input_ids": ids, "attention_mask": mask}, 2, past_key_values=out.past_key_values
        )
    whole = {**first, "input_ids": ids, "attention_mask": mask}
    with attach(this.model, spec):
        expected = generate(this, whole, 2)
    assert len(trace.reductions) == 1
    assert torch.equal(again.sequences, expected.sequences)
    torch.testing.assert_close(
        torch.cat(again.logits), torch.cat(expected.logits), atol=1e-4, rtol=0
    )
