"""Visual tokens that are swapped while an answer is written: equal to a step that hides them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import oracles_select as oracles
import pytest
import torch
from cache_runs import close, rows, run
from text_zoo import prompt, text_model, written
from tiny_models import tiny

import mmfast
from mmfast.attach import attach
from mmfast.models.reduction.probe import intercepting
from mmfast.models.wrappers import attention_at

SPEC = "dstp:0.3?similar=0.9&hold=2"


def hiding(model: Any, inputs: dict[str, Any], seen: list[list[set[int]]]) -> Any:
    """The stock attention of decode steps under a mask that hides what the oracle leaves out."""
    token = model.config.image_token_id if "pixel_values" in inputs else model.config.video_token_id
    visual = set((inputs["input_ids"][0] == token).nonzero()[:, 0].tolist())
    if model.config.model_type == "llava_onevision" and "pixel_values_videos" in inputs:
        visual -= {max(visual)}  # the newline behind a clip
    asked: dict[int, list[np.ndarray]] = {}

    def around(index: int, call: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value, mask, *rest = args
        if query.shape[2] > 1:
            return call(module, *args, **kwargs)
        asked.setdefault(index, []).append(query[0, :, 0].double().numpy())
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        read = oracles.dstp(asked[index], key[0].double().numpy(), visual, scale, 0.3, 0.9, 2)
        seen.append(read)
        hidden = torch.full((len(read), key.shape[2]), torch.finfo(query.dtype).min)
        for head, places in enumerate(read):
            hidden[head, sorted(places)] = 0.0
        hidden = hidden.repeat_interleave(query.shape[1] // len(read), 0)[None, :, None]
        added = hidden if mask is None else hidden.masked_fill(~mask, hidden.min())
        return call(module, query, key, value, added, *rest, **kwargs)

    layers = range(model.config.get_text_config().num_hidden_layers)
    return intercepting({attention_at(model.get_decoder(), i): partial(around, i) for i in layers})


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
def test_swapped_tokens_equal_a_mask(family: str) -> None:
    this, seen = tiny(family), list[list[set[int]]]()
    inputs = rows(this, [3])
    with attach(this.model, cache=SPEC) as trace:
        found = written(this.model, inputs, 9, suppress_tokens=this.blocked())
    with hiding(this.model, inputs, seen):
        want = written(this.model, inputs, 9, suppress_tokens=this.blocked())
    torch.testing.assert_close(found[1], want[1], atol=2e-5, rtol=0)
    assert torch.equal(found[0], want[0]) and len(trace.reads) == 8
    layers = len(seen) // 8
    heads = len(seen[0])
    for number, each in enumerate(trace.reads):
        read = sum(len(mine) for step in seen[number * layers :][:layers] for mine in step)
        assert each.read == pytest.approx(read / layers / heads) and each.read < each.held
    gains = {round(each.read - number, 3) for number, each in enumerate(trace.reads)}
    assert len(gains) > 1  # some steps read more beside those kept


def test_rows_of_a_batch_swap_by_themselves() -> None:
    this = tiny("qwen2_5_vl")
    together = run(this, rows(this, [0, 3]), SPEC, tokens=6)
    for number, row in enumerate((0, 3)):
        close(together, run(this, rows(this, [row]), SPEC, tokens=6), number)


def test_all_visual_tokens_is_the_stock_model() -> None:
    this = tiny("llava_onevision")
    inputs = rows(this, [1])
    stock = run(this, inputs, None, tokens=5)
    for spec in ("dstp:1.0", "dstp:9999"):
        close(run(this, inputs, spec, tokens=5), stock)


def test_a_prompt_without_pictures_says_so() -> None:
    model = text_model("llama")
    with attach(model, cache=SPEC) as trace, pytest.warns(UserWarning, match="no visual tokens"):
        written(model, {"input_ids": prompt(21)}, 4)
    assert all(each.read == each.held for each in trace.reads)
    assert sum("reads everything" in note for note in trace.notes) == 1


def test_a_pipeline_reads_fewer_visual_tokens() -> None:
    pipe = mmfast.pipeline("video-qa", cache="dstp:0.25")
    answer = pipe("assets/clips/red-circle.mp4", "Describe the video.")
    (row,) = [row for row in answer.trace.rows if row.stage == "select"]
    assert 0 < row.tokens_out < 0.6 * row.tokens_in
