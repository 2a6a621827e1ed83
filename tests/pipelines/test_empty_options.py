"""An empty spec is none, in the API as on the command line; an empty `reuse` is a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import generate, tiny, video_prompt

import mmfast
from mmfast.attach import attach
from mmfast.core.errors import MmfastError
from mmfast.voice.models import load_listener

CLIP = Path(__file__).resolve().parents[2] / "assets" / "clips" / "red-circle.mp4"
EMPTY = {"reduce": "", "cache": "", "decode": "", "prefill": ""}
QUESTION = "Which way does the red circle move?"


def test_an_attached_model_is_stock() -> None:
    this = tiny("llava_onevision")
    inputs = video_prompt(this)
    stock = generate(this, inputs, 4)
    for given in ({name: ""} for name in EMPTY):
        with attach(this.model, **given) as trace:
            found = generate(this, inputs, 4)
        assert torch.equal(torch.cat(found.logits), torch.cat(stock.logits))
        assert not trace.rows and not trace.notes


@pytest.mark.parametrize("more", [{}, {"reuse": "prefix"}])
def test_a_pipeline_reads_all_tokens(more: dict[str, Any]) -> None:
    plain = mmfast.pipeline("video-qa", device="cpu")(CLIP, QUESTION)
    found = mmfast.pipeline("video-qa", device="cpu", **EMPTY, **more)(CLIP, QUESTION)
    assert found.text == plain.text == "left"
    assert found.kept_tokens == found.visual_tokens == plain.visual_tokens


def test_a_stream_keeps_all_tokens() -> None:
    def held(**given: Any) -> int:
        session = mmfast.pipeline("video-stream", device="cpu", **given).open()
        session.push(torch.zeros(64, 64, 3, dtype=torch.uint8).numpy())
        return int(session.stats()["tokens"])

    assert held(reduce="", decode="") == held() > held(reduce="uniform:0.25")


def test_a_listener_that_is_none_takes_empty_options() -> None:
    assert load_listener(None, {"reduce": "", "cache": ""}) is None
    with pytest.raises(MmfastError, match=r"^cache without a listener"):
        load_listener(None, {"reduce": "", "cache": "snapkv:8"})


@pytest.mark.parametrize("task", ["image-qa", "video-qa", "video-stream"])
def test_an_empty_reuse_is_refused(task: str) -> None:
    with pytest.raises(MmfastError, match=r"unknown reuse ''; choices: blend, craft") as error:
        mmfast.pipeline(task, device="cpu", reuse="")
    assert "\n" not in str(error.value)
