"""A draft model that learns from what was corrected: more of it stands, and answers stay."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_models import tiny as text_model
from tiny_models import generate, tiny
from torch.nn import functional as F

from mmfast.attach import attach
from mmfast.core.errors import SpecError
from mmfast.decoding.speculation import plan_decode
from mmfast.models.decoder import online_draft
from mmfast.models.decoder.draft_stage import DraftSource
from mmfast.models.decoder.online_draft import CorrectionLessons, OnlineLearner

FIXED = "adapt=0&least=0&most=3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of text alone that knows nothing yet."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    home = tmp_path_factory.mktemp("pupil")
    words = tiny("llava_onevision").model.config.get_text_config()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=words.vocab_size, **sizes, **heads)).save_pretrained(
        home
    )
    return home


def _asked(rows: int = 1) -> dict[str, Any]:
    this = tiny("llava_onevision")
    texts = ["on {video} what?", "so {video}!"][:rows]
    return this.inputs(texts, **this.media("video", rows, 0))


def _shares(folder: Path, rate: float, rounds: int, rows: int = 1) -> list[float]:
    """Accepted shares of one question that comes again and again; the answers are checked."""
    this, inputs, found = tiny("llava_onevision"), _asked(rows), list[float]()
    want = generate(this, inputs, 12).sequences
    with attach(this.model, decode=f"draft:{folder}?{FIXED}&learn={rate}") as trace:
        for _ in range(rounds):
            assert torch.equal(generate(this, inputs, 12).sequences, want)
            row = [row for row in trace.rows if row.stage == "draft"][-1]
            found.append(row.tokens_out / row.tokens_in)
    return found


def test_more_drafts_stand_of_a_question_that_comes_again(tmp_path: Path) -> None:
    model = text_model("llama", num_hidden_layers=3)
    text_model("qwen2", seed=4, scale=1.0).save_pretrained(tmp_path)
    ids, shares = torch.tensor([[3, 4, 5, 9]]), list[float]()
    how = {"max_new_tokens": 14, "do_sample": False}
    want = model.generate(ids, **how)
    with attach(model, decode=f"draft:{tmp_path}?{FIXED}&learn=0.02") as trace:
        for _ in range(4):
            assert torch.equal(model.generate(ids, **how), want)
            row = [row for row in trace.rows if row.stage == "draft"][-1]
            shares.append(row.tokens_out / row.tokens_in)
    assert shares[-1] > shares[0] + 0.3


@pytest.mark.slow
def test_more_drafts_stand_of_one_that_sees(folder: Path) -> None:
    shares = _shares(folder, 0.01, 6)
    assert shares[0] < 0.2 and shares[-1] > 0.5


@pytest.mark.slow
def test_a_lesson_of_other_words_does_not_help(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = CorrectionLessons.judged

    def early(self: CorrectionLessons, row: int) -> None:
        before = len(self.waiting)
        stock(self, row)
        for each in self.waiting[before:]:
            each.p = each.p.flip(0)

    monkeypatch.setattr(CorrectionLessons, "judged", early)
    assert max(_shares(folder, 0.01, 6)) < 0.3


@pytest.mark.slow
def test_rows_of_a_batch_and_no_rate(folder: Path) -> None:
    with torch.inference_mode():  # as pipelines call it
        shares = _shares(folder, 0.01, 16, rows=2)
    assert shares[-1] > shares[0] + 0.3
    assert len(set(_shares(folder, 0.0, 3))) == 1


@pytest.mark.slow
def test_the_loss_is_the_divergence_at_the_corrected_places(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, inputs = tiny("llava_onevision"), _asked()
    given = {key: value for key, value in inputs.items() if key != "attention_mask"}
    text = inputs["input_ids"][inputs["input_ids"] != this.model.config.video_token_id][None]
    found: list[tuple[float, float]] = []
    stock = OnlineLearner.step

    def checked(self: OnlineLearner) -> None:
        lessons, losses = self._lessons, len(self.losses)
        want = list[torch.Tensor]()
        for each in lessons.waiting if lessons is not None else ():
            said = torch.tensor([lessons._text.said[0][: each.place]])
            with torch.no_grad():
                whole = torch.cat([inputs["input_ids"], said], 1)
                p = this.model(**{**given, "input_ids": whole}).logits[0, -1].softmax(-1)
                q = self.model(input_ids=torch.cat([text, said], 1)).logits[0, -1]
            want.append(F.kl_div(q.log_softmax(-1), p, reduction="sum"))
        stock(self)
        if len(self.losses) > losses:
            found.append((self.losses[-1], float(torch.stack(want).mean())))

    monkeypatch.setattr(OnlineLearner, "step", checked)
    monkeypatch.setattr(online_draft, "EVERY", 8)
    with attach(this.model, decode=f"draft:{folder}?{FIXED}&learn=0.001"):
        generate(this, inputs, 14)
    assert len(found) >= 2
    for mine, want in found:
        assert abs(mine - want) < 1e-3 * want


def test_specs_that_learn() -> None:
    plan = plan_decode("draft:small?learn=1e-4")
    assert plan is not None and plan.learn == 1e-4
    for text, words in (
        ("draft:small?learn=2", "no rate"),
        ("draft:small?learn=1e-3&tree=2", "from chains"),
        ("self:0.1?learn=1e-3", "unknown knob"),
        ("draft:small?learn=1e-3&learn=1e-4", "twice"),
    ):
        with pytest.raises(SpecError, match=words):
            plan_decode(text)


def test_nothing_of_a_prompt_stays_and_threads_take_turns(tmp_path: Path) -> None:
    model = text_model("llama", num_hidden_layers=3)
    text_model("qwen2", seed=4, scale=1.0).save_pretrained(tmp_path)
    plan = plan_decode(f"draft:{tmp_path}?{FIXED}&learn=0.02")
    assert plan is not None
    source, how = DraftSource(model, plan), {"max_new_tokens": 12, "do_sample": False}
    asked = [torch.tensor([[3, 4, 5, 9]]), torch.tensor([[7, 2, 8, 1, 1]])] * 2
    want = [model.generate(ids, **how) for ids in asked]
    with attach(model, decode=source), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda ids: model.generate(ids, **how), asked))
    assert all(map(torch.equal, found, want))
    learner = source._learner
    assert learner is not None and len(learner.losses) > 1
    assert learner._lessons is None and learner.losses.maxlen
    before = list(learner.losses)
    with attach(model, decode=source):  # goes on where it was
        model.generate(asked[0], **how)
    assert list(learner.losses)[: len(before)] == before
