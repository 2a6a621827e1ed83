"""Result rows and the README tables made from them."""

from __future__ import annotations

import json
import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest

from mmfast.bench import full
from mmfast.bench.report import accuracy, docs
from mmfast.bench.report.charts import accuracy_svg, delay_svg, delays, speed_svg, speeds
from mmfast.bench.report.docs import TABLES, render, write_table
from mmfast.bench.report.table import ReportTable, stamp
from mmfast.bench.results import append, bench_rows, environment, eval_rows, load
from mmfast.core.errors import MmfastError
from mmfast.core.registry import methods

ENVIRONMENT = {
    "versions": {"torch": "2.11.0"},
    "commit": "abc1234",
    "date": "2026-01-02",
    "processor": "Some CPU",
}
README = "\n".join(f"<!-- table:{name} -->\nstale text\n<!-- /table:{name} -->" for name in TABLES)


def eval_document() -> dict[str, Any]:
    def row(reduce: str | None, accuracy: float, kept: float) -> dict[str, Any]:
        by_kind = {"colour": accuracy, "which_first": accuracy - 0.1}
        return {
            "reduce": reduce,
            "accuracy": accuracy,
            "by_kind": by_kind,
            **({"interval": [0.94, 0.98]} if reduce == "evs:0.25" else {}),
            "kept": kept,
            "ttft_ms": 9.0,
        }

    rows = [row(None, 0.97, 288), row("evs:0.25", 0.965, 72), row("evs:0.1", 0.9, 28.8)]
    rows.append(row("fastv@llm3:0.5", 0.8, 144))
    return {"suite": "video", "n": 40, "seed": 7, "model": "tiny-video", "rows": rows}


def bench_document() -> dict[str, Any]:
    def row(reduce: str | None, ms: float, equal: bool) -> dict[str, Any]:
        return {
            "reduce": reduce,
            "stage": "llm",
            "tokens": 1568,
            "kept": 392,
            "noise": 0.012,
            "median_ms": ms,
            "p20_ms": ms * 0.9,
            "p80_ms": ms * 1.1,
            "speedup": 400 / ms,
            "ideal": 4.2,
            "of_ideal": 400 / ms / 4.2,
            "of_oracle": 0.98,
            "selection_ms": 1.5,
            "peak_mb": 2000.0,
            "equal": equal,
        }

    rows = [row(None, 400, True), row("evs:0.25", 100, False), row("evs:1.0", 399, True)]
    shared = {"preset": "tiny", "device": "cpu", "dtype": "float32", "threads": 2, "frames": 8}
    shared |= {"warm_ups": 10}
    return {**shared, "iters": 10, "environment": ENVIRONMENT, "rows": rows}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(README)
    results = tmp_path / "assets" / "results"
    append(results / "eval-video.jsonl", eval_rows(eval_document(), ENVIRONMENT))
    append(results / "bench-cpu.jsonl", bench_rows(bench_document()))
    return tmp_path


def test_round_trip(checkout: Path) -> None:
    assert docs.main(["--check"], checkout) == 1
    assert docs.main([], checkout) == 0
    assert docs.main(["--check"], checkout) == 0
    text = (checkout / "README.md").read_text()
    assert "stale text" not in text
    for method in methods("reducer"):
        assert f"`{method.name}`" in text
    (checkout / "README.md").write_text(text.replace("96.5 (94.0", "99.9 (94.0"))
    assert docs.main(["--check"], checkout) == 1


def test_a_new_row_makes_the_readme_stale(checkout: Path) -> None:
    docs.main([], checkout)
    append(checkout / "assets/results/bench-later.jsonl", bench_rows(bench_document()))
    assert docs.main(["--check"], checkout) == 0  # the same figures again
    document = bench_document()
    document["rows"][1]["median_ms"] = 50.0
    append(checkout / "assets/results/bench-later.jsonl", bench_rows(document))
    assert docs.main(["--check"], checkout) == 1


def test_accuracy_table_says_what_was_not_measured() -> None:
    lines = write_table("accuracy", eval_rows(eval_document(), ENVIRONMENT))
    assert "All tokens: 97.0. Right answers" in lines[0]
    assert "| `evs` | not measured | 96.5 (94.0 to 98.0) | 90.0 | not measured |" in lines
    assert "| `fastv@llm3` | 80.0 | not measured | not measured | not measured |" in lines
    assert "| `uniform` | not measured | not measured | not measured | not measured |" in lines
    assert sum(line.startswith("| `fastv`") for line in lines) == 1
    assert write_table("accuracy", [])[0].startswith("All tokens: not measured")


def test_kinds_take_the_best_reducer_of_each_share() -> None:
    lines = write_table("kinds", eval_rows(eval_document(), ENVIRONMENT))
    assert lines[0] == "| kind of question | all tokens | `evs:0.25` | `evs:0.1` |"
    assert lines[3] == "| which first | 87.0 % | 86.5 % | 80.0 % |"


def test_bench_prints_equal_below_the_noise() -> None:
    lines = write_table("bench", bench_rows(bench_document()))
    assert "noise 1.2 %" in lines[0] and "commit `abc1234`" in lines[0]
    rows = {line.split("|")[1].strip(): line.split("|")[2:] for line in lines[4:]}
    assert rows["`evs:0.25`"][2].strip() == "4.00x"
    assert rows["`evs:1.0`"][2].strip() == "="
    assert rows["stock"][2].strip() == "1"
    assert write_table("bench", []) == ["Not measured."]


def test_later_rows_replace_earlier_ones() -> None:
    old, new = bench_rows(bench_document()), bench_rows(bench_document())
    for row in new:
        row["median_ms"] = 7.0
    assert write_table("bench", [*old, *new]) == write_table("bench", new)


def test_selection_table() -> None:
    row = {"case": "evs, 9 x 4", "textbook_ms": 30.0, "median_ms": 2.0, "speedup": 15.0}
    row |= {"same_indices": False, **ENVIRONMENT}
    lines = write_table("selection", [{**row, "median_ms": 9.0}, row])
    assert lines[-1] == "| evs, 9 x 4 | 30.0 | 2.0 | 15.0x | no |"
    assert len(lines) == 5
    assert write_table("selection", []) == ["Not measured."]


def test_rows_survive_the_file_and_need_no_machine_name(tmp_path: Path) -> None:
    rows = bench_rows(bench_document())
    append(tmp_path / "deep" / "r.jsonl", rows)
    assert load(tmp_path / "deep" / "r.jsonl") == rows
    wanted = {"method", "knobs", "preset", "device", "dtype", "versions", "commit", "date", "n"}
    assert wanted | {"score", "p20_ms", "median_ms", "p80_ms", "peak_mb"} <= set(rows[0])
    text = json.dumps(environment())
    assert str(Path.home()) not in text and str(Path.cwd()) not in text
    document = eval_document() | {"model": str(tmp_path)}
    assert eval_rows(document, ENVIRONMENT)[0]["model"] == tmp_path.name


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"], ids=["cut", "list", "binary"])
def test_bad_rows_are_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(MmfastError) as caught:
        load(path)
    assert "\n" not in str(caught.value) and "r.jsonl" in str(caught.value)


def test_a_folder_is_no_row_file(tmp_path: Path) -> None:
    with pytest.raises(MmfastError, match="cannot write rows"):
        append(tmp_path, [{}])


def test_unknown_marker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MmfastError, match="unknown table 'speed'"):
        render("<!-- table:speed -->\n<!-- /table:speed -->", tmp_path)


def _texts(chart: str) -> set[str]:
    document = xml.dom.minidom.parseString(chart)
    return {node.firstChild.data for node in document.getElementsByTagName("text")}


def test_chart_is_well_formed_and_complete() -> None:
    points = accuracy.points(eval_rows(eval_document(), ENVIRONMENT))
    assert points["evs"] == [(0.1, 0.9), (0.25, 0.965)]
    chart = accuracy_svg(points | {"a<b&c": [(0.05, 0.5)]})
    texts = _texts(chart)
    assert {"evs", "fastv@llm3", "a<b&c", "all tokens", "25%"} <= texts
    assert chart == accuracy_svg(points | {"a<b&c": [(0.05, 0.5)]})  # equal bytes
    assert accuracy_svg({}) == accuracy_svg({"all tokens": [(1.0, 0.9)]}) == ""


def test_delays_are_lines_of_policies() -> None:
    def row(policy: str, lag: float, score: float, source: str = "text, words") -> dict[str, Any]:
        figures = {"lag_share": lag, "score": score, "source": source, "policy": policy}
        return {"bench": "translation", **figures}

    rows = [row("wait:5", 0.3, 0.1), row("wait:5", 0.3, 0.8), row("wait:3", 0.1, 0.6)]
    rows += [row("offline", 1.0, 1.0), row("wait:3", 0.2, 0.5, "speech, s"), {"bench": "modes"}]
    assert delays(rows) == {"wait": [(0.1, 0.6), (0.3, 0.8)], "offline": [(1.0, 1.0)]}
    chart = delay_svg(delays(rows))
    assert {"wait", "offline", "right words"} <= _texts(chart) and chart == delay_svg(delays(rows))
    assert delay_svg({}) == ""


def _cache_rows() -> list[dict[str, Any]]:
    shared = {"suite": "video", "n": 200, "seed": 1000, "model": "tiny-video", "kept": 288}
    shared |= {"date": "2026-01-01", "commit": "abc1234", "reduce": None}
    scores = [(None, 0.98), ("snapkv:0.5", 0.1), ("snapkv:0.5", 0.95), ("quant:4", 0.97)]
    scores.append(("gone:0.5", 0.2))
    rows = [{**shared, "cache": cache, "score": score} for cache, score in scores]
    rows[2]["interval"] = [0.91, 0.97]
    return [*rows, {**shared, "cache": "snapkv:0.25", "reduce": "evs:0.5", "score": 0.3}]


def test_cache_tables_list_every_policy() -> None:
    lines = write_table("caches", [])
    for method in methods("cache"):
        assert sum(line.startswith(f"| [`{method.name}`]") for line in lines) == 1
        assert method.summary.endswith(".") and len(method.summary) < 100
    (line,) = [line for line in lines if line.startswith("| [`snapkv`]")]
    assert "| score | behind the prompt | attn_window |" in line
    assert write_table("cache_accuracy", [])[0].startswith("The whole cache: not measured")


def test_rows_about_caches_are_not_rows_about_reducers() -> None:
    rows = _cache_rows()
    assert accuracy.points(rows) == {"all tokens": [(1.0, 0.98)]}


def test_cache_accuracy_by_share_and_by_spec() -> None:
    lines = write_table("cache_accuracy", _cache_rows())
    assert lines[0].startswith("The whole cache: 98.0.")
    assert "| `snapkv` | 95.0 (91.0 to 97.0) | not measured | not measured |" in lines
    assert "| `lookm` | not measured | not measured | not measured |" in lines
    assert "| `quant:4` | 97.0 |" in lines
    assert not any("gone" in line for line in lines)
    assert lines[-1].startswith("200 questions")


def test_ceilings_and_memory_are_shown_where_rows_have_them() -> None:
    plain = write_table("bench", bench_rows(bench_document()))
    assert "ceilings" not in plain[0] and "of ceiling" not in plain[2]
    document = bench_document()
    document |= {"ceilings": {"copy_gb_s": 14.0, "matmul_tflop_s": 0.091}, "clock": "wall"}
    document["rows"][1] |= {"of_ceiling": 0.87, "scoring_over": 0.004}
    lines = write_table("bench", bench_rows(document))
    assert "copy 14 GB/s, matrix product 0.091 TFLOP/s" in lines[0] and ", wall," in lines[0]
    assert lines[2].endswith("| of ceiling | over SDPA |")
    assert lines[5].endswith("| 0.87 | +0.4 % |")


def test_selection_inside_the_run_has_a_table_of_its_own() -> None:
    document = bench_document()
    chosen = {**document["rows"][1], "stage": "selection", "share": 0.021, "share_of": "ttft"}
    chosen |= {"compact_ms": 0.4, "median_ms": 2.0, "p20_ms": 1.9, "p80_ms": 2.1}
    chosen |= dict.fromkeys(("speedup", "ideal", "of_ideal", "of_oracle"))
    document["rows"].append(chosen)
    lines = write_table("bench", bench_rows(document))
    assert "time to first token" in lines[8]
    assert lines[-1] == "| `evs:0.25` | 392 | 2.0 (1.9 to 2.1) | 0.4 | 1.5 | 2.10 % |"


def _speed_rows(device: str = "cpu", speedup: float = 4.0) -> list[dict[str, Any]]:
    document = bench_document() | {"preset": "llava-onevision-0.5b", "device": device}
    document["rows"][1]["speedup"] = speedup
    return bench_rows(document)


def test_goals_say_what_was_not_measured() -> None:
    for rows in ([], _speed_rows(device="cuda")):
        lines = write_table("goals", rows)
        assert len(lines) == 2 + len(full.GOALS)
        assert all(line.endswith("| not measured |  |") for line in lines[2:])


def test_a_goal_is_met_by_all_rows_or_not_at_all() -> None:
    assert write_table("goals", _speed_rows())[2].endswith("| 3.4x | 4.00x (`evs:0.25`) | yes |")
    slow = _speed_rows(speedup=3.0)
    assert write_table("goals", slow)[2].endswith("| 3.4x | 3.00x (`evs:0.25`) | no |")
    other = [{**row, "reduce": "uniform:0.25", "speedup": 4.5} for row in slow[1:2]]
    ends = "| 3.4x | 3.00x (`evs:0.25`) to 4.50x (`uniform:0.25`) | no |"
    assert write_table("goals", [*slow, *other])[2].endswith(ends)
    inside = [{**row, "reduce": "fastv:0.25"} for row in slow[1:2]]
    assert write_table("goals", inside)[2].endswith("| not measured |  |")


def _even(tokens: int, speedup: float, pays: bool | None, **more: Any) -> dict[str, Any]:
    row = {"suite": "breakeven", "bench": "tokens", "stage": "llm", "reduce": "evs:0.25"}
    row |= {"preset": "tiny", "device": "cpu", "dtype": "float32", "threads": 1, "clock": "wall"}
    row |= {"batch": 1, "tokens": tokens, "speedup": speedup, "pays": pays, "noise": 0.03}
    return {**row, **ENVIRONMENT, **more}


def test_break_even_is_where_everything_larger_pays() -> None:
    rows = [_even(16, 1.2, True), _even(64, 0.7, False), _even(256, 1.1, True)]
    lines = write_table("breakeven", [*rows, _even(1024, 2.5, True)])
    assert lines[2] == "|  | reduce | 16 | 64 | 256 | 1,024 | pays from |"
    assert lines[4].endswith("| `evs:0.25` | 1.20x | 0.70x | 1.10x | 2.50x | 256 |")
    undecided = write_table("breakeven", [*rows, _even(1024, 1.01, None)])
    assert undecided[4].endswith("| 1.10x | = | nowhere here |")
    assert write_table("breakeven", []) == ["Not measured."]


def test_break_even_by_batch_is_a_table_of_its_own() -> None:
    rows = [_even(64, 0.9, False)]
    rows += [_even(64, 1 + b, True, bench="batch", batch=b, stage="decode") for b in (1, 2)]
    lines = write_table("breakeven", rows)
    assert "answers at once, 64 visual tokens each" in lines[6]
    assert lines[-1] == "| one decoding step | `evs:0.25` | 2.00x | 3.00x | 1 |"


def test_speed_chart_has_the_ideal_and_every_method() -> None:
    rows = _speed_rows()
    series, ideal = speeds(rows)
    assert series["evs"] == [(0.25, 4.0), (1.0, pytest.approx(1.0, abs=0.01))]
    assert ideal == [(0.25, 4.2), (1.0, 4.2)]
    assert {"evs", "ideal by FLOPs", "1x", "4x", "25%"} <= _texts(speed_svg(series, ideal))
    assert speed_svg(*speeds([])) == "" == speed_svg(*speeds(_speed_rows(device="cuda")))


def test_a_stamp_names_all_that_was_measured() -> None:
    first = {"date": "2026-11-20", "commit": "aaa"}
    last = {"date": "2026-11-22", "commit": "ddd"}
    between = [{"date": "2026-11-21", "commit": commit} for commit in ("bbb", "ccc")]
    assert stamp(first) == "2026-11-20, commit `aaa`"
    assert stamp(last, first) == "2026-11-20 to 2026-11-22, commits `ddd`, `aaa`"
    assert stamp(first, *between, last) == "2026-11-20 to 2026-11-22, commits `aaa` to `ddd`"
    assert stamp({**first, "commit": None}) == "2026-11-20, commit `none`"


def test_two_columns_of_one_head_are_no_table() -> None:
    table = ReportTable("decode", "step: {a} | faster: {b} | prompt: {c} | faster: {d}")
    with pytest.raises(ValueError, match="two columns of one head"):
        table.markdown([{"a": 1, "b": 2, "c": 3, "d": 4}])
