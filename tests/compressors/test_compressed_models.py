"""Learned compressors in stock models: attach, pipelines, eval, and refusals in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny
from torch import Tensor

import mmfast
from mmfast import ModelError, SpecError
from mmfast.attach import attach
from mmfast.compressors import base
from mmfast.compressors.query_compressor import QueryCompressor
from mmfast.core.spec import parse
from mmfast.frontends.video.reader import read_video
from mmfast.models.loading import embedded_path, load
from mmfast.models.prompt import Shot, build_inputs
from mmfast.models.reduction.check import check, refuse_files
from mmfast.models.reduction.inputs import compress
from mmfast.tiny.evaluate import run_eval
from mmfast.vllm.plan import parse_plan

CLIP = Path(__file__).parents[2] / "assets" / "clips" / "red-circle.mp4"
QUESTIONS = ("Which way does the red circle move?", "How many objects are there?")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights for 2 tokens a frame that change everything."""
    torch.manual_seed(3)
    made = QueryCompressor(192, 2, (6, 6), inner=24, heads=3)
    torch.nn.init.normal_(made.change.weight, std=0.05)
    path = tmp_path_factory.mktemp("weights") / "two.safetensors"
    base.save(made, path)
    return path


@pytest.fixture(scope="module")
def subject() -> Iterator[tuple[Any, Any]]:
    yield load(embedded_path("tiny-video"), "cpu", "float32")


def inputs_of(processor: Any, questions: tuple[str, ...]) -> dict[str, Any]:
    clip = read_video(CLIP, frames=8)
    shot = Shot("video", clip.frames, clip.metadata())
    return dict(build_inputs(processor, [[shot]] * len(questions), list(questions), "cpu"))


@torch.no_grad()
def by_hand(model: Any, path: Path, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Embeddings and positions of one prompt with the compressed vectors in it."""
    ids, core = inputs["input_ids"][0], model.model
    shown = ids == model.config.video_token_id
    stock = core.get_video_features(inputs["pixel_values_videos"]).pooler_output
    rows = torch.cat([each.reshape(-1, 192) for each in stock])  # 288 patches and a newline
    embed = model.get_input_embeddings()
    out = base.load(path)(rows[:288].view(8, 36, 192), embed(ids[~shown]))
    first = int(shown.nonzero()[0])
    hidden = torch.cat(
        [embed(ids[:first]), out.vectors.flatten(0, 1), rows[288:], embed(ids[first + 289 :])]
    )
    kept = (out.place + 36 * torch.arange(8)[:, None]).flatten()
    behind = torch.arange(first + 288, len(ids))
    places = torch.cat([torch.arange(first), first + kept, behind])
    return hidden[None], places[None]


def test_attach_and_generate_equal_the_vectors_fed_by_hand(
    subject: tuple[Any, Any], weights: Path
) -> None:
    model, processor = subject
    inputs = inputs_of(processor, QUESTIONS[:1])
    hidden, places = by_hand(model, weights, inputs)
    with torch.no_grad():
        expected = model.model.language_model(
            inputs_embeds=hidden, position_ids=places
        ).last_hidden_state
        expected = model.lm_head(expected)[0, -1]
    how = {"max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True}
    with attach(model, f"query_compressor:2?path={weights}") as trace:
        out = model.generate(**inputs, **how)
    torch.testing.assert_close(out.logits[0][0], expected, rtol=1e-5, atol=1e-5)
    (_, _, reduction) = trace.reductions[0]
    assert (reduction.n, reduction.m) == (288, 16)
    without = model.generate(**inputs, **how)
    assert not torch.allclose(without.logits[0], out.logits[0], atol=1e-2)
    compressed = compress(model, inputs, f"query_compressor:2?path={weights}")
    again = model.generate(**compressed, **how)
    torch.testing.assert_close(again.logits[0], out.logits[0], rtol=1e-5, atol=1e-5)


def test_each_row_of_a_batch_is_compressed_for_its_own_question(
    subject: tuple[Any, Any], weights: Path
) -> None:
    model, processor = subject
    spec = f"query_compressor:2?path={weights}"
    how = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    with attach(model, spec):
        both = model.generate(**inputs_of(processor, QUESTIONS), **how).logits[0]
        for row, question in enumerate(QUESTIONS):
            one = model.generate(**inputs_of(processor, (question,)), **how).logits[0][0]
            torch.testing.assert_close(both[row], one, rtol=1e-4, atol=1e-4)


def test_a_second_stage_behind_it(subject: tuple[Any, Any], weights: Path) -> None:
    model, processor = subject
    inputs, spec = inputs_of(processor, QUESTIONS[:1]), f"query_compressor:2?path={weights}"
    how = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    with attach(model, f"{spec}+divprune:5") as trace:
        model.generate(**inputs, **how)
    assert [reduction.m for _, _, reduction in trace.reductions] == [16, 5]


def test_a_share_of_one_is_the_stock_model(subject: tuple[Any, Any]) -> None:
    model, processor = subject
    inputs = inputs_of(processor, QUESTIONS[:1])
    with torch.no_grad():
        stock = model(**inputs).logits
        with attach(model, "query_compressor:1.0"):
            assert torch.equal(model(**inputs).logits, stock)


def test_weights_beside_the_checkpoint_are_found(
    subject: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = subject
    with pytest.raises(ModelError) as caught:
        check(parse("query_compressor:3"), model)
    text = str(caught.value)
    assert "python -m mmfast.compressors.train" in text and "\n" not in text
    file = base.file_of(tmp_path, "query_compressor", 3)
    base.save(QueryCompressor(192, 3, (6, 6), inner=24, heads=3), file)
    monkeypatch.setattr(model.config, "_name_or_path", str(tmp_path))
    monkeypatch.setattr(model, "name_or_path", str(tmp_path))
    (spec,) = check(parse("query_compressor:3"), model)
    assert spec.knobs["path"] == str(file)


def test_the_shipped_weights_answer_in_a_pipeline() -> None:
    pipe = mmfast.pipeline("video-qa", "tiny-video", reduce="query_compressor:1")
    answer = pipe(str(CLIP), QUESTIONS[0])
    row = next(row for row in answer.trace.rows if row.method == "query_compressor")
    assert (row.tokens_in, row.tokens_out) == (288, 8)
    assert answer.text == "left"


def test_eval_counts_the_tokens(weights: Path) -> None:
    document = run_eval([f"query_compressor:2?path={weights}"], n=8, seed=3)
    assert [row["kept"] for row in document["rows"]] == [288.0, 16.0]


def test_where_it_cannot_act_it_is_refused(weights: Path) -> None:
    spec = f"query_compressor:1?path={weights}"
    with pytest.raises(SpecError, match="looks at the question"):
        parse_plan(spec)
    with pytest.raises(SpecError, match="a request must not"):
        refuse_files(parse(spec))
    deep = tiny("qwen3_vl").model
    with pytest.raises(ModelError, match="DeepStack"):
        check(parse(spec), deep)
    with pytest.raises(SpecError, match="cannot reduce a stream"):
        mmfast.pipeline("video-stream", reduce=spec).open()
    pipe = mmfast.pipeline("image-qa", "tiny-video", reduce="query_compressor:1")
    with pytest.raises(ModelError, match=r"^'query_compressor@pre:1' needs 'grid', .* full raster"):
        pipe(np.zeros((64, 64, 3), np.uint8), "What colour is it?")
