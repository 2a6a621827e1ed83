"""LiveVLM: the attention of visual tokens, in parts, batches and later turns, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_checks import evict
from cache_factory import make
from cache_questions import ask, kinds_of, model_of, queries
from cache_runs import close, rows, run
from model_oracle import embed
from oracles_caches import visual_attention
from text_zoo import prompt, text_model, written
from tiny_models import generate

import mmfast
from mmfast.attach import attach
from mmfast.caches.plan import plan_cache
from mmfast.core.errors import SpecError
from mmfast.models.kv import notes
from mmfast.models.kv.view import view_plan

ALL = "livevlm:4000?window=5"  # nothing leaves, and the note is there to be read
FAMILY = "qwen2_5_vl"


def noted(cache: Any) -> list[torch.Tensor]:
    return [layer.notes[notes.VISION] for layer in cache.layers]


def by_hand() -> list[np.ndarray]:
    this = model_of(FAMILY)
    inputs = ask(this)
    kinds = kinds_of(this, inputs, embed(this, inputs))
    cache = this.model(**inputs, use_cache=True).past_key_values
    asks = [place for place, kind in enumerate(kinds) if kind == 1][-5:]
    layers = enumerate(this.model.get_decoder().layers)
    return [
        visual_attention(
            queries(FAMILY)[i], cache.layers[i].keys[0].numpy(), asks, layer.self_attn.scaling
        )
        for i, layer in layers
    ]


@pytest.mark.parametrize("part", [None, 3, 7])
def test_visual_tokens_ask_in_whatever_parts_they_come(part: int | None) -> None:
    this = model_of(FAMILY)
    options = {} if part is None else {"prefill_chunk_size": part}
    with attach(this.model, cache=ALL):
        cache = generate(this, ask(this), 1, **options).past_key_values
    for found, want in zip(noted(cache), by_hand(), strict=True):
        torch.testing.assert_close(found[0].double(), torch.from_numpy(want), atol=1e-6, rtol=0)


def test_another_window_is_another_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle sees queries that are one place off."""
    true = notes.note_vision
    monkeypatch.setattr(
        "mmfast.models.kv.eviction.note_vision",
        lambda layer, keys, window, drafts=0: true(layer, keys, window - 1, drafts),
    )
    with pytest.raises(AssertionError):
        test_visual_tokens_ask_in_whatever_parts_they_come(None)


def test_a_later_turn_without_media_keeps_the_scores() -> None:
    this = model_of(FAMILY)
    with attach(this.model, cache=ALL):
        cache = this.model(**ask(this), use_cache=True).past_key_values
        before = [note.clone() for note in noted(cache)]
        this.model(input_ids=torch.tensor([[5, 6, 7]]), past_key_values=cache)
    for found, old in zip(noted(cache), before, strict=True):
        assert torch.equal(found[..., : old.shape[-1]], old) and float(old.sum()) > 0
        assert not found[..., old.shape[-1] :].any()


def test_a_batch_equals_its_rows() -> None:
    this = model_of("llava_onevision")
    spec = "livevlm:0.5?window=5"
    together = run(this, rows(this, [0, 1]), spec, tokens=4)
    for row in range(2):
        close(together, run(this, rows(this, [row]), spec, tokens=4), row)


def test_buckets_cover_the_timeline_and_sinks_stay() -> None:
    tokens = make("film", 1, 120)
    tokens.signals["attn_vision"] = torch.arange(120.0)[None]  # the latest are looked at most
    tokens.signals["attn_vision"][0, 7] = 999.0
    crowd = evict(tokens, "livevlm:12?recent=0&first=1").keep[0].tolist()
    assert crowd == [7, *range(109, 120)]
    spread = evict(tokens, "livevlm:12?recent=0&first=0").keep[0].tolist()
    assert spread == [7, *range(19, 120, 10)]
    assert evict(tokens, "livevlm:12?recent=0.5&first=0").keep[0, -6:].tolist() == [
        *range(114, 120)
    ]


def test_text_alone_keeps_its_end() -> None:
    model, ids = text_model("llama"), {"input_ids": prompt(30)}
    with attach(model, cache="livevlm:12"):
        new = written(model, ids, 4)
    with attach(model, cache="streammem:12"):
        other = written(model, ids, 4)
    assert torch.equal(new[0], other[0]) and torch.equal(new[1], other[1])


def test_a_pipeline_takes_it() -> None:
    clip = Path(__file__).parents[2] / "assets/clips/red-circle.mp4"
    answer = mmfast.pipeline("video-qa", cache="livevlm:0.5")(clip, "Which way does it move?")
    (row,) = [row for row in answer.trace.rows if row.stage == "kv"]
    assert answer.text and row.tokens_out == round(0.5 * row.tokens_in)


def test_it_is_refused_where_it_cannot_act() -> None:
    model = text_model("llama")
    for spec, words in (
        ("livevlm:0.5?every=4", "every"),
        ("livevlm:0.5?recent=1.5", "recent=1.5"),
        ("livevlm:9?bucket=0", "bucket=0"),
        ("livevlm:9?window=0", "window=0"),
    ):
        with pytest.raises(SpecError, match=words) as error, attach(model, cache=spec):
            written(model, {"input_ids": prompt(30)}, 2)
        assert "\n" not in str(error.value)
    with pytest.raises(SpecError, match="decode 'self' cannot choose by 'livevlm'"):
        view_plan("livevlm", 0.5)
    plan = plan_cache("livevlm:0.5?window=9")
    assert plan is not None and plan.vision == 9 and plan.rereads is None
