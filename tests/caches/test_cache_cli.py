"""`cache=` in pipelines, and `--cache` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import CLIP, QUESTION, fails, run

import mmfast
from mmfast.cli.options import complete_cache
from mmfast.core.errors import SpecError


def test_ask_says_what_the_cache_holds(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for cache in ("sink:1.0", "snapkv:64", "snapkv:64+quant:8?residual=0"):
        code, out, _ = run(capsys, "ask", CLIP, QUESTION, "--cache", cache, "--json")
        document = json.loads(out)
        assert code == 0
        assert set(document) == {"answer", "ttft_ms", "visual_tokens", "kept_tokens", "trace"}
        (row,) = [row for row in document["trace"] if row["stage"] == "kv"]
        assert set(row) == {"stage", "tokens_in", "tokens_out", "ms", "peak_bytes"}
        found[cache] = row
    whole, some, packed = found.values()
    assert whole["tokens_out"] == whole["tokens_in"] == some["tokens_in"] > 288
    assert some["tokens_out"] == packed["tokens_out"] == 64
    assert some["peak_bytes"] * whole["tokens_in"] == whole["peak_bytes"] * 64
    assert packed["peak_bytes"] < 0.5 * some["peak_bytes"]


def test_bad_specs_end_before_any_weight_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    for spec, words in (
        ("snapk:64", "did you mean 'snapkv'"),
        ("quant:5", "8, 4 or 2 bits"),
        ("snapkv:9+rekv:2", "would find again"),
    ):
        assert words in fails(capsys, "ask", CLIP, QUESTION, "--model", "no", "--cache", spec)
        assert words in fails(capsys, "eval", "--model", "no", "--cache", spec)
        with pytest.raises(SpecError, match=words):
            mmfast.pipeline("video-qa", model="no", cache=spec)


def test_eval_has_rows_for_caches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out_file = tmp_path / "rows.jsonl"
    options = ["--n", "4", "--cache", "snapkv:32", "--reduce", "random:0.5", "--json"]
    code, out, _ = run(capsys, "eval", *options, "--out", str(out_file))
    rows = json.loads(out)["rows"]
    assert code == 0
    pairs = [(None, None), ("random:0.5", None), (None, "snapkv:32"), ("random:0.5", "snapkv:32")]
    assert [(row["reduce"], row["cache"]) for row in rows] == pairs
    assert all({"accuracy", "by_kind", "kept", "ttft_ms"} <= set(row) for row in rows)
    lines = [json.loads(line) for line in out_file.read_text(encoding="utf-8").splitlines()]
    assert [line["cache"] for line in lines] == [cache for _, cache in pairs]


def test_a_row_about_a_cache_is_no_evidence_about_reducers() -> None:
    from mmfast.planner.candidates import evidence_for, shipped_rows

    plain = evidence_for("video")
    rows = [*shipped_rows(), *({**r, "cache": "snapkv:1", "score": 0.0} for r in shipped_rows())]
    assert plain is not None and evidence_for("video", rows) == plain


def test_completion_knows_the_policies() -> None:
    assert "snapkv" in complete_cache("snap") and "sink+quant" in complete_cache("sink+qu")
