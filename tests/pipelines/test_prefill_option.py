"""`prefill=` and `attn=` in pipelines, on the command line and in the server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cli_runs import CLIP, QUESTION, fails, run

import mmfast
from mmfast.bench.suites.sparse_prefill import sparse_rows
from mmfast.cli.options import complete_attn, complete_prefill
from mmfast.core.errors import ModelError, SpecError

SPEC = "sample_attention:0.9?least=32&block=16&rows=0.2"


@pytest.fixture(scope="module")
def stock() -> Any:
    return mmfast.pipeline("video-qa", device="cpu")


def test_a_pipeline_reads_a_part_and_answers(stock: Any) -> None:
    pair = (stock.model, stock.processor)
    answer = mmfast.pipeline("video-qa", pair, prefill=SPEC, reduce="evs:0.5")(CLIP, QUESTION)
    (row,) = [row for row in answer.trace.rows if row.stage == "sparse"]
    assert 0 < row.tokens_out < row.tokens_in and row.method.startswith("sample_attention:0.9")
    whole = mmfast.pipeline("video-qa", pair, prefill="pbs:1.0?least=1")(CLIP, QUESTION)
    assert whole.text == stock(CLIP, QUESTION).text == answer.text


def test_refusals_are_one_line(stock: Any) -> None:
    pair = (stock.model, stock.processor)
    with pytest.raises(SpecError, match="flexprefill"):
        mmfast.pipeline("video-qa", pair, prefill="flexprefil")
    with pytest.raises(SpecError, match="reuse='encoder'"):
        mmfast.pipeline("video-qa", pair, prefill=SPEC, reuse="prefix")
    with pytest.raises(ModelError, match="set_attn_implementation"):
        mmfast.pipeline("video-qa", pair, attn="eager")
    with pytest.raises(ModelError, match="flash-attn"):
        mmfast.pipeline("video-stream", attn="flash_attention_2")


def test_a_pipeline_loads_with_a_back_end() -> None:
    pipe = mmfast.pipeline("video-qa", device="cpu", attn="eager")
    assert pipe.model.get_decoder().config._attn_implementation == "eager"


def test_ask_says_what_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "ask", CLIP, QUESTION, "--prefill", SPEC, "--attn", "sdpa", "--json")
    assert "sparse" in [row["stage"] for row in json.loads(out)["trace"]]


def test_serve_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "serve", "--prefill", SPEC, "--dry-run", "--json")
    assert json.loads(out)["prefill"] == SPEC


def test_commands_refuse_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'minference'" in fails(capsys, "serve", "--prefill", "minferenc:0.3", "--dry-run")
    assert "flash-attn-3" in fails(capsys, "serve", "--attn", "flash_attention_3", "--dry-run")
    assert "takes no --prefill" in fails(
        capsys, "eval", "--suite", "speech", "--prefill", "hip:0.3"
    )
    assert "'hip'" in fails(capsys, "profile", CLIP, QUESTION, "--prefill", "hipp:0.3")


def test_completion() -> None:
    assert complete_prefill("sam") == ["sample_attention"]
    assert complete_attn("flash") == ["flash_attention_2", "flash_attention_3"]


def test_bench_rows() -> None:
    """A short run: the mass kept is exact, and all of it where nothing is left out."""
    specs = ("sample_attention:0.9?rows=0.1&block=64", "minference:1.0?block=64")
    some, most = sparse_rows(1024, specs, rounds=1)
    assert 0.5 < some["mass"] < 1 and some["read_share"] < 0.9 and some["speedup"] > 0
    assert most["mass"] == pytest.approx(1, abs=1e-5) and most["read_share"] > 0.99
    assert 0 < some["least_share"] < some["read_share"]
