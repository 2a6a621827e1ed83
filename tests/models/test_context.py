"""Prompts that are longer than the context of a model are refused, in one line and at once."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mmfast
from mmfast.core.errors import ContextError
from mmfast.core.speech import Turn
from mmfast.models.context import check_length, longest_prompt
from mmfast.models.text_chat import TextChat
from mmfast.serve.engine.request import context_of, fitting
from mmfast.serve.guard.errors import api_error, body

IMAGE, CLIP = 7, 8


def model(places: int | None, rope: Any = None) -> Any:
    """What is read of a model: a configuration."""
    text = SimpleNamespace(max_position_embeddings=places, rope_parameters=rope)
    ids = {"image_token_id": IMAGE, "video_token_id": CLIP}
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text, **ids))


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        [None, 100],
        [{"rope_type": "default", "factor": 4.0}, 100],
        [{"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 25}, 100],
        [{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400],
        [{"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 50}, 100],
        [{"rope_type": "dynamic", "factor": 2.5}, 250],
        [{"wide": {"rope_type": "linear", "factor": 8.0}, "near": {"rope_type": "default"}}, 800],
    ],
)
def test_scaled_positions_reach_as_far_as_they_are_scaled(rope: Any, most: int) -> None:
    assert longest_prompt(model(100, rope)) == context_of(model(100, rope)) == most
    assert longest_prompt(model(None, rope)) is None and context_of(model(None)) == 4096


def test_prompts_are_counted_without_padding_and_what_is_no_position() -> None:
    """Random rows against a count by hand."""
    rng = random.Random(5)
    kinds = [("plain", None, False), ("reduced", None, True)]
    kinds += [("mrope", {"rope_type": "default", "mrope_section": [8, 12, 12]}, False)]
    seen = set()
    for _ in range(200):
        rows = [[rng.choice((1, 1, IMAGE, CLIP)) for _ in range(rng.randint(1, 12))] for _ in "ab"]
        wide = max(map(len, rows))
        ids = torch.tensor([[0] * (wide - len(row)) + row for row in rows])
        inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
        places = rng.randint(1, 12)
        for name, rope, reduced in kinds:
            alone = [sum(token == 1 for token in row) for row in rows]
            long = max(map(len, rows) if name == "plain" else alone) > places
            seen.add((name, long))
            if not long:
                check_length(model(places, rope), inputs, reduced)
                continue
            with pytest.raises(ContextError, match=f"longer than the {places} ") as error:
                check_length(model(places, rope), inputs, reduced)
            assert "\n" not in str(error.value)
    assert len(seen) == 6


def test_pipelines_refuse_before_they_work() -> None:
    pipe = mmfast.pipeline("video-qa", device="cpu", max_new_tokens=2)
    clip = np.zeros((8, 96, 96, 3), np.uint8)
    start = time.perf_counter()
    for question in ("a" * 100_000, "which way does it move? " * 4000):
        for ask in (pipe, pipe.stream, pipe.plan):
            with pytest.raises(ContextError, match=r"longer than the 4,096 .*fewer words"):
                ask(clip, question)
    assert time.perf_counter() - start < 30
    long = mmfast.pipeline("video-qa", (pipe.model, pipe.processor), frames=130)
    with pytest.raises(ContextError, match=r"of media.*fewer or smaller media"):
        long(np.zeros((130, 96, 96, 3), np.uint8), "which way does it move?")


def test_talks_are_refused_and_the_server_says_openai_s_code() -> None:
    pipe = mmfast.pipeline("image-qa", device="cpu")
    chat = TextChat(pipe.model, pipe.processor.tokenizer)
    with pytest.raises(ContextError, match="fewer words"):
        list(chat([Turn("user", "why " * 5000)]))
    with pytest.raises(ContextError) as error:
        fitting(90, 20, 100)
    reply = body(error.value)["error"]
    assert "maximum context length is 100 tokens" in reply["message"]  # LiteLLM looks for this
    assert reply["code"] == "context_length_exceeded" and "\n" not in reply["message"]
    assert reply["type"] == "invalid_request_error" and api_error(error.value).status == 400


def test_a_question_to_a_stream_is_refused_and_leaves_no_trace() -> None:
    """However little of the stream is held: a question is read whole."""
    with mmfast.pipeline("video-stream", device="cpu").open(memory="sink:4+window:64") as session:
        for second in range(2):
            session.push(np.full((96, 96, 3), 90 * second, np.uint8), float(second))
            with pytest.raises(ContextError, match=r"longer than the 4,096 .*fewer words"):
                session.ask("a" * 100_000)
            before = session.stats()["questions"]
            assert "".join(session.ask("Which colour is it?", max_new_tokens=3))
            assert session.stats()["questions"] == before + 1
