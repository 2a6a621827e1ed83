"""`decode=` in pipelines, on the command line and in requests to the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runs import CLIP, QUESTION, fails, run
from pydantic import ValidationError

import mmfast
from mmfast.cli.options import complete_decode
from mmfast.core.errors import SpecError
from mmfast.decoding.speculation import Recycler
from mmfast.models.decoder.draft_stage import DraftSource
from mmfast.serve.http.schema import MmfastOptions

LONG = {"max_new_tokens": 10, "min_new_tokens": 10}
SPECS = ("self:0.1", "self?reduce=divprune:0.25", "recycle", "lookup")


@pytest.fixture(scope="module")
def stock() -> Any:
    return mmfast.pipeline("video-qa", device="cpu", **LONG)


def _with(stock: Any, decode: str, **options: Any) -> Any:
    pair = (stock.model, stock.processor)
    return mmfast.pipeline("video-qa", pair, decode=decode, **LONG, **options)


@pytest.mark.parametrize("spec", SPECS)
def test_answers_are_those_without_drafts(stock: Any, spec: str) -> None:
    want = stock(CLIP, QUESTION)
    pipe = _with(stock, spec)
    found = pipe(CLIP, QUESTION)
    assert found.text == want.text
    (row,) = [row for row in found.trace.rows if row.stage == "draft"]
    assert row.tokens_in >= row.tokens_out and row.method.startswith(spec)
    stages = {row.stage: row.ms for row in found.trace.rows}
    assert stages["prefill"] > 0 and stages["generate"] > 0
    assert "".join(pipe.stream(CLIP, QUESTION)).strip() == want.text


def test_several_questions_at_once(stock: Any) -> None:
    asked = [QUESTION, "What shape is it?", "Is it red?"]
    want = [each.text for each in stock(CLIP, asked, batch_size=3)]
    assert [a.text for a in _with(stock, "self:0.1")(CLIP, asked, batch_size=3)] == want


@pytest.mark.slow
def test_a_seed_repeats_what_is_drawn(stock: Any) -> None:
    for spec in ("self:0.1", "recycle"):
        pipe = _with(stock, spec)
        texts = {pipe(CLIP, QUESTION, temperature=2.0, seed=seed).text for seed in (5, 5, 5)}
        assert len(texts) == 1
        other = {pipe(CLIP, QUESTION, temperature=2.0, seed=seed).text for seed in range(6)}
        assert len(other) > 1


def test_ask_counts_the_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    texts = set()
    for more in ([], ["--decode", "self:0.1"], ["--decode", "recycle", "--reduce", "evs:0.99"]):
        code, out, _ = run(capsys, "ask", CLIP, QUESTION, *more, "--json")
        document = json.loads(out)
        assert code == 0
        texts.add(document["answer"])
        drafts = [row for row in document["trace"] if row["stage"] == "draft"]
        assert len(drafts) == bool(more)
    assert len(texts) == 1


def test_wrong_specs_end_before_any_weight_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    words = "did you mean 'recycle'"
    for command in ("ask", "profile"):
        assert words in fails(
            capsys, command, CLIP, QUESTION, "--model", "no", "--decode", "recicle"
        )
    with pytest.raises(SpecError, match=words):
        mmfast.pipeline("video-qa", model="no", decode="recicle")
    assert complete_decode("re") == ["recycle"]


def test_a_request_to_the_server_has_the_option() -> None:
    assert MmfastOptions.model_validate({"decode": "self:0.1"}).decode == "self:0.1"
    with pytest.raises(ValidationError, match="decode"):
        MmfastOptions.model_validate({"decode": 1})


def test_what_drafts_is_made_once_and_learns_from_one_question_to_the_next(
    stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, chains = list[str](), list[int]()
    learn, kept = Recycler.learn, DraftSource.__init__

    def noted(self: Recycler, tokens: Any, candidates: Any) -> None:
        chains.append(len(self))
        learn(self, tokens, candidates)

    def counted(self: DraftSource, model: Any, plan: Any) -> None:
        made.append(plan.kind)
        kept(self, model, plan)

    monkeypatch.setattr(Recycler, "learn", noted)
    monkeypatch.setattr(DraftSource, "__init__", counted)
    pipe = _with(stock, "recycle?adapt=false")
    texts = {pipe(CLIP, QUESTION, max_new_tokens=3, min_new_tokens=3).text for _ in range(2)}
    assert len(texts) == 1 and made == ["recycle"]
    assert chains[-1] > chains[0]


def test_a_target_beside_an_early_exit_is_refused_at_once(stock: Any, tmp_path: Path) -> None:
    for more in ({"reduce": "auto"}, {"reduce": "evs:0.5"}, {"cache": "snapkv:8"}):
        with pytest.raises(SpecError, match="whole cache"):
            _with(stock, f"exit:{tmp_path}", **more)
