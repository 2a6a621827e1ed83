"""`attach` and pipelines on models as `from_pretrained` loads them.

In shards, placed, offloaded, quantised, and by code that lies in their folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import model_oracle as oracle
import pytest
import torch
from stream_tools import watcher
from tiny_models import Tiny, build, tiny
from transformers import AutoModelForImageTextToText, HqqConfig, QuantoConfig, TorchAoConfig

import mmfast
from mmfast.core.errors import ModelError

# accelerate counts modules alone, and one of those that transformers asks for is a parameter.
pytestmark = pytest.mark.filterwarnings("ignore:The following device_map keys do not match")
FAMILY = "llava_onevision"
CODE = """
from transformers import LlavaOnevisionForConditionalGeneration
class Own(LlavaOnevisionForConditionalGeneration):
    pass
"""


def needs(package: str) -> pytest.MarkDecorator:
    there = find_spec(package.partition(".")[0]) and find_spec(package)
    return pytest.mark.skipif(not there, reason=f"no {package}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in two files, whose processor has a chat template."""
    tiny(FAMILY).model.save_pretrained(tmp_path / "model", max_shard_size="200KB")
    watcher(FAMILY).processor.save_pretrained(tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 2
    return tmp_path / "model"


def offloaded(folder: Path) -> dict[str, Any]:
    """The language model on disk, everything else in memory."""
    seen = ("vision_tower", "multi_modal_projector", "image_newline")
    places = {f"model.{name}": "cpu" for name in seen} | {"lm_head": "cpu"}
    places["model.language_model"] = "disk"
    return {"device_map": places, "offload_folder": str(folder / "off")}


def by_torchao(_: Path) -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig

    return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}


def by_own_code(folder: Path) -> dict[str, Any]:
    (folder / "own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForImageTextToText": "own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    return {"trust_remote_code": True}


WAYS = [
    lambda _: {},
    lambda _: {"device_map": "cpu"},
    pytest.param(offloaded, id="offloaded"),
    pytest.param(
        lambda _: {"quantization_config": QuantoConfig(weights="int8")},
        marks=needs("optimum.quanto"),
        id="quanto",
    ),
    pytest.param(by_torchao, marks=needs("torchao"), id="torchao"),
    pytest.param(by_own_code, id="own code"),
]


def loaded(folder: Path, given: dict[str, Any]) -> Tiny:
    this = build(FAMILY)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, **given)
    this.model = model.eval()
    return this


@pytest.mark.parametrize("way", WAYS)
def test_it_is_reduced_as_by_hand_and_restored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    this = loaded(folder, way(folder))
    inputs = this.inputs(["on {video} what?"], videos=this.videos(1))

    @torch.no_grad()
    def logits() -> torch.Tensor:
        found: torch.Tensor = this.model(**inputs).logits[0]
        return found

    stock = logits()
    with mmfast.attach(this.model, "random:1.0"):
        assert torch.equal(logits(), stock)
    prompt = oracle.embed(this, inputs)
    for spec in ("random:0.4", "random@llm1:0.4"):
        with mmfast.attach(this.model, spec) as trace:
            found = logits()
        keep = oracle.kept_places(prompt, trace.reductions)
        assert len(keep) < len(prompt.embeds)
        with torch.no_grad():
            by_hand = (
                oracle.masked(this, prompt, trace.reductions)[keep]
                if "@" in spec
                else oracle.removed(this, prompt, keep)
            )
        torch.testing.assert_close(found, by_hand, atol=1e-5, rtol=0)
        assert torch.equal(logits(), stock)


def test_a_pipeline_answers_alike_from_disk_and_a_stream_says_why_not(folder: Path) -> None:
    clip, kwargs = watcher(FAMILY).clip(4), {"dtype": "float32"}
    answers = [
        mmfast.pipeline("video-qa", str(folder), reduce="random:0.4", **kwargs, model_kwargs=given)(
            clip, "What?", max_new_tokens=4
        ).text
        for given in ({}, offloaded(folder))
    ]
    assert answers[0] == answers[1]
    with pytest.raises(ModelError, match=r"is offloaded, and streams .*use pipeline\('video-qa'\)"):
        mmfast.pipeline("video-stream", str(folder), **kwargs, model_kwargs=offloaded(folder))


QUANTISERS = [
    pytest.param(
        QuantoConfig,
        marks=pytest.mark.skipif(bool(find_spec("optimum")), reason="optimum-quanto is there"),
    ),
    pytest.param(HqqConfig, marks=needs("hqq")),  # which transformers refuses
]


@pytest.mark.parametrize("config", QUANTISERS)
def test_a_quantiser_that_cannot_be_is_one_line(folder: Path, config: Any) -> None:
    kwargs = {"quantization_config": config()}
    with pytest.raises(ModelError, match=r"(?i)quanto|hqq") as caught:
        mmfast.pipeline("video-qa", str(folder), model_kwargs=kwargs)
    assert "\n" not in str(caught.value)
